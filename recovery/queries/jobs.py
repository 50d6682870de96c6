"""Jobs as pages and API show them, with their generations and checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import F, OuterRef, Q, Subquery

from recovery.errors import NotFound
from recovery.models import CheckpointRow, GenerationRow, IncidentRow, Job, RankRow
from recovery.queries.page import Position


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
    ranks_per_node: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    stop_wanted: bool
    open_incident: str | None
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


@dataclass(frozen=True, kw_only=True)
class JobDetail(JobSummary):
    argv: tuple[str, ...]
    working_directory: str
    checkpoint_directory: str
    nodes_wanted: int
    spec: dict[str, Any]
    last_checkpoint: CheckpointView | None
    generations: tuple[GenerationSummary, ...]
    """Oldest first."""
    incidents_count: int


def list_jobs(
    *, state: str | None = None, limit: int | None = None, after: Position | None = None
) -> tuple[JobSummary, ...]:
    """Jobs, newest first; four queries."""
    rows = Job.objects.order_by("-submitted_at", "-id")
    if state is not None:
        rows = rows.filter(state=state)
    if after is not None:
        rows = rows.filter(after.further("submitted_at"))
    return summarize_jobs(list(rows[:limit]))


def get_job(job_id: str) -> JobDetail:
    """One job with its generations. Raises `NotFound`."""
    row = find_job(job_id)
    (summary,) = _summaries([row])
    spec: dict[str, Any] = row.spec
    checkpoint = CheckpointRow.objects.filter(job=row).order_by("-generation_number", "-step").first()
    return JobDetail(
        **summary,
        argv=tuple(spec.get("argv", ())),
        working_directory=str(spec.get("working_directory", "")),
        checkpoint_directory=str(spec.get("checkpoint_directory", "")),
        nodes_wanted=_most_nodes(spec),
        spec=spec,
        last_checkpoint=None if checkpoint is None else _checkpoint(checkpoint),
        generations=_generations(row),
        incidents_count=IncidentRow.objects.filter(job=row).count(),
    )


def _most_nodes(spec: dict[str, Any]) -> int:
    nodes = spec.get("nodes", 0)
    return int(nodes["max"]) if isinstance(nodes, dict) else int(nodes)


def job_checkpoints(
    job_id: str, *, limit: int | None = None, after: tuple[int, int] | None = None
) -> tuple[CheckpointView, ...]:
    """Complete checkpoints, newest generation and step first, those after `after` (generation, step).

    Raises `NotFound`.
    """
    rows = CheckpointRow.objects.filter(job=find_job(job_id)).order_by("-generation_number", "-step")
    if after is not None:
        rows = rows.filter(Q(generation_number__lt=after[0]) | Q(generation_number=after[0], step__lt=after[1]))
    return tuple(_checkpoint(row) for row in rows[:limit])


def find_job(job_id: str) -> Job:
    """The row. Raises `NotFound`."""
    job = Job.objects.filter(pk=job_id).first()
    if job is None:
        raise NotFound(f"There is no job {job_id}.")
    return job


def summarize_jobs(rows: Sequence[Job]) -> tuple[JobSummary, ...]:
    """Summaries of rows; three queries for all of them."""
    return tuple(JobSummary(**summary) for summary in _summaries(rows))


def _summaries(rows: Sequence[Job]) -> list[dict[str, Any]]:
    ids = [row.id for row in rows]
    if not ids:
        return []
    plans = _newest_plans(ids)
    incidents = dict(IncidentRow.objects.filter(job__in=ids, ended=False).values_list("job_id", "id"))
    checkpoints = _newest_checkpoint_steps(ids)
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
            "ranks_per_node": int(row.spec.get("ranks_per_node", 1)),
            "submitted_at": row.submitted_at,
            "started_at": row.started_at,
            "ended_at": row.ended_at,
            "stop_wanted": row.stop_wanted,
            "open_incident": incidents.get(row.id),
            "last_checkpoint_step": checkpoints.get(row.id),
        }
        for row in rows
    ]


def _newest_plans(ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    newest = GenerationRow.objects.filter(job=OuterRef("job")).order_by("-number").values("number")[:1]
    rows = GenerationRow.objects.filter(job__in=ids, number=Subquery(newest))
    return dict(rows.values_list("job_id", "plan"))


def _newest_checkpoint_steps(ids: Sequence[str]) -> dict[str, int]:
    newest = CheckpointRow.objects.filter(job=OuterRef("job")).order_by("-generation_number", "-step").values("pk")[:1]
    rows = CheckpointRow.objects.filter(job__in=ids, pk=Subquery(newest))
    return dict(rows.values_list("job_id", "step"))


def _generations(job: Job) -> tuple[GenerationSummary, ...]:
    first_steps: dict[int, list[float | None]] = defaultdict(list)
    reached: dict[int, int] = {}
    ranks = RankRow.objects.filter(generation__job=job).annotate(number=F("generation__number"))
    for number, first_step_at, last_step in ranks.values_list("number", "first_step_at", "last_step"):
        first_steps[number].append(first_step_at)
        if last_step is not None:
            reached[number] = max(last_step, reached.get(number, 0))
    return tuple(
        _generation(row, first_steps=first_steps[row.number], reached_step=reached.get(row.number))
        for row in GenerationRow.objects.filter(job=job).order_by("number")
    )


def _generation(
    row: GenerationRow, *, first_steps: Sequence[float | None], reached_step: int | None
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
    )
