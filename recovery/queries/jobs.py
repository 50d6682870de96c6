"""Jobs as pages and API show them, with their generations and checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import F, OuterRef, Q, QuerySet, Subquery

from agents.protocol.messages import AssignmentPhase
from recovery.domain.absences import peers_step_on
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.silence import Contact
from recovery.errors import NotFound
from recovery.models import CheckpointRow, GenerationRow, IncidentRow, Job, RankRow, ShareRow
from recovery.queries.moment import moment
from recovery.queries.needs_human import NEEDS_HUMAN
from recovery.queries.page import Position
from recovery.store.situations import generation_view, load_fleet


@dataclass(frozen=True, kw_only=True)
class UnseenNode:
    """A node of the running generation that is not in contact."""

    node: str
    contact: Contact
    """suspect, lost or unobserved."""
    since: float | None
    """When it was last heard."""
    silent_s: float
    """Seconds of silence that count."""
    trains_on: bool
    """Its ranks are known to step on: a rank on a node in contact does, and none of a synchronous job steps alone.
    False: not known."""


@dataclass(frozen=True, kw_only=True)
class ProofView:
    """Why nothing of a generation can act on a node any more."""

    node: str
    generation: int
    kind: str
    at: float
    evidence: str
    confirmed: bool
    """The node's own agent has said so too."""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    id: str
    name: str
    owner: str
    state: str
    state_since: float
    reason: str
    generation: int
    """Highest generation number ever given out."""
    last_step: int | None
    total_steps: int | None
    nodes: tuple[str, ...]
    """Nodes of the newest generation, in order of node rank."""
    nodes_min: int
    nodes_max: int
    """It wants this many nodes, and goes on with `nodes_min` if there are no more."""
    multiple_of: int
    """Its number of nodes is always a multiple of this."""
    unseen: tuple[UnseenNode, ...]
    """Nodes of the running generation without contact; empty if nothing should run."""
    behind_since: float | None
    """An agent knows a newer generation than this database, a restored backup: nothing is concluded before it is known
    what runs. None: it does not."""
    ranks_per_node: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    stop_wanted: bool
    open_incident: str | None
    needs_human: bool
    """Its open incident waits for a person."""
    last_checkpoint_step: int | None


@dataclass(frozen=True, kw_only=True)
class GenerationSummary:
    """One generation: what was planned, and what became of it."""

    number: int
    plan_id: str
    wanted: str
    """prepare, run or stop."""
    nodes: tuple[str, ...]
    ranks_per_node: int
    world_size: int
    parent_generation: int | None
    parent_step: int | None
    parent_reason: str
    placement_reason: str
    created_at: float
    run_ordered_at: float | None
    first_step_at: float | None
    """When the last of its ranks completed its first step; None until all have."""
    stop_ordered_at: float | None
    fenced_at: float | None
    reached_step: int | None
    """Highest step that any of its ranks completed."""
    broken_continuity: bool
    adopted: bool
    """Not ordered by this database but found running."""
    lease: dict[str, float] | None
    """Seconds without contact and without progress after which its runners kill their ranks, by phase (`step_s` and
    so on); None: they keep no lease."""
    proofs: tuple[ProofView, ...]
    """Why it is gone from each of its nodes, as far as that is known."""


@dataclass(frozen=True, kw_only=True)
class CheckpointView:
    generation: int
    step: int
    directory: str
    size_bytes: int
    world_size: int
    parent_generation: int | None
    parent_step: int | None
    saved_at: float
    save_time_s: float | None
    after_fence: bool
    """Written by a generation that was fenced already: never resumed from."""
    blocked_s: float | None
    """How long training stood still for it; None: for the whole save."""
    integrity: str
    """complete, rehashed, test_loaded or damaged; the reason says how that is known."""
    integrity_reason: str
    health: str
    """unknown, clean, resumed_from or tainted."""
    health_reason: str
    pinned: bool
    """The ranks may not remove it."""


@dataclass(frozen=True, kw_only=True)
class JobDetail(JobSummary):
    argv: tuple[str, ...]
    working_directory: str
    checkpoint_directory: str
    synchronous: bool
    phase_limits_s: dict[str, float]
    """What the spec asks for; the rest are defaults."""
    spec: dict[str, Any]
    last_checkpoint: CheckpointView | None
    generations: tuple[GenerationSummary, ...]
    """Oldest first."""
    incidents_count: int


def list_jobs(
    *, state: str | None = None, limit: int | None = None, after: Position | None = None, now: float | None = None
) -> tuple[JobSummary, ...]:
    """Jobs, newest first; fifteen queries at most."""
    rows = Job.objects.order_by("-submitted_at", "-id")
    if state is not None:
        rows = rows.filter(state=state)
    if after is not None:
        rows = rows.filter(after.further("submitted_at"))
    return summarize_jobs(list(rows[:limit]), now=moment(now))


