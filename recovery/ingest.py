"""Facts from agents become rows, exactly once, and open or join incidents in the same transaction.

The agents' consumer hands over batches in order. A fact names a job and a generation; it is taken only if this node
has a share of that generation, so that an agent can speak for nobody else.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.db import DataError, transaction
from django.db.models import F, Q

from agents.protocol.messages import (
    AGENT_PROOFS,
    AssignmentPhase,
    AssignmentReport,
    CheckpointRehashed,
    CheckpointSaved,
    FaultReport,
    FromAgent,
    OutboxGap,
    Phase,
    ProbeReport,
    ProofKind,
    RankExited,
    RankFinished,
    RankPhase,
    RankResumed,
    RankStarted,
    SaveInTrouble,
    SeenPhase,
    SnapshotKept,
    StepReports,
    StopProof,
)
from recovery import checkpoints, drills, proofs, snapshots
from recovery.domain.diagnosis import diagnose
from recovery.domain.generations import NONFINITE_STEPS, FenceProof, LeaseLimits
from recovery.domain.instructions import JOB_ENDS
from recovery.domain.lease import raised
from recovery.domain.timeline import Entry, EntryKind
from recovery.domain.trust import Nonfinite, fold_loss
from recovery.incidents import open_or_join
from recovery.models import (
    CheckpointRow,
    Drill,
    GenerationRow,
    IncidentRow,
    Job,
    Node,
    Probe,
    RankRow,
    ShareRow,
    StepRow,
    Stray,
)
from recovery.store import from_json, to_json
from recovery.store.situations import finite_or_text, generation_view
from recovery.store.timelines import append_entries
from recovery.strays import forget_stray, note_stray, take_up
from recovery.wakeup import announce, announce_change, ask_to_advance, push_orders

log = logging.getLogger(__name__)

_UNSTORABLE = (DataError, ValueError, OverflowError)
"""What a database or its driver says of a value that it can never hold, such as a number beyond its column."""


class _Superseded(Exception):
    """A newer connection of the node has taken over while a batch was being stored: the batch is undone."""


@dataclass
class _Batch:
    """What one transaction of ingest touches."""

    node: Node
    offset_s: float
    look_at: set[str] = field(default_factory=set)
    """Jobs that the engine should look at."""
    refused: int = 0
    """Facts about generations that the node has no share of."""
    _generations: dict[tuple[str, int], GenerationRow | None] = field(default_factory=dict)
    _strays: frozenset[tuple[str, int]] | None = None

    def generation(self, job: str, number: int) -> GenerationRow | None:
        """The generation, if this node has a share of it."""
        key = (job, number)
        if key not in self._generations:
            self._generations[key] = (
                GenerationRow.objects.select_related("job")
                .filter(job_id=job, number=number, shares__node=self.node)
                .first()
            )
        return self._generations[key]

    def runs_another_plan(self, job: str, number: int) -> bool:
        """Whether this node runs another plan of a known number: what its ranks say is not about the known one."""
        if self._strays is None:
            self._strays = frozenset(Stray.objects.filter(node=self.node).values_list("job_id", "number"))
        return (job, number) in self._strays

    def note_stray(self, report: AssignmentReport) -> None:
        note_stray(self.node, report, at=self.server_time(report.at))
        self._strays = None

    def forget_stray(self, report: AssignmentReport) -> None:
        """Of one number an agent runs one plan: its last word of the other was lost."""
        forget_stray(self.node, report)
        self._strays = None

    def server_time(self, at: float) -> float:
        """An agent's time on the server's clock, never in the future."""
        now = time.time()
        shifted = at + self.offset_s
        return min(max(shifted, 0.0), now) if math.isfinite(shifted) else now


def store_facts(
    node_id: int, facts: Sequence[tuple[int, FromAgent]], *, session: str, offset_s: float | None
) -> int | None:
    """Store a batch of durable messages and return the sequence number through which all is committed.

    `offset_s` is what to add to the agent's clock, None before its first heartbeat: then what was known of it counts.
    Returns None if `session` is no longer the node's session: a newer connection has taken over and sends them again.
    """
    try:
        try:
            return _store_batch(node_id, facts, session=session, offset_s=offset_s, apart=False)
        except _UNSTORABLE:
            # A fact that no database takes must not hold up for ever whatever else this node has to say.
            return _store_batch(node_id, facts, session=session, offset_s=offset_s, apart=True)
    except _Superseded:
        return None


def _store_batch(
    node_id: int, facts: Sequence[tuple[int, FromAgent]], *, session: str, offset_s: float | None, apart: bool
) -> int:
    """All or nothing; `apart` leaves out, one by one, what cannot be stored. Raises `_Superseded`."""
    with transaction.atomic():
        node = Node.objects.get(pk=node_id)
        if node.session != session:
            raise _Superseded
        batch = _Batch(node=node, offset_s=node.clock_offset_s if offset_s is None else offset_s)
        through = node.acknowledged_seq
        for seq, fact in facts:
            if seq <= through:
                continue
            if apart:
                _store_or_leave_out(batch, seq, fact)
            else:
                _store(batch, fact)
            through = seq
        # By the session once more: it may have ended since it was read, and a fresh outbox counts from 1 again.
        if not Node.objects.filter(pk=node_id, session=session).update(acknowledged_seq=through):
            raise _Superseded
        for job_id in batch.look_at:
            _ask(job_id)
    if batch.refused:
        log.warning("node=%s refused=%d facts about generations that it has no share of", node.name, batch.refused)
    return through


def _store_or_leave_out(batch: _Batch, seq: int, fact: FromAgent) -> None:
    try:
        with transaction.atomic():
            _store(batch, fact)
    except _UNSTORABLE as err:
        log.error("node=%s %s %d cannot be stored and is left out: %s", batch.node.name, type(fact).__name__, seq, err)


def _ask(job_id: str) -> None:
    incident = IncidentRow.objects.filter(job_id=job_id, ended=False).values_list("pk", flat=True).first()
    if incident is not None:
        ask_to_advance(incident=incident)
    else:
        ask_to_advance(job=job_id)


def _without_nul(value: Any) -> Any:
    """PostgreSQL stores no NUL characters, and a dying rank may print some."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(item) for key, item in value.items()}
    return [_without_nul(item) for item in value] if isinstance(value, list) else value


