"""The ledger of checkpoints: facts about saves become rows, and the sweep keeps what follows from them.

Ingest calls the `note_` functions, the sweep `look_after_checkpoints`, the pages and API `request_save` and `absolve`.
What a row says is never needed for safety: each decision appraises the checkpoints anew (`domain/trust.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from django.db import transaction
from django.db.models import F, Max, Min

from agents.protocol.messages import (
    AssignmentPhase,
    CheckpointRehashed,
    SaveInTrouble,
    SaveTroubleKind,
)
from recovery.domain.generations import GenerationView
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.domain.last_good import LastGood, judge_last_good
from recovery.domain.lineage import lineage_limits
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.retention import choose_pins
from recovery.domain.slow_saves import COMPARED, judge_save_time
from recovery.domain.timeline import Entry, EntryKind
from recovery.domain.trust import (
    REFERENCE_STEPS,
    SANE_STEPS,
    Health,
    Integrity,
    Trust,
    appraise,
    judge_sanity,
    risen,
)
from recovery.errors import CommandRefused, NotFound
from recovery.models import CheckpointRow, GenerationRow, IncidentRow, Job, Node, SaveTrouble, StepRow
from recovery.snapshots import forget_job
from recovery.store import from_json
from recovery.store.situations import load_generations, load_trust
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change, push_orders

log = logging.getLogger(__name__)

SLOW = "slow"
"""Kind of a trouble that the server finds itself, beside those that ranks tell of."""
TROUBLES_KEPT = 200
"""Rows of one job; the job's own counters know of all."""
_JUDGED_AT_ONCE = 20
_DAMAGED, _MISSING = "CheckpointDamaged", "CheckpointMissing"
"""The training side's names for files that are not what their manifest says, and for those that are not there."""


# --- Facts ----------------------------------------------------------------------------------------------------------


def note_rehashed(generation: GenerationRow, fact: CheckpointRehashed, *, at: float) -> None:
    """The files of a checkpoint were read again: all are whole, or one is not. Must run inside a transaction."""
    row = CheckpointRow.objects.filter(
        job_id=generation.job_id, generation_number=generation.number, step=fact.step
    ).first()
    if row is None:
        return
    if fact.ok:
        _raise_integrity(row, Integrity.REHASHED, f"rank {fact.rank} read all of it again after the save", at)
    else:
        _raise_integrity(row, Integrity.DAMAGED, fact.reason or f"rank {fact.rank} found it damaged", at)


def note_refused_load(generation: GenerationRow, detail: str, *, at: float) -> None:
    """A rank died before its first step; if its last words are that the checkpoint is damaged, it is not used again."""
    plan = from_json(generation.plan, RecoveryPlan)
    parent = plan.parent
    if parent is not None and plan.parent_in_memory and (_DAMAGED in detail or _MISSING in detail):
        forget_job(generation.job_id)  # from here on only the disk is counted on, until ranks keep something again
    if parent is None or _DAMAGED not in detail:
        return
    row = CheckpointRow.objects.filter(
        job_id=generation.job_id, generation_number=parent.generation, step=parent.step
    ).first()
    if row is not None:
        _raise_integrity(row, Integrity.DAMAGED, detail.strip()[:1000], at)


def _raise_integrity(row: CheckpointRow, to: Integrity, reason: str, at: float) -> None:
    integrity = risen(Integrity(row.integrity), to)
    if integrity.value == row.integrity:
        return
    sound = CheckpointRow.objects.filter(pk=row.pk).exclude(integrity=Integrity.DAMAGED.value)
    if not sound.update(integrity=integrity.value, integrity_reason=reason, integrity_at=at):
        return  # another node has found it damaged meanwhile
    row.refresh_from_db(fields=["integrity", "integrity_reason", "integrity_at"])
    if integrity is Integrity.DAMAGED:
        log.error("job=%s checkpoint=%d:%d is damaged: %s", row.job_id, row.generation_number, row.step, reason)
        _tell(row.job_id, f"The checkpoint of step {row.step} of generation {row.generation_number} is damaged, and "
              f"is not used: {reason}", at)  # fmt: skip
    announce_change(f"job:{row.job_id}")


