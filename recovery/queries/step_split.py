"""Where the time of a job's latest steps went, as the job's page shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recovery.models import StepRow
from recovery.queries.jobs import find_job

PARTS = ("data", "forward_backward", "optimizer", "wait", "checkpoint")
"""In the order in which they are shown; each is a column of `StepRow` with `_s` behind."""


@dataclass(frozen=True, kw_only=True)
class SplitPart:
    name: str
    seconds: float
    """Mean per step."""
    begins_percent: float
    percent: float
    """Of the whole, so that all parts together are 100."""


@dataclass(frozen=True, kw_only=True)
class StepTimeSplit:
    steps: int
    rank: int
    seconds: float
    """Mean time from one step to the next, saves between them included."""
    memory_bytes: int | None
    """Newest that the rank told."""
    gpu_memory_bytes: int | None
    parts: tuple[SplitPart, ...]


def step_time_split(job_id: str, *, rank: int = 0, steps: int = 50) -> StepTimeSplit | None:
    """The mean of one rank's last steps in the newest generation that made any; None where nothing was measured.

    Time that no measured part claims is shown as `other`. Raises `NotFound`.
    """
    mine = StepRow.objects.filter(job=find_job(job_id), rank=rank)
    newest = mine.order_by("-generation_number").values_list("generation_number", flat=True).first()
    if newest is None:
        return None
    rows = list(mine.filter(generation_number=newest).order_by("-step")[:steps])
    timed = [row for row in rows if row.step_time_s is not None]
    sums = {name: _mean(timed, name) for name in PARTS}
    known = {name: value for name, value in sums.items() if value is not None}
    if not known:
        return None
    step_s = sum(row.step_time_s or 0.0 for row in timed) / len(timed)
    other = step_s - sum(value for name, value in known.items() if name != "checkpoint")
    if other > 0.005 * step_s:
        known["other"] = other
    whole = sum(known.values())
    return StepTimeSplit(
        steps=len(timed),
        rank=rank,
        seconds=whole,
        memory_bytes=next((row.memory_bytes for row in rows if row.memory_bytes is not None), None),
        gpu_memory_bytes=next((row.gpu_memory_bytes for row in rows if row.gpu_memory_bytes is not None), None),
        parts=_laid_out(known, whole),
    )


def _mean(rows: Sequence[StepRow], name: str) -> float | None:
    """Per step of all of them, since a save between two steps is paid for by all; None if no step has that part."""
    values = [value for row in rows if (value := getattr(row, f"{name}_s")) is not None]
    return sum(values) / len(rows) if values else None


def _laid_out(seconds: dict[str, float], whole: float) -> tuple[SplitPart, ...]:
    parts, begins = [], 0.0
    for name, value in seconds.items():
        percent = 100 * value / whole if whole else 0.0
        parts.append(SplitPart(name=name, seconds=value, begins_percent=round(begins, 2), percent=round(percent, 2)))
        begins += percent
    return tuple(parts)
