"""Reads the rows that a decision needs and freezes them into a `Situation`."""

from __future__ import annotations

import math
import time

from agents.protocol.messages import AssignmentPhase, SeenPhase
from recovery.domain.continuity import ResumeRecord, StepRecord, Verdict, judge
from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.generations import FenceProof, GenerationView, RankView, ShareView
from recovery.domain.incident import Incident
from recovery.domain.instructions import JobState
from recovery.domain.lineage import reference_generations
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.situation import Command, FreshIds, JobView, Situation
from recovery.ids import fresh_id
from recovery.models import CheckpointRow, GenerationRow, Job, Node, RankRow, ShareRow, StepRow
from recovery.store.serialize import from_json

LOST_AFTER_S = 10.0
"""A node that was not heard for this long is unknown: nothing is placed on it, and nothing is concluded from it."""

COMPARE_AT_MOST_STEPS = 2000
"""Replayed steps that one verdict looks at; a longer replay is judged by its first part."""


def load_situation(
    job: Job, *, incident: Incident | None = None, command: str = "", now: float | None = None
) -> Situation:
    """Everything about one job, as of now. Several reads, none of them locked: see `recovery.engine` for why."""
    at = time.time() if now is None else now
    generations = load_generations(job)
    situation = Situation(
        job=JobView(
            id=job.id,
            name=job.name,
            state=JobState(job.state),
            node_count=job.spec["nodes"],
            ranks_per_node=job.spec["ranks_per_node"],
            stop_wanted=job.stop_wanted,
            launch_attempts=job.launch_attempts,
            state_since=job.state_since,
        ),
        fleet=load_fleet(at),
        generations=generations,
        checkpoints=tuple(
            CheckpointRef(generation=generation, step=step)
            for generation, step in CheckpointRow.objects.filter(job=job).values_list("generation_number", "step")
        ),
        fresh=FreshIds(plan_id=fresh_id("plan"), run_id=fresh_id("run"), generation=job.generation + 1),
        command=Command(command) if command else None,
    )
    if incident is None or incident.plan is None:
        return situation
    new = situation.generation(incident.plan.generation)
    if new is None or not new.run_ordered:
        return situation
    verdict, caught_up_at = _judge(job, incident, situation, new)
    return Situation(**{**vars(situation), "verdict": verdict, "caught_up_at": caught_up_at})


def load_fleet(now: float) -> FleetSnapshot:
    """Every node that may be looked at for placement."""
    return FleetSnapshot(
        nodes=tuple(
            NodeView(
                name=node.name,
                address=node.address,
                health=_health(node, now),
                slots=int(node.facts.get("slots", 1)),
                claimed_by=node.claimed_by_id,
                cordoned=node.cordoned,
                rack=str(node.facts.get("rack", "")),
            )
            for node in Node.objects.filter(revoked=False)
        )
    )


def _health(node: Node, now: float) -> NodeHealth:
    if not node.session or node.last_heard_at is None or now - node.last_heard_at > LOST_AFTER_S:
        return NodeHealth.UNKNOWN
    return NodeHealth.UNHEALTHY if node.unhealthy_reason else NodeHealth.HEALTHY


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
    )


def _rank_view(row: RankRow) -> RankView:
    return RankView(
        rank=row.rank,
        node=row.node.name,
        pid=row.pid,
        exited_at=row.exited_at,
        exit_code=row.exit_code,
        signal=row.signal,
        detail=row.detail,
        resumed_step=row.resumed_step,
        resumed_at=row.resumed_at,
        saved_digest=row.saved_digest,
        live_digest=row.live_digest,
        first_step_at=row.first_step_at,
        last_step=row.last_step,
        finished_step=row.finished_step,
    )


def _judge(job: Job, incident: Incident, situation: Situation, new: GenerationView) -> tuple[Verdict, float | None]:
    """The verdict on a new generation as far as its records go, and when it got beyond the old one's last step."""
    parent_step = new.plan.parent.step if new.plan.parent else 0
    reached = max(incident.reached_step or 0, parent_step)
    last = min(reached, parent_step + COMPARE_AT_MOST_STEPS)
    replayed = {
        **_records(job, new.number, first=parent_step + 1, last=last),
        # Beyond the last one that counts, so that a replay too long to be compared in full still ends.
        **_records(job, new.number, first=reached + 1, last=reached + 1),
    }
    reference: dict[tuple[int, int], StepRecord] = {}
    by_number = {generation.number: generation for generation in situation.generations}
    for number in reference_generations(by_number, upto=new.number):
        older = by_number[number]
        if older.plan.world_size == new.plan.world_size:
            # The parent's own step is read too: the first replayed span must follow it.
            reference = {**_records(job, number, first=parent_step, last=last), **reference}
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


def _records(job: Job, generation: int, *, first: int, last: int) -> dict[tuple[int, int], StepRecord]:
    rows = StepRow.objects.filter(job=job, generation_number=generation, step__gte=first, step__lte=last)
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
