"""Reads the rows that a decision needs and freezes them into a `Situation`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.conf import settings
from django.db.models import Max, Q

from agents.protocol.messages import AssignmentPhase, Phase, SeenPhase
from recovery.domain.continuity import Verdict, VerdictKind, judge
from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.generations import FenceProof, GenerationView, LeaseLimits, RankView, ShareView
from recovery.domain.incident import Incident
from recovery.domain.instructions import JobState
from recovery.domain.lineage import reference_generations
from recovery.domain.loss_band import LOOK_BACK_STEPS
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.silence import (
    OBSERVER_GONE_AFTER_S,
    Contact,
    ObserverView,
    Silence,
    SilenceLimits,
    judge_silence,
)
from recovery.domain.situation import Command, FreshIds, JobView, Situation
from recovery.domain.snapshots import SnapshotPart
from recovery.domain.step_records import ResumeRecord, StateProbe, StepRecord
from recovery.domain.trust import UNKNOWN, Health, Integrity, Trust, appraise
from recovery.domain.witnesses import ProbeView
from recovery.ids import fresh_id
from recovery.models import (
    CheckpointRow,
    GenerationRow,
    IncidentRow,
    Job,
    Node,
    Observer,
    Probe,
    RankRow,
    ShareRow,
    SnapshotRow,
    StepRow,
    Stray,
)
from recovery.store.samples import load_ledger
from recovery.store.save_intervals import save_every
from recovery.store.serialize import from_json

CONTROL_PLANE = "control_plane"
"""Kind of the incidents that stand for the breaker."""

GRANT_S = 3.0
"""A web process grants leases only for this long after it last wrote down whom it had heard."""
_GRANT_SLACK_S = 1.0

PROBES_COUNT_FOR_S = 60.0
"""An older answer of a probe says nothing about now."""

COMPARE_AT_MOST_STEPS = 2000
"""Replayed steps that one verdict looks at; a longer replay is judged by its first part."""


def load_situation(
    job: Job,
    *,
    incident: Incident | None = None,
    command: str = "",
    now: float | None = None,
    fleet: FleetSnapshot | None = None,
) -> Situation:
    """Everything about one job, as of now. Several reads, none of them locked: see `recovery.engine` for why.

    `fleet` is one that was read a moment ago: a large fleet is not read once more for each job.
    """
    at = time.time() if now is None else now
    generations = load_generations(job)
    on_disk = load_trust(job.pk)
    snapshots = load_snapshots(job.pk)
    trust = appraise({**{part.ref: UNKNOWN for part in snapshots}, **on_disk}, generations)
    situation = Situation(
        job=JobView(
            id=job.id,
            name=job.name,
            state=JobState(job.state),
            **_node_counts(job.spec),
            ranks_per_node=job.spec["ranks_per_node"],
            synchronous=job.spec.get("synchronous", True),
            lease=lease_terms(job, generations),
            # Planned with, and only then: what a fleet's failures say is not read for a job that trains.
            save_every="" if job.state == JobState.RUNNING.value else save_every(job, now=at),
            stop_wanted=job.stop_wanted,
            launch_attempts=job.launch_attempts,
            state_since=job.state_since,
        ),
        fleet=fleet or load_fleet(at),
        generations=generations,
        checkpoints=tuple(on_disk),
        snapshots=snapshots,
        trust=trust,
        fresh=FreshIds(plan_id=fresh_id("plan"), run_id=fresh_id("run"), generation=job.generation + 1),
        command=Command(command) if command else None,
        probes=load_probes(at),
    )
    if incident is None or incident.plan is None:
        return situation
    new = situation.generation(incident.plan.generation)
    if new is None or not new.run_ordered:
        return situation
    verdict, caught_up_at = _judge(job, incident, situation, new)
    over = verdict.caught_up or new.ended_well or verdict.kind is VerdictKind.BROKEN
    samples = load_ledger(job, generations, generation=new.number) if over else None
    return Situation(**{**vars(situation), "verdict": verdict, "caught_up_at": caught_up_at, "samples": samples})


def load_trust(job_id: str) -> dict[CheckpointRef, Trust]:
    """What the rows know of each checkpoint that may ever be resumed from; `trust.appraise` adds what follows."""
    rows = CheckpointRow.objects.filter(job=job_id, after_fence=False)
    return {
        CheckpointRef(generation=row.generation_number, step=row.step): Trust(
            integrity=Integrity(row.integrity),
            integrity_reason=row.integrity_reason,
            health=Health(row.health),
            health_reason=row.health_reason,
            absolved_through=row.absolved_through,
        )
        for row in rows
    }


def load_snapshots(job: str) -> tuple[SnapshotPart, ...]:
    """What nodes have said to hold in memory for a job, and may still be resumed from."""
    rows = SnapshotRow.objects.filter(job=job).select_related("node")
    return tuple(
        SnapshotPart(
            ref=CheckpointRef(generation=row.generation_number, step=row.step),
            world_size=row.world_size,
            rank=row.rank,
            node=row.node.name,
            boot_id=row.boot_id,
        )
        for row in rows
    )


def _node_counts(spec: dict[str, Any]) -> dict[str, Any]:
    nodes = spec["nodes"]
    if isinstance(nodes, int):
        return {"node_count": nodes}
    return {"node_count": nodes["max"], "min_nodes": nodes["min"], "multiple_of": nodes.get("multiple_of", 1)}


def lease_terms(job: Job, generations: Sequence[GenerationView]) -> LeaseLimits:
    """What the job's next generation begins with: its spec, and whatever its pace has asked for since."""
    terms = from_json(job.spec.get("phase_limits_s") or {}, LeaseLimits)
    for generation in generations:
        if generation.lease is not None:
            known = generation.lease
            terms = replace(terms, step_s=max(terms.step_s, known.step_s), save_s=max(terms.save_s, known.save_s))
    return terms