def _store(batch: _Batch, fact: FromAgent) -> None:
    if not isinstance(fact, StepReports):  # the many, and all numbers
        fact = msgspec.convert(_without_nul(msgspec.to_builtins(fact)), type(fact))
    if isinstance(fact, FaultReport):
        if Drill.objects.filter(pk=fact.drill, node=batch.node).exists():
            drills.record_fault(fact.drill, state=fact.state.value, detail=fact.detail, at=batch.server_time(fact.at))
        return
    if isinstance(fact, ProbeReport):
        Probe.objects.filter(pk=fact.probe, prober=batch.node, outcome="").update(
            outcome=fact.outcome.value, detail=fact.detail, answered_at=time.time()
        )
        return
    if isinstance(fact, OutboxGap):
        Node.objects.filter(pk=batch.node.pk).update(gaps=F("gaps") + 1)
        log.error("node=%s lost messages %d to %d: %s", batch.node.name, fact.first_seq, fact.last_seq, fact.reason)
        _tell_gap(batch, fact)
        return
    if not isinstance(
        fact,
        StepReports
        | RankStarted
        | RankResumed
        | CheckpointSaved
        | CheckpointRehashed
        | SnapshotKept
        | SaveInTrouble
        | RankPhase
        | RankFinished
        | RankExited
        | AssignmentReport,
    ):
        return
    generation = batch.generation(fact.job, fact.generation)
    if isinstance(fact, AssignmentReport):
        if generation is None or fact.plan_id != generation.plan_id:
            batch.refused += 1
            batch.note_stray(fact)
            return
        if fact.phase is SeenPhase.RUNNING and batch.runs_another_plan(fact.job, fact.generation):
            batch.forget_stray(fact)
    elif generation is None or batch.runs_another_plan(fact.job, fact.generation):
        batch.refused += 1
        return
    launch = fact.launch if isinstance(fact, AssignmentReport) else None
    unordered = generation.run_ordered_at is None or (launch and generation.wanted == AssignmentPhase.PREPARE.value)
    if unordered and _tells_of_ranks(fact):
        take_up(generation, batch.node, launch)
    match fact:
        case StepReports():
            _store_steps(batch, generation, fact)
        case CheckpointSaved():
            _store_checkpoint(batch, generation, fact)
        case CheckpointRehashed():
            checkpoints.note_rehashed(generation, fact, at=batch.server_time(fact.at))
        case SnapshotKept():
            if _fenced_elsewhere_at(batch, generation) is None and not _rebooted_since(batch, generation):
                snapshots.note_kept(generation, batch.node, fact, at=batch.server_time(fact.at))
        case SaveInTrouble():
            checkpoints.note_trouble(generation, fact, at=batch.server_time(fact.at))
        case AssignmentReport():
            _store_report(batch, generation, fact)
        case RankStarted() | RankResumed() | RankPhase() | RankFinished() | RankExited():
            _store_rank(batch, generation, fact)