def get_job(job_id: str, *, now: float | None = None) -> JobDetail:
    """One job with its generations. Raises `NotFound`."""
    row = find_job(job_id)
    (summary,) = _summaries([row], now=moment(now))
    spec: dict[str, Any] = row.spec
    checkpoint = _usable_checkpoints().filter(job=row).order_by("-generation_number", "-step").first()
    return JobDetail(
        **summary,
        argv=tuple(spec.get("argv", ())),
        working_directory=str(spec.get("working_directory", "")),
        checkpoint_directory=str(spec.get("checkpoint_directory", "")),
        synchronous=bool(spec.get("synchronous", True)),
        phase_limits_s=dict(spec.get("phase_limits_s") or {}),
        spec=spec,
        last_checkpoint=None if checkpoint is None else _checkpoint(checkpoint),
        generations=_generations(row),
        incidents_count=IncidentRow.objects.filter(job=row).count(),
    )


def _node_range(spec: dict[str, Any]) -> tuple[int, int, int]:
    """(fewest, most, multiple of)."""
    nodes = spec.get("nodes", 0)
    if isinstance(nodes, dict):
        return int(nodes["min"]), int(nodes["max"]), int(nodes.get("multiple_of", 1))
    return int(nodes), int(nodes), 1


def job_checkpoints(
    job_id: str, *, limit: int | None = None, after: tuple[int, int] | None = None
) -> tuple[CheckpointView, ...]:
    """Complete checkpoints, newest generation and step first, those after `after` (generation, step).

    Raises `NotFound`.
    """
    rows = CheckpointRow.objects.filter(job=find_job(job_id)).order_by("-generation_number", "-step")
    if after is not None:
        rows = rows.filter(Q(generation_number__lt=after[0]) | Q(generation_number=after[0], step__lt=after[1]))
    return tuple(_checkpoint(row) for row in rows.select_related("job")[:limit])


def find_job(job_id: str) -> Job:
    """The row. Raises `NotFound`."""
    job = Job.objects.filter(pk=job_id).first()
    if job is None:
        raise NotFound(f"There is no job {job_id}.")
    return job


def summarize_jobs(rows: Sequence[Job], *, now: float) -> tuple[JobSummary, ...]:
    """Summaries of rows; a fixed number of queries for all of them."""
    return tuple(JobSummary(**summary) for summary in _summaries(rows, now=now))


def _summaries(rows: Sequence[Job], *, now: float) -> list[dict[str, Any]]:
    ids = [row.id for row in rows]
    if not ids:
        return []
    plans = _newest_plans(ids)
    open_ones = IncidentRow.objects.filter(job__in=ids, ended=False).values_list("job_id", "id", "state")
    incidents = {job: (incident, state) for job, incident, state in open_ones}
    checkpoints = _newest_checkpoint_steps(ids)
    unseen = _unseen_nodes(rows, now=now)
    ranges = {row.id: _node_range(row.spec) for row in rows}
    return [
        {
            "id": row.id,
            "name": row.name,
            "owner": row.owner,
            "state": row.state,
            "state_since": row.state_since,
            "reason": row.reason,
            "generation": row.generation,
            "last_step": row.last_step,
            "total_steps": row.total_steps,
            "nodes": tuple(plans.get(row.id, {}).get("nodes", ())),
            "nodes_min": ranges[row.id][0],
            "nodes_max": ranges[row.id][1],
            "multiple_of": ranges[row.id][2],
            "unseen": unseen.get(row.id, ()),
            "behind_since": row.behind_since,
            "ranks_per_node": int(row.spec.get("ranks_per_node", 1)),
            "submitted_at": row.submitted_at,
            "started_at": row.started_at,
            "ended_at": row.ended_at,
            "stop_wanted": row.stop_wanted,
            "open_incident": incidents[row.id][0] if row.id in incidents else None,
            "needs_human": row.id in incidents and incidents[row.id][1] in NEEDS_HUMAN,
            "last_checkpoint_step": checkpoints.get(row.id),
        }
        for row in rows
    ]


def _unseen_nodes(rows: Sequence[Job], *, now: float) -> dict[str, tuple[UnseenNode, ...]]:
    """For each job, the nodes of its running generation that are not in contact."""
    newest = GenerationRow.objects.filter(job=OuterRef("job")).order_by("-number").values("number")[:1]
    running = GenerationRow.objects.filter(
        job__in=[row.id for row in rows], number=Subquery(newest), wanted=AssignmentPhase.RUN.value
    )
    fleet = load_fleet(now)
    silent = {node.name: node for node in fleet.nodes if node.contact is not Contact.SEEN}
    affected = [row for row in running if set(row.plan.get("nodes", ())) & set(silent)]
    if not affected:
        return {}
    synchronous = {row.id: bool(row.spec.get("synchronous", True)) for row in rows}
    return {
        row.job_id: _unseen_of(row, fleet, synchronous=synchronous[row.job_id], now=now)
        for row in GenerationRow.objects.filter(pk__in=[row.pk for row in affected]).prefetch_related(
            "shares__node", "ranks__node"
        )
    }