def note_trouble(generation: GenerationRow, fact: SaveInTrouble, *, at: float) -> None:
    """A save failed or was left out: count it and say so; the last good checkpoint stays. Inside a transaction."""
    job_id = generation.job_id
    _, fresh = SaveTrouble.objects.get_or_create(
        job_id=job_id,
        generation_number=generation.number,
        rank=fact.rank,
        step=fact.step,
        kind=fact.kind.value,
        attempt=min(fact.attempt, 2**31 - 1),
        defaults={"reason": fact.reason, "at": at},
    )
    if not fresh:
        return
    failed = fact.kind is SaveTroubleKind.FAILED
    counter = "saves_failed" if failed else "saves_skipped"
    Job.objects.filter(pk=job_id).update(**{counter: F(counter) + 1})
    what = "failed" if failed else "was skipped"
    log.warning(
        "job=%s generation=%d rank=%d: the save of step %d %s (attempt %d): %s",
        job_id, generation.number, fact.rank, fact.step, what, fact.attempt, fact.reason,
    )  # fmt: skip
    _tell(job_id, f"The save of step {fact.step} {what}{': ' + fact.reason if fact.reason else '.'}", at)
    _forget_old_troubles(job_id)
    announce_change(f"job:{job_id}")


def note_save_time(generation: GenerationRow, step: int, save_time_s: float | None, *, at: float) -> None:
    """A checkpoint is complete: say so if that took far longer than usual. Must run inside a transaction."""
    if save_time_s is None:
        return
    known = CheckpointRow.objects.filter(job_id=generation.job_id, save_time_s__isnull=False)
    others = known.exclude(generation_number=generation.number, step=step).order_by("-saved_at")
    before = [seconds for seconds in others.values_list("save_time_s", flat=True)[:COMPARED] if seconds is not None]
    reason = judge_save_time(save_time_s, before=before)
    if not reason:
        return
    SaveTrouble.objects.get_or_create(
        job_id=generation.job_id,
        generation_number=generation.number,
        rank=0,
        step=step,
        kind=SLOW,
        attempt=1,
        defaults={"reason": reason, "at": at},
    )
    job_id, number = generation.job_id, generation.number
    log.warning("job=%s generation=%d: the save of step %d was slow: %s", job_id, number, step, reason)
    _tell(job_id, f"The save of step {step} was slow: {reason}.", at)
    _forget_old_troubles(job_id)


def _forget_old_troubles(job_id: str) -> None:
    kept = SaveTrouble.objects.filter(job=job_id).values_list("pk", flat=True)[TROUBLES_KEPT : 2 * TROUBLES_KEPT]
    SaveTrouble.objects.filter(pk__in=list(kept)).delete()


def _tell(job_id: str, text: str, at: float) -> None:
    """Put a sentence on the timeline of the job's open incident, if there is one."""
    for row in IncidentRow.objects.filter(job=job_id, ended=False):
        IncidentRow.objects.filter(pk=row.pk).update(version=F("version"))
        announce(f"incident:{row.pk}", append_entries(row.pk, [Entry(kind=EntryKind.FACT, at=at, text=text)]))


# --- What follows ---------------------------------------------------------------------------------------------------


def look_after_checkpoints(job_id: str) -> None:
    """Keep a job's ledger: which checkpoints are clean or tainted by now, which are pinned, how old the last is."""
    job = Job.objects.filter(pk=job_id).first()
    if job is None or job.behind_since is not None:
        return
    generations = load_generations(job)
    known = load_trust(job_id)
    if not known and not generations:
        return
    now = time.time()
    found = {**known, **_newly_clean(job_id, known, generations)}
    found = appraise(found, generations)
    with transaction.atomic():
        _write_down(job_id, known, found, now)
        _pin(job, choose_pins(found, generations))
    _watch_age(job, last_good(job_id, generations, found, job.spec, now=now), now)


def _newly_clean(
    job_id: str, known: Mapping[CheckpointRef, Trust], generations: Sequence[GenerationView]
) -> dict[CheckpointRef, Trust]:
    """Checkpoints whose next steps have all been made by now: clean, or with the reason why not."""
    judged: dict[CheckpointRef, Trust] = {}
    for generation in reversed(generations):
        ranks = generation.ranks
        if len(ranks) != generation.plan.world_size:
            continue
        common = min(rank.last_step or 0 for rank in ranks)
        open_ones = sorted(
            ref
            for ref, trust in known.items()
            if ref.generation == generation.number
            and trust.health is Health.UNKNOWN
            and not trust.health_reason
            and ref.step + SANE_STEPS <= common
        )
        for ref in open_ones[-_JUDGED_AT_ONCE:]:
            sanity = judge_sanity(
                ref.step, losses=_losses(job_id, ref), world_size=generation.plan.world_size, sane_steps=SANE_STEPS
            )
            if sanity.sane is not None:
                health = Health.CLEAN if sanity.sane else Health.UNKNOWN
                trust = known[ref]
                judged[ref] = Trust(**{**vars(trust), "health": health, "health_reason": sanity.reason})
    return judged


