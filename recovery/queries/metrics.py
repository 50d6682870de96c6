"""Training curves: one series per generation and rank, kept as they were made.

Steps that were repeated after a roll-back are in both generations' series, neither dropped nor doubled. The canonical
view is cut to the one curve that the job's present state stands on: each step once, from the newest generation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db.models import F, Q
from django.db.models.functions import Mod

from recovery.models import GenerationRow, StepRow
from recovery.queries.jobs import find_job


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    generation: int
    step: int
    at: float
    loss: float | None
    """None if the script reported none, or one that is not finite; `loss_text` then says which."""
    loss_text: str
    learning_rate: float | None
    grad_norm: float | None
    epoch: int
    span_start: int | None
    span_stop: int | None
    step_time_s: float | None
    samples: int | None
    """This rank's, as are tokens."""
    tokens: int | None
    parameter_norm: float | None
    data_s: float | None
    """Parts of the step; `checkpoint_s` is a save just before it. None: not measured."""
    forward_backward_s: float | None
    optimizer_s: float | None
    wait_s: float | None
    checkpoint_s: float | None
    memory_bytes: int | None
    gpu_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class MetricSeries:
    generation: int
    rank: int
    parent_generation: int | None
    parent_step: int | None
    """Where this generation began; None for the beginning of the job."""
    points: tuple[MetricPoint, ...]
    """In order of step."""


@dataclass(frozen=True, kw_only=True)
class JobMetrics:
    job: str
    rank: int
    series: tuple[MetricSeries, ...]
    """In order of generation."""
    canonical: bool
    """True if the series are cut so that no step is in two of them."""
    more: bool
    """There are more points than `limit`: ask again after the last point (its `generation`, its step)."""
    every: int
    """1 if all points are here; n if they were thinned to the steps that are multiples of n."""

    @property
    def points(self) -> tuple[MetricPoint, ...]:
        """All points in order of generation and step; of the canonical view, the curve itself."""
        return tuple(point for one in self.series for point in one.points)


def job_metrics(
    job_id: str,
    *,
    generation: int | None = None,
    rank: int | None = None,
    after_step: int | None = None,
    limit: int = 10_000,
    max_points: int | None = None,
    canonical: bool = False,
) -> JobMetrics:
    """Curves of one rank, rank 0 if none is named, of one generation or of all. Raises `NotFound`.

    Points come in order of (generation, step), those with a step above `after_step`, at most `limit` of them.
    With `max_points` they are first thinned evenly to about that number. A generation without points has no series.
    """
    job = find_job(job_id)
    rank = 0 if rank is None else rank
    parents = _parents(job.id)
    rows = StepRow.objects.filter(job=job, rank=rank)
    if canonical:
        made = set(rows.order_by().values_list("generation_number", flat=True).distinct())
        rows = rows.filter(_within(canonical_cuts({number: parents.get(number, _NO_PARENT)[1] for number in made})))
    if generation is not None:
        rows = rows.filter(generation_number=generation)
    if after_step is not None:
        rows = rows.filter(step__gt=after_step)
    every = 1
    if max_points is not None and (count := rows.count()) > max_points:
        every = -(-count // max_points)
        rows = rows.annotate(place=Mod(F("step"), every)).filter(place=0)
    loaded = list(rows.order_by("generation_number", "step")[: limit + 1])
    points: dict[int, list[MetricPoint]] = defaultdict(list)
    for row in loaded[:limit]:
        points[row.generation_number].append(_point(row))
    return JobMetrics(
        job=job.id,
        rank=rank,
        series=tuple(
            _series(number, rank=rank, points=made_points, parent=parents.get(number, _NO_PARENT))
            for number, made_points in points.items()
        ),
        canonical=canonical,
        more=len(loaded) > limit,
        every=every,
    )


def canonical_cuts(parent_steps: Mapping[int, int | None]) -> dict[int, int | None]:
    """Map each generation that made steps to the highest step that still counts; None means all of them.

    `parent_steps` maps generation to the step it began after (None: the beginning). What a generation did beyond the
    checkpoint from which a newer one went on is no part of the curve, also where the newer one is not yet that far.
    """
    cuts: dict[int, int | None] = {}
    cut: int | None = None
    for number in sorted(parent_steps, reverse=True):
        cuts[number] = cut
        start = parent_steps[number] or 0
        cut = start if cut is None else min(cut, start)
    return cuts


def _within(cuts: Mapping[int, int | None]) -> Q:
    condition = Q(generation_number__in=[number for number, cut in cuts.items() if cut is None])
    for number, cut in cuts.items():
        if cut is not None:
            condition |= Q(generation_number=number, step__lte=cut)
    return condition


_NO_PARENT: tuple[int | None, int | None] = (None, None)


def _parents(job_id: str) -> dict[int, tuple[int | None, int | None]]:
    """Map generation to (generation, step) of its parent checkpoint."""
    parents = {}
    for number, plan in GenerationRow.objects.filter(job_id=job_id).values_list("number", "plan"):
        parent = plan.get("parent") or {}
        parents[number] = (parent.get("generation"), parent.get("step"))
    return parents


def _series(
    generation: int, *, rank: int, points: Sequence[MetricPoint], parent: tuple[int | None, int | None]
) -> MetricSeries:
    return MetricSeries(
        generation=generation, rank=rank, parent_generation=parent[0], parent_step=parent[1], points=tuple(points)
    )


def _point(row: StepRow) -> MetricPoint:
    return MetricPoint(
        generation=row.generation_number,
        step=row.step,
        at=row.at,
        loss=row.loss,
        loss_text=row.loss_text,
        learning_rate=row.learning_rate,
        grad_norm=row.grad_norm,
        epoch=row.epoch,
        span_start=row.span_start,
        span_stop=row.span_stop,
        step_time_s=row.step_time_s,
        samples=row.samples,
        tokens=row.tokens,
        parameter_norm=row.parameter_norm,
        data_s=row.data_s,
        forward_backward_s=row.forward_backward_s,
        optimizer_s=row.optimizer_s,
        wait_s=row.wait_s,
        checkpoint_s=row.checkpoint_s,
        memory_bytes=row.memory_bytes,
        gpu_memory_bytes=row.gpu_memory_bytes,
    )