def load_fleet(now: float) -> FleetSnapshot:
    """Every node that may be looked at for placement, and whether absence may be believed."""
    observers = load_observers()
    unconfirmed = _unconfirmed()
    breaker = IncidentRow.objects.filter(kind=CONTROL_PLANE, ended=False).exists()
    rearmed = IncidentRow.objects.filter(kind=CONTROL_PLANE, ended=True).aggregate(at=Max("ended_at"))["at"]
    return FleetSnapshot(
        nodes=tuple(
            _node_view(node, observers, unconfirmed.get(node.pk, ""), now)
            for node in Node.objects.filter(revoked=False).defer("gpus")  # by far the most of a row
        ),
        breaker_open=breaker,
        rearmed_at=rearmed or 0.0,
    )


def silence_limits() -> SilenceLimits:
    """As configured."""
    return SilenceLimits(suspect_s=settings.EVERSTEP_SUSPECT_AFTER_S, lost_s=settings.EVERSTEP_LOST_AFTER_S)


def load_observers() -> tuple[ObserverView, ...]:
    """Every web process that has heard agents lately, or did before it went."""
    return tuple(
        ObserverView(name=row.name, since=row.since, beat_at=row.beat_at, lag_s=row.lag_s)
        for row in Observer.objects.all()
    )


def _node_view(node: Node, observers: Sequence[ObserverView], unconfirmed: str, now: float) -> NodeView:
    silence = judge_silence(
        last_heard_at=node.last_heard_at, observer=node.observer, observers=observers, now=now, limits=silence_limits()
    )
    heard_at_most, observed_until = _contact_bounds(node, observers, now)
    return NodeView(
        name=node.name,
        address=node.address,
        health=_health(node, silence),
        slots=int(node.facts.get("slots", 1)),
        claimed_by=node.claimed_by_id,
        cordoned=node.cordoned,
        rack=str(node.facts.get("rack", "")),
        contact=silence.contact,
        last_heard_at=node.last_heard_at,
        silent_s=silence.silent_s,
        heard_at_most=heard_at_most,
        observed_until=observed_until,
        boot_id=node.boot_id,
        quarantined=node.quarantine_reason if node.quarantined_boot_id else "",
        unconfirmed=unconfirmed,
    )