def _losses(job_id: str, ref: CheckpointRef) -> dict[tuple[int, int], float | None]:
    rows = StepRow.objects.filter(
        job=job_id,
        generation_number=ref.generation,
        step__gt=ref.step - REFERENCE_STEPS,
        step__lte=ref.step + SANE_STEPS,
    ).values_list("rank", "step", "loss", "loss_text")
    return {(rank, step): float(text) if text else loss for rank, step, loss, text in rows}


def _write_down(
    job_id: str, known: Mapping[CheckpointRef, Trust], found: Mapping[CheckpointRef, Trust], now: float
) -> None:
    for ref, trust in found.items():
        if trust == known[ref]:
            continue
        row = CheckpointRow.objects.filter(job=job_id, generation_number=ref.generation, step=ref.step)
        judged = 0
        if trust.health is not known[ref].health or trust.health_reason != known[ref].health_reason:
            judged = row.exclude(health=Health.TAINTED.value).update(
                health=trust.health.value, health_reason=trust.health_reason, health_at=now
            )
        if trust.integrity is not known[ref].integrity:
            row.exclude(integrity=Integrity.DAMAGED.value).update(
                integrity=trust.integrity.value, integrity_reason=trust.integrity_reason, integrity_at=now
            )
        if judged and trust.health is Health.TAINTED:
            log.error("job=%s checkpoint=%d:%d is tainted: %s", job_id, ref.generation, ref.step, trust.health_reason)
            _tell(job_id, f"The checkpoint of {ref} is tainted, and is never loaded again: {trust.health_reason}.", now)
        announce_change(f"job:{job_id}")


def _pin(job: Job, pins: Sequence[CheckpointRef]) -> None:
    names = [f"{ref.generation}:{ref.step}" for ref in pins]
    if names == job.pinned:
        return
    Job.objects.filter(pk=job.pk).update(pinned=names)
    _bump(job.pk)


def _bump(job_id: str) -> None:
    """The nodes on which the job runs have new orders."""
    running = GenerationRow.objects.filter(job=job_id, wanted=AssignmentPhase.RUN.value)
    Node.objects.filter(shares__generation__in=running).update(revision=F("revision") + 1)
    push_orders()


# --- The age of the last good one -----------------------------------------------------------------------------------


def last_good(
    job_id: str,
    generations: Sequence[GenerationView],
    trust: Mapping[CheckpointRef, Trust],
    spec: Mapping[str, object],
    *,
    now: float,
) -> LastGood | None:
    """How old the last good checkpoint of a job is while it trains; None while it does not."""
    newest = generations[-1] if generations else None
    if newest is None or newest.wanted is not AssignmentPhase.RUN or not newest.stepping or newest.ended_well:
        return None
    limits = lineage_limits(generations)
    rows = CheckpointRow.objects.filter(job=job_id, after_fence=False)
    usable = rows.filter(generation_number__in=list(limits)).order_by("-saved_at")
    saves = [
        saved_at
        for number, step, saved_at in usable.values_list("generation_number", "step", "saved_at")[:50]
        if (known := trust.get(CheckpointRef(generation=number, step=step))) is not None and known.usable
    ]
    own = rows.filter(generation_number=newest.number).order_by("-saved_at").values_list("saved_at", flat=True)[:20]
    limit = spec.get("last_good_limit_s")
    return judge_last_good(
        usable_saved_at=saves,
        saved_at=list(own),
        training_since=max((rank.first_step_at or now for rank in newest.ranks), default=now),
        wanted_limit_s=float(limit) if isinstance(limit, int | float) else None,
        now=now,
    )


