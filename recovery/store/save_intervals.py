"""Reads what the choice of a job's save interval needs: what a save costs it, and how often the fleet fails."""

from __future__ import annotations

import statistics
from typing import Any

from recovery.domain.incident import IncidentState
from recovery.domain.interval import IntervalChoice, IntervalInputs, choose_interval
from recovery.models import CheckpointRow, GenerationRow, IncidentRow, Job, StepRow

AUTO = "auto"
WINDOW_S = 90 * 86_400.0
"""Failures that are older say little of the fleet as it is now."""
_SAVES = 10
_STEPS = 50
_NO_FAILURES = ("loss_not_finite", "early_exit", "launch_failed")
"""Causes of incidents that no node is to blame for."""


def save_every(job: Job, *, now: float) -> str:
    """What the job's next generation is told: a number of steps, `auto`, or nothing where the script decides."""
    wanted = job.spec.get("save_every")
    if wanted is None:
        return ""
    if wanted != AUTO:
        return str(wanted)
    choice = job_interval(job, now=now)
    return AUTO if choice.steps is None else str(choice.steps)


def job_interval(job: Job, *, now: float) -> IntervalChoice:
    """What `auto` would be for a job right now, with its reasons."""
    failures, node_hours = _fleet_failures(now)
    return choose_interval(
        IntervalInputs(
            save_cost_s=_save_cost_s(job),
            step_time_s=_step_time_s(job),
            nodes=_nodes(job.spec),
            failures=failures,
            node_hours=node_hours,
        )
    )


def _save_cost_s(job: Job) -> float | None:
    rows = (
        CheckpointRow.objects.filter(job=job, step__gt=0).order_by("-saved_at").values_list("blocked_s", "save_time_s")
    )
    costs = [cost for blocked_s, whole_s in rows[:_SAVES] if (cost := whole_s if blocked_s is None else blocked_s)]
    return statistics.median(costs) if costs else None


def _step_time_s(job: Job) -> float | None:
    rows = StepRow.objects.filter(job=job, rank=0, step_time_s__isnull=False).order_by("-generation_number", "-step")
    times = [time_s for time_s in rows.values_list("step_time_s", flat=True)[:_STEPS] if time_s]
    return statistics.median(times) if times else None


def _fleet_failures(now: float) -> tuple[int, float]:
    """(failures of nodes and ranks, node-hours of training in which they came), of the last months, without drills."""
    since = now - WINDOW_S
    found = IncidentRow.objects.filter(kind="job", drill__isnull=True, opened_at__gt=since).exclude(
        state=IncidentState.FALSE_ALARM.value
    )
    kinds = found.values_list("body__cause__kind", flat=True)
    failures = sum(kind not in (None, *_NO_FAILURES) for kind in kinds)
    ran = GenerationRow.objects.filter(run_ordered_at__isnull=False, run_ordered_at__gt=since)
    seconds = 0.0
    for nodes, began, ended in ran.values_list("plan__nodes", "run_ordered_at", "stop_ordered_at"):
        seconds += max(0.0, (now if ended is None else ended) - (began or now)) * len(nodes or ())
    return failures, seconds / 3600.0


def _nodes(spec: dict[str, Any]) -> int:
    nodes = spec["nodes"]
    return int(nodes["max"] if isinstance(nodes, dict) else nodes)