def _contact_bounds(node: Node, observers: Sequence[ObserverView], now: float) -> tuple[float | None, float]:
    """(the last moment that can have renewed a lease of this node, the moment up to which that is known)."""
    own = next((seen for seen in observers if seen.name == node.observer), None)
    if own is None or node.last_heard_at is None:
        return None, now
    if now - own.beat_at <= OBSERVER_GONE_AFTER_S:
        return node.last_heard_at, own.beat_at
    # It may have gone on answering for a while without writing it down, but not for longer than it may.
    return max(node.last_heard_at, own.beat_at + GRANT_S + _GRANT_SLACK_S), now


def _health(node: Node, silence: Silence) -> NodeHealth:
    if not node.session or silence.contact in (Contact.LOST, Contact.UNOBSERVED):
        return NodeHealth.UNKNOWN
    return NodeHealth.UNHEALTHY if node.unhealthy_reason else NodeHealth.HEALTHY


def _unconfirmed() -> dict[int, str]:
    """Nodes whose agents have not yet said themselves that a generation is gone, though it is proven another way.

    And nodes that run one of which this database does not know, since it is older.
    """
    rows = ShareRow.objects.filter(
        proof__isnull=False, confirmed_at__isnull=True, generation__run_ordered_at__isnull=False
    ).values_list("node_id", "generation__job_id", "generation__number")
    strays = Stray.objects.values_list("node_id", "job_id", "number")
    return {node: f"generation {number} of {job}" for node, job, number in (*strays, *rows)}


def load_probes(now: float) -> tuple[ProbeView, ...]:
    """The newest answered probe of each node, unless it is too old to say anything."""
    newest: dict[str, ProbeView] = {}
    rows = Probe.objects.filter(asked_at__gt=now - PROBES_COUNT_FOR_S, outcome__in=("reachable", "unreachable"))
    for row in rows.select_related("node", "prober").order_by("asked_at"):
        newest[row.node.name] = ProbeView(
            node=row.node.name,
            prober=row.prober.name,
            asked_at=row.asked_at,
            reachable=row.outcome == "reachable",
            detail=row.detail,
        )
    return tuple(newest.values())


def load_generations(job: Job) -> tuple[GenerationView, ...]:
    """All generations of a job, oldest first, each with its shares and ranks."""
    rows = GenerationRow.objects.filter(job=job).order_by("number").prefetch_related("shares__node", "ranks__node")
    return tuple(generation_view(row) for row in rows)


def generation_view(row: GenerationRow) -> GenerationView:
    return GenerationView(
        plan=from_json(row.plan, RecoveryPlan),
        wanted=AssignmentPhase(row.wanted),
        shares=tuple(_share_view(share) for share in row.shares.all()),
        ranks=tuple(_rank_view(rank) for rank in row.ranks.all()),
        broken_continuity=row.broken_continuity,
        run_ordered=row.run_ordered_at is not None,
        lease=from_json(row.lease, LeaseLimits) if row.lease else None,
    )


def _share_view(row: ShareRow) -> ShareView:
    return ShareView(
        node=row.node.name,
        seen=SeenPhase(row.seen) if row.seen else None,
        reason=row.reason,
        detail=row.detail,
        master_port=row.master_port,
        fingerprint=row.fingerprint,
        fingerprint_parts=row.fingerprint_parts,
        proof=from_json(row.proof, FenceProof) if row.proof else None,
        boot_id=row.boot_id,
        keeps_lease=row.keeps_lease,
        confirmed=row.confirmed_at is not None,
    )


def _rank_view(row: RankRow) -> RankView:
    return RankView(
        rank=row.rank,
        node=row.node.name,
        pid=row.pid,
        exited_at=row.exited_at,
        exit_recorded_at=row.exit_recorded_at,
        exit_code=row.exit_code,
        signal=row.signal,
        detail=row.detail,
        resumed_step=row.resumed_step,
        resumed_at=row.resumed_at,
        saved_digest=row.saved_digest,
        live_digest=row.live_digest,
        first_step_at=row.first_step_at,
        last_step=row.last_step,
        phase=Phase(row.phase) if row.phase else None,
        progress_at=row.progress_at,
        progress_seen_at=row.progress_seen_at,
        pace_s=row.pace_s,
        finished_step=row.finished_step,
        nonfinite_since=row.nonfinite_since,
        nonfinite_count=row.nonfinite_count,
        nonfinite_at=row.nonfinite_at,
    )