def _tells_of_ranks(fact: FromAgent) -> bool:
    """Whether it can only be said of a generation that was ordered to run."""
    if not isinstance(fact, AssignmentReport):
        return True
    if fact.proof is not None:
        return fact.proof.kind in AGENT_PROOFS and fact.proof.kind is not ProofKind.NEVER_STARTED
    return fact.phase is SeenPhase.RUNNING


def _tell_gap(batch: _Batch, gap: OutboxGap) -> None:
    open_here = IncidentRow.objects.filter(ended=False, job__claimed_nodes=batch.node)
    for row in open_here:
        text = f"{batch.node.name} had to drop messages {gap.first_seq} to {gap.last_seq}: {gap.reason}."
        IncidentRow.objects.filter(pk=row.pk).update(version=F("version"))
        announce(f"incident:{row.pk}", append_entries(row.pk, [Entry(kind=EntryKind.FACT, at=time.time(), text=text)]))


# --- Ranks --------------------------------------------------------------------------------------------------------


def _owned_rank(batch: _Batch, generation: GenerationRow, rank: int) -> RankRow | None:
    """The row of a rank that this node runs by the plan; created on first mention."""
    plan = generation.plan
    nodes, per_node = plan["nodes"], plan["ranks_per_node"]
    if not 0 <= rank < len(nodes) * per_node or nodes[rank // per_node] != batch.node.name:
        batch.refused += 1
        return None
    row, _ = RankRow.objects.get_or_create(generation=generation, rank=rank, defaults={"node": batch.node})
    return row


def _store_rank(
    batch: _Batch, generation: GenerationRow, fact: RankStarted | RankResumed | RankPhase | RankFinished | RankExited
) -> None:
    row = _owned_rank(batch, generation, fact.rank)
    if row is None:
        return
    at = batch.server_time(fact.at)
    match fact:
        case RankStarted(pid=pid):
            row.pid, row.started_at = pid, at
            row.phase, row.phase_at, row.progress_at = Phase.SETUP.value, at, at
            row.progress_seen_at = time.time()
            changed = ["pid", "started_at", "phase", "phase_at", "progress_at", "progress_seen_at"]
        case RankPhase(phase=phase):
            if at < (row.phase_at or 0.0):
                return
            row.phase, row.phase_at, row.progress_at = phase.value, at, max(at, row.progress_at or 0.0)
            row.progress_seen_at = time.time()
            row.save(update_fields=["phase", "phase_at", "progress_at", "progress_seen_at"])
            return
        case RankResumed():
            row.resumed_at, row.resumed_step = at, fact.step
            row.saved_digest, row.live_digest = fact.saved_digest, fact.live_digest
            row.deterministic = fact.deterministic
            changed = ["resumed_at", "resumed_step", "saved_digest", "live_digest", "deterministic"]
            if fact.total_steps is not None and generation.job.total_steps != fact.total_steps:
                Job.objects.filter(pk=generation.job_id).update(total_steps=fact.total_steps)
        case RankFinished(step=step):
            total = Job.objects.values_list("total_steps", flat=True).get(pk=generation.job_id)
            if total is None or step >= total:
                row.finished_step = step
            changed = ["finished_step"]
        case RankExited():
            row.pid, row.exited_at, row.exit_recorded_at = fact.pid, at, time.time()
            row.exit_code, row.signal, row.detail = fact.exit_code, fact.signal, fact.detail
            changed = ["pid", "exited_at", "exit_recorded_at", "exit_code", "signal", "detail"]
    row.save(update_fields=changed)  # not the others: a proof of stop may have told of its end meanwhile
    batch.look_at.add(generation.job_id)
    if isinstance(fact, RankExited):
        if row.resumed_at is None:
            checkpoints.note_refused_load(generation, fact.detail, at=at)
        _judge_exit(generation, row)


def _judge_exit(generation: GenerationRow, row: RankRow) -> None:
    """A death that nobody wanted, in the job's running generation, is an incident; a normal end is not."""
    generation.refresh_from_db()
    job = Job.objects.get(pk=generation.job_id)
    if job.behind_since is not None:
        return  # something newer may run: the sweep looks once that is known
    unwanted = generation.wanted == AssignmentPhase.RUN.value and not job.stop_wanted
    if not unwanted or job.state in {state.value for state in JOB_ENDS}:
        return
    fresh = GenerationRow.objects.prefetch_related("shares__node", "ranks__node").get(pk=generation.pk)
    view = generation_view(fresh)
    mine = next((rank for rank in view.ranks if rank.rank == row.rank), None)
    if mine is None or not mine.died:
        return
    cause = diagnose([mine])
    sentence = cause.sentence if cause else f"Rank {row.rank} is gone."
    open_or_join(
        job, generation=generation.number, rank=row.rank, sentence=sentence, fault_at=row.exited_at or time.time()
    )


# --- Steps and checkpoints ----------------------------------------------------------------------------------------


def _store_steps(batch: _Batch, generation: GenerationRow, fact: StepReports) -> None:
    by_rank: dict[int, list[StepRow]] = {}
    fenced_at = _fenced_elsewhere_at(batch, generation)
    for report in fact.steps:
        if fenced_at is not None and batch.server_time(report.at) > fenced_at:
            _tell_after_fence(batch, generation, f"rank {report.rank} made step {report.step}")
            continue
        loss, loss_text = finite_or_text(report.loss)
        grad_norm, _ = finite_or_text(report.grad_norm)
        by_rank.setdefault(report.rank, []).append(
            StepRow(
                job_id=generation.job_id,
                generation_number=generation.number,
                rank=report.rank,
                step=report.step,
                at=batch.server_time(report.at),
                loss=loss,
                loss_text=loss_text,
                learning_rate=finite_or_text(report.learning_rate)[0],
                grad_norm=grad_norm,
                epoch=report.epoch,
                span_start=report.span_start,
                span_stop=report.span_stop,
                step_time_s=finite_or_text(report.step_time_s)[0],
                epoch_size=report.epoch_size,
                indices_digest=report.indices_digest or "",
                order_digest=report.order_digest or "",
                samples=report.samples,
                tokens=report.tokens,
                parameter_norm=finite_or_text(report.parameter_norm)[0],
                data_s=finite_or_text(report.data_s)[0],
                forward_backward_s=finite_or_text(report.forward_backward_s)[0],
                optimizer_s=finite_or_text(report.optimizer_s)[0],
                wait_s=finite_or_text(report.wait_s)[0],
                checkpoint_s=finite_or_text(report.checkpoint_s)[0],
                memory_bytes=report.memory_bytes,
                gpu_memory_bytes=report.gpu_memory_bytes,
                probe={"digests": report.probe.digests, "unmoved": report.probe.unmoved} if report.probe else None,
            )
        )
    newest = 0
    for rank, rows in by_rank.items():
        row = _owned_rank(batch, generation, rank)
        if row is None:
            continue
        before = (row.pace_s, row.progress_at)
        StepRow.objects.bulk_create(rows, ignore_conflicts=True)
        if row.first_step_at is None:
            row.first_step_at = min(step.at for step in rows)
            batch.look_at.add(generation.job_id)
        row.last_step = max(row.last_step or 0, max(step.step for step in rows))
        row.progress_at = max(row.progress_at or 0.0, max(step.at for step in rows))
        row.pace_s = _pace(row, rows, before)
        if _judge_losses(row, rows):
            batch.look_at.add(generation.job_id)
        if row.phase in ("", Phase.SETUP.value, Phase.COMPILE.value):
            row.phase, row.phase_at = Phase.STEP.value, row.progress_at
        row.progress_seen_at = time.time()
        row.save(
            update_fields=[
                "first_step_at", "last_step", "progress_at", "progress_seen_at", "pace_s", "phase", "phase_at",
                "nonfinite_since", "nonfinite_count", "nonfinite_at",
            ]
        )  # fmt: skip
        _raise_lease(generation, pace_s=row.pace_s)
        newest = max(newest, row.last_step)
    if newest and generation.number == Job.objects.values_list("generation", flat=True).get(pk=generation.job_id):
        of_job = Job.objects.filter(pk=generation.job_id, generation=generation.number)
        of_job.filter(Q(last_step__isnull=True) | Q(last_step__lt=newest)).update(last_step=newest)
    announce_change(f"job:{generation.job_id}")
    if IncidentRow.objects.filter(job_id=generation.job_id, state="verifying").exists():
        batch.look_at.add(generation.job_id)


def _judge_losses(row: RankRow, steps: Sequence[StepRow]) -> bool:
    """Follow a run of losses that are not finite; True when it has just become too long."""
    before = found = Nonfinite(since=row.nonfinite_since, count=row.nonfinite_count)
    for step in sorted(steps, key=lambda step: step.step):
        loss = float(step.loss_text) if step.loss_text else step.loss
        was, found = found, fold_loss(found, step=step.step, loss=loss, enough=NONFINITE_STEPS)
        if found.count == 1 and was.count == 0:
            row.nonfinite_at = step.at
    row.nonfinite_since, row.nonfinite_count = found.since, found.count
    return found.count >= NONFINITE_STEPS > before.count


def _store_checkpoint(batch: _Batch, generation: GenerationRow, fact: CheckpointSaved) -> None:
    fenced_at = _fenced_elsewhere_at(batch, generation)
    late = fenced_at is not None and batch.server_time(fact.at) > fenced_at
    save_time_s = finite_or_text(fact.save_time_s)[0]
    CheckpointRow.objects.update_or_create(
        job_id=generation.job_id,
        generation_number=generation.number,
        step=fact.step,
        defaults={
            "directory": fact.directory,
            "size_bytes": fact.size_bytes,
            "world_size": fact.world_size,
            "parent_generation": fact.parent_generation,
            "parent_step": fact.parent_step,
            "saved_at": batch.server_time(fact.at),
            "save_time_s": save_time_s,
            "blocked_s": finite_or_text(fact.blocked_s)[0],
            "after_fence": late,
        },
    )
    if late:
        _tell_after_fence(
            batch, generation, f"the checkpoint of step {fact.step} was written; it is never resumed from"
        )
    else:
        _raise_lease(generation, save_time_s=save_time_s)
        checkpoints.note_save_time(generation, fact.step, save_time_s, at=batch.server_time(fact.at))
    announce_change(f"job:{generation.job_id}")


def _fenced_elsewhere_at(batch: _Batch, generation: GenerationRow) -> float | None:
    """When this node's share was fenced without its own word; what is done there later does not count."""
    share = ShareRow.objects.filter(generation=generation, node=batch.node, proof__isnull=False).first()
    if share is None or share.proof is None or ProofKind(share.proof["kind"]) in AGENT_PROOFS:
        return None
    return float(share.proof["at"])


def _rebooted_since(batch: _Batch, generation: GenerationRow) -> bool:
    """Whether the node runs another boot than the generation did there: its memory is empty, whatever is told late."""
    share = ShareRow.objects.filter(generation=generation, node=batch.node).exclude(boot_id="").first()
    return share is not None and bool(batch.node.boot_id) and share.boot_id != batch.node.boot_id


def _tell_after_fence(batch: _Batch, generation: GenerationRow, what: str) -> None:
    log.error("node=%s generation=%d after its fence: %s", batch.node.name, generation.number, what)
    proofs.tell(
        generation.job_id,
        f"After generation {generation.number} was fenced on {batch.node.name}, {what}. It is ignored.",
    )


_PACE_HALF_LIFE_S = 600.0
_WARMING_UP = 2
"""The first steps of a rank are slow for reasons of their own: they say nothing of its pace."""


def _pace(row: RankRow, steps: Sequence[StepRow], before: tuple[float | None, float | None]) -> float:
    """The longest of a rank's recent steps; slowly forgotten, so that fast ones do not hide how slow others are."""
    first = row.resumed_step or 0
    counted = (step.step_time_s or 0.0 for step in steps if step.step > first + _WARMING_UP)
    pace_s, progress_at = before
    age_s = max(0.0, (row.progress_at or 0.0) - progress_at) if progress_at is not None else 0.0
    remembered = (pace_s or 0.0) * math.exp2(-age_s / _PACE_HALF_LIFE_S)
    return max([*counted, remembered])


def _raise_lease(generation: GenerationRow, *, pace_s: float | None = None, save_time_s: float | None = None) -> None:
    """A slow job gets a longer lease, before a runner could think that it stands still."""
    if generation.lease is None:
        return
    terms = from_json(generation.lease, LeaseLimits)
    if raised(terms, pace_s=pace_s, save_time_s=save_time_s) == terms:
        return
    # Another node's batch may have raised them meanwhile: the row is taken before it is read, for terms never fall.
    GenerationRow.objects.filter(pk=generation.pk).update(number=F("number"))
    generation.refresh_from_db(fields=["lease"])
    if generation.lease is None:
        return
    terms = from_json(generation.lease, LeaseLimits)
    longer = raised(terms, pace_s=pace_s, save_time_s=save_time_s)
    if longer == terms:
        return
    generation.lease = to_json(longer)
    GenerationRow.objects.filter(pk=generation.pk).update(lease=generation.lease)
    Node.objects.filter(shares__generation=generation).update(revision=F("revision") + 1)
    push_orders()


# --- What a node reports of its share -----------------------------------------------------------------------------


def _store_report(batch: _Batch, generation: GenerationRow, fact: AssignmentReport) -> None:
    share = ShareRow.objects.select_related("generation").get(generation=generation, node=batch.node)
    if share.proof is not None and share.confirmed_at is not None and fact.phase is not SeenPhase.STOPPED:
        return
    if fact.proof is not None and fact.proof.kind not in AGENT_PROOFS:
        batch.refused += 1  # only the server can say such a thing
        return
    share.seen, share.reason, share.detail = fact.phase.value, fact.reason[:60], fact.detail
    share.reported_at = batch.server_time(fact.at)
    share.boot_id = fact.boot_id or share.boot_id
    share.keeps_lease = share.keeps_lease or fact.keeps_lease
    if fact.master_port is not None:
        share.master_port = fact.master_port
    if fact.fingerprint:
        share.fingerprint, share.fingerprint_parts = fact.fingerprint[:80], fact.fingerprint_parts
    stuck = fact.proof is not None and fact.proof.kind is ProofKind.UNKILLABLE
    if fact.phase is SeenPhase.STOPPED and fact.proof is not None and not stuck:
        share.confirmed_at = share.confirmed_at or time.time()
    # By field: a proof that the server finds meanwhile must not be written over.
    share.save(
        update_fields=[
            "seen", "reason", "detail", "reported_at", "boot_id", "keeps_lease", "master_port", "fingerprint",
            "fingerprint_parts", "confirmed_at",
        ]
    )  # fmt: skip
    batch.look_at.add(generation.job_id)
    if fact.phase is SeenPhase.STOPPED and fact.proof is not None:
        if _keep(batch, share, fact.proof):
            _ranks_are_gone(generation, share)
        if stuck:
            reason = f"processes of generation {generation.number} are stuck in its kernel"
            proofs.quarantine(batch.node, boot_id=fact.boot_id or batch.node.boot_id, reason=reason)


def _keep(batch: _Batch, share: ShareRow, said: StopProof) -> bool:
    return proofs.keep_proof(
        share,
        FenceProof(
            node=batch.node.name,
            kind=said.kind,
            at=batch.server_time(said.at),
            evidence=said.evidence,
            generation=share.generation.number,
            recorded_at=time.time(),
        ),
    )


def _ranks_are_gone(generation: GenerationRow, share: ShareRow) -> None:
    """A stopped share has no living rank: whoever has not reported an exit is gone without one."""
    mine = RankRow.objects.filter(generation=generation, node_id=share.node_id)
    for row in mine.filter(exit_code__isnull=True, signal__isnull=True):
        _judge_exit(generation, row)