def _unseen_of(row: GenerationRow, fleet: FleetSnapshot, *, synchronous: bool, now: float) -> tuple[UnseenNode, ...]:
    generation = generation_view(row)
    trains_on = peers_step_on(generation, fleet, synchronous=synchronous, now=now)
    nodes = [node for name in generation.plan.nodes if (node := fleet.node(name)) is not None]
    return tuple(
        UnseenNode(
            node=node.name,
            contact=node.contact,
            since=node.last_heard_at,
            silent_s=node.silent_s,
            trains_on=trains_on,
        )
        for node in nodes
        if node.contact is not Contact.SEEN
    )


def _newest_plans(ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    newest = GenerationRow.objects.filter(job=OuterRef("job")).order_by("-number").values("number")[:1]
    rows = GenerationRow.objects.filter(job__in=ids, number=Subquery(newest))
    return dict(rows.values_list("job_id", "plan"))


def _newest_checkpoint_steps(ids: Sequence[str]) -> dict[str, int]:
    newest = _usable_checkpoints().filter(job=OuterRef("job")).order_by("-generation_number", "-step").values("pk")[:1]
    rows = CheckpointRow.objects.filter(job__in=ids, pk=Subquery(newest))
    return dict(rows.values_list("job_id", "step"))


def _usable_checkpoints() -> QuerySet[CheckpointRow]:
    """Without those that were written by a generation that was fenced already."""
    return CheckpointRow.objects.filter(after_fence=False)


def _generations(job: Job) -> tuple[GenerationSummary, ...]:
    first_steps: dict[int, list[float | None]] = defaultdict(list)
    reached: dict[int, int] = {}
    ranks = RankRow.objects.filter(generation__job=job).annotate(number=F("generation__number"))
    for number, first_step_at, last_step in ranks.values_list("number", "first_step_at", "last_step"):
        first_steps[number].append(first_step_at)
        if last_step is not None:
            reached[number] = max(last_step, reached.get(number, 0))
    proofs: dict[int, list[ProofView]] = defaultdict(list)
    for proof in proofs_of(job.id):
        proofs[proof.generation].append(proof)
    return tuple(
        _generation(
            row,
            first_steps=first_steps[row.number],
            reached_step=reached.get(row.number),
            proofs=proofs[row.number],
        )
        for row in GenerationRow.objects.filter(job=job).order_by("number")
    )


def proofs_of(job_id: str, *, from_generation: int = 1) -> tuple[ProofView, ...]:
    """Proofs of a job's generations that ran, oldest first."""
    shares = ShareRow.objects.filter(
        generation__job=job_id,
        generation__number__gte=from_generation,
        generation__run_ordered_at__isnull=False,
        proof__isnull=False,
    ).select_related("generation", "node")
    return tuple(_proof(share) for share in shares.order_by("generation__number", "node_rank"))


def _proof(share: ShareRow) -> ProofView:
    proof: dict[str, Any] = share.proof or {}
    return ProofView(
        node=share.node.name,
        generation=share.generation.number,
        kind=str(proof.get("kind", "")),
        at=float(proof.get("at", 0.0)),
        evidence=str(proof.get("evidence", "")),
        confirmed=share.confirmed_at is not None,
    )


def _generation(
    row: GenerationRow,
    *,
    first_steps: Sequence[float | None],
    reached_step: int | None,
    proofs: Sequence[ProofView],
) -> GenerationSummary:
    plan: dict[str, Any] = row.plan
    parent = plan.get("parent") or {}
    nodes = tuple(plan.get("nodes", ()))
    ranks_per_node = int(plan.get("ranks_per_node", 1))
    world_size = len(nodes) * ranks_per_node
    made = [at for at in first_steps if at is not None]
    return GenerationSummary(
        number=row.number,
        plan_id=row.plan_id,
        wanted=row.wanted,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        world_size=world_size,
        parent_generation=parent.get("generation"),
        parent_step=parent.get("step"),
        parent_reason=str(plan.get("parent_reason", "")),
        placement_reason=str(plan.get("placement_reason", "")),
        created_at=row.created_at,
        run_ordered_at=row.run_ordered_at,
        first_step_at=max(made) if made and len(made) == world_size else None,
        stop_ordered_at=row.stop_ordered_at,
        fenced_at=row.fenced_at,
        reached_step=reached_step,
        broken_continuity=row.broken_continuity,
        adopted=row.adopted,
        lease=row.lease,
        proofs=tuple(proofs),
    )


def _checkpoint(row: CheckpointRow) -> CheckpointView:
    return CheckpointView(
        generation=row.generation_number,
        step=row.step,
        directory=row.directory,
        size_bytes=row.size_bytes,
        world_size=row.world_size,
        parent_generation=row.parent_generation,
        parent_step=row.parent_step,
        saved_at=row.saved_at,
        save_time_s=row.save_time_s,
        after_fence=row.after_fence,
        blocked_s=row.blocked_s,
        integrity=row.integrity,
        integrity_reason=row.integrity_reason,
        health=row.health,
        health_reason=row.health_reason,
        pinned=f"{row.generation_number}:{row.step}" in row.job.pinned,
    )