def _judge(job: Job, incident: Incident, situation: Situation, new: GenerationView) -> tuple[Verdict, float | None]:
    """The verdict on a new generation as far as its records go, and when it got beyond the old one's last step."""
    parent_step = new.plan.parent.step if new.plan.parent else 0
    reached = max(incident.reached_step or 0, parent_step)
    last = min(reached, parent_step + COMPARE_AT_MOST_STEPS)
    # One step beyond the last one that counts, so that a replay too long to be compared in full still ends.
    replayed = _records(job, new.number, first=parent_step + 1, last=last, beyond=reached + 1)
    reference: dict[tuple[int, int], StepRecord] = {}
    by_number = {generation.number: generation for generation in situation.generations}
    for number in reference_generations(by_number, upto=new.number):
        older = by_number[number]
        if older.plan.world_size == new.plan.world_size:
            # The parent's own step is read too, since the first replayed span must follow it, and some before it.
            # From where its loss was lost, an older generation is no measure of what it should be.
            sound_to = last if older.nonfinite_step is None else min(last, older.nonfinite_step - 1)
            reference = {**_records(job, number, first=parent_step - LOOK_BACK_STEPS, last=sound_to), **reference}
    verdict = judge(
        parent=new.plan.parent,
        world_size=new.plan.world_size,
        same_topology=_same_topology(incident, situation, new),
        reached_step=incident.reached_step,
        resumes=_resumes(job, new.number),
        reference=reference,
        replayed=replayed,
    )
    beyond = _first_beyond(job, new.number, reached)
    complete = len(beyond) == new.plan.world_size
    return verdict, max(beyond.values()) if complete else None


def _records(
    job: Job, generation: int, *, first: int, last: int, beyond: int | None = None
) -> dict[tuple[int, int], StepRecord]:
    """Steps `first` to `last` and the one beyond, by rank and step.

    In one query: ranks go on while this reads, and where the one beyond is told, those before it are too.
    """
    rows = StepRow.objects.filter(Q(step__range=(first, last)) | Q(step=beyond), job=job, generation_number=generation)
    return {
        (row.rank, row.step): StepRecord(
            generation=generation,
            rank=row.rank,
            step=row.step,
            at=row.at,
            loss=_loss(row),
            learning_rate=row.learning_rate,
            grad_norm=row.grad_norm,
            epoch=row.epoch,
            span_start=row.span_start,
            span_stop=row.span_stop,
            indices_digest=row.indices_digest or None,
            probe=StateProbe(digests=row.probe["digests"], unmoved=tuple(row.probe["unmoved"])) if row.probe else None,
        )
        for row in rows
    }


def _loss(row: StepRow) -> float | None:
    return float(row.loss_text) if row.loss_text else row.loss


def finite_or_text(value: float | None) -> tuple[float | None, str]:
    """A loss as its two columns: databases disagree on NaN and infinity."""
    if value is None or math.isfinite(value):
        return value, ""
    return None, str(value)


def _first_beyond(job: Job, generation: int, reached: int) -> dict[int, float]:
    """When each rank finished its first step beyond `reached`."""
    rows = StepRow.objects.filter(job=job, generation_number=generation, step=reached + 1)
    return {row.rank: row.at for row in rows}


def _resumes(job: Job, generation: int) -> list[ResumeRecord]:
    rows = RankRow.objects.filter(
        generation__job=job, generation__number=generation, resumed_step__isnull=False
    ).order_by("rank")
    return [
        ResumeRecord(
            rank=row.rank,
            step=row.resumed_step or 0,
            saved_digest=row.saved_digest,
            live_digest=row.live_digest,
            deterministic=row.deterministic,
        )
        for row in rows
    ]


def _same_topology(incident: Incident, situation: Situation, new: GenerationView) -> bool:
    """Same world size and the same kind of hardware on every node: then equal state must give equal bits."""
    broken = situation.generation(incident.broken_generation)
    if broken is None or broken.plan.world_size != new.plan.world_size:
        return False
    names = {*broken.plan.nodes, *new.plan.nodes}
    models = Node.objects.filter(name__in=names).values_list("facts__gpu_model", flat=True)
    return len(set(models)) == 1