def _watch_age(job: Job, found: LastGood | None, now: float) -> None:
    """Page once when the last good checkpoint has become too old, and again only after there was a newer one."""
    if found is None or not found.too_old:
        if found is not None and job.last_good_paged_at is not None:
            Job.objects.filter(pk=job.pk).update(last_good_paged_at=None)
            announce_change(f"job:{job.pk}")
        return
    if not Job.objects.filter(pk=job.pk, last_good_paged_at=None).update(last_good_paged_at=now):
        return
    log.error(
        "page: job=%s its last good checkpoint is %.0f s old, the limit is %.0f s (%s): a fault would cost all of it",
        job.pk, found.age_s, found.limit_s, found.reason,
    )  # fmt: skip
    announce_change(f"job:{job.pk}")


# --- What people ask for --------------------------------------------------------------------------------------------


def request_save(job_id: str, *, by: str, reason: str = "") -> Job:
    """Want one checkpoint now, at the next step that all ranks can agree on. Raises `NotFound`, `CommandRefused`."""
    with transaction.atomic():
        job = _find(job_id)
        if job.state != JobState.RUNNING.value:
            raise CommandRefused(f"Job {job.name} is {job.state}: only a running job can save now.")
        Job.objects.filter(pk=job_id).update(
            save_request=F("save_request") + 1,
            save_requested_at=time.time(),
            save_requested_by=by[:150],
            save_request_reason=reason[:400],
        )
        _bump(job_id)
        announce_change(f"job:{job_id}")
    job.refresh_from_db()
    return job


def request_saves_on(node_name: str, *, by: str, reason: str) -> list[str]:
    """A notice of maintenance: every job that runs on the node saves now. Returns their ids. Raises `NotFound`."""
    node = Node.objects.filter(name=node_name).first()
    if node is None:
        raise NotFound(f"There is no node {node_name}.")
    running = Job.objects.filter(
        state=JobState.RUNNING.value,
        generations__wanted=AssignmentPhase.RUN.value,
        generations__shares__node=node,
    ).distinct()
    jobs = list(running.values_list("pk", flat=True))
    for job_id in jobs:
        request_save(job_id, by=by, reason=f"{node_name}: {reason}")
    return jobs


def saved_since_request(job: Job) -> int | None:
    """The step of the first checkpoint after the newest request; None while there is none."""
    if job.save_requested_at is None:
        return None
    rows = CheckpointRow.objects.filter(job=job, after_fence=False, saved_at__gte=job.save_requested_at)
    step: int | None = rows.aggregate(step=Min("step"))["step"]
    return step


def absolve(job_id: str, *, generation: int, step: int, by: str) -> None:
    """An operator's word that a tainted checkpoint is sound, for example since the script was what had been wrong.

    What generations did until now counts no longer against it. Raises `NotFound`, `CommandRefused`.
    """
    with transaction.atomic():
        job = _find(job_id)
        row = CheckpointRow.objects.filter(job=job, generation_number=generation, step=step).first()
        if row is None:
            raise NotFound(f"Job {job.name} has no checkpoint of step {step} of generation {generation}.")
        if row.health != Health.TAINTED.value:
            raise CommandRefused(f"Checkpoint {generation}:{step} of {job.name} is {row.health}, not tainted.")
        if job.state in {state.value for state in JOB_ENDS}:
            raise CommandRefused(f"Job {job.name} has ended ({job.state}): nothing is resumed any more.")
        newest = GenerationRow.objects.filter(job=job).aggregate(number=Max("number"))["number"] or 0
        ref = CheckpointRef(generation=generation, step=step)
        again = appraise({ref: Trust(absolved_through=newest)}, load_generations(job))[ref]
        if again.health is Health.TAINTED:
            raise CommandRefused(f"Checkpoint {generation}:{step} of {job.name} stays tainted: {again.health_reason}.")
        row.health, row.health_at = Health.UNKNOWN.value, time.time()
        row.health_reason = f"{by} has absolved it; before, it was tainted: {row.health_reason}"
        row.absolved_through = newest
        row.save(update_fields=["health", "health_at", "health_reason", "absolved_through"])
        log.warning("job=%s checkpoint=%d:%d was absolved by %s", job_id, generation, step, by)
        _tell(job_id, f"{by} says that the checkpoint of {ref} is sound: it may be loaded again.", time.time())
        announce_change(f"job:{job_id}")


def _find(job_id: str) -> Job:
    job = Job.objects.filter(pk=job_id).first()
    if job is None:
        raise NotFound(f"There is no job {job_id}.")
    return job
