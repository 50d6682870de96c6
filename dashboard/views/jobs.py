"""Jobs: the list, one job with its curves, and the stop button."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from dashboard.views.page import present, signed_in
from recovery import jobs as job_commands
from recovery import queries
from recovery.checkpoints import request_save
from recovery.domain.generations import Phase
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.errors import CommandRefused
from recovery.queries import JobDetail
from recovery.queries.metrics import canonical_cuts

TABLE_STEPS = 200
"""The chart's table holds the last so many steps; all of them are in the REST API."""


@signed_in
@require_safe
def jobs(request: HttpRequest) -> HttpResponse:
    wanted = request.GET.get("state", "")
    found = queries.list_jobs(state=wanted or None)
    context = {"jobs": found, "states": [state.value for state in JobState], "wanted_state": wanted}
    return present(request, "jobs", context, parts={"jobs": "_jobs.html"})


@signed_in
@require_safe
def job(request: HttpRequest, job_id: str) -> HttpResponse:
    if request.GET.get("part") == "steps":
        return present(request, "job", _steps(job_id), parts={"steps": "_job_steps.html"})
    seen = queries.get_job(job_id)
    incidents = queries.list_incidents(job=job_id)
    checkpoints = queries.job_checkpoints(job_id)
    saving = queries.job_saving(job_id)
    context = {
        "job": seen,
        "ended": seen.state in JOB_ENDS,
        "shrunk": bool(seen.generations) and seen.state not in JOB_ENDS and 0 < len(seen.nodes) < seen.nodes_max,
        "heard_nodes": [name for name in seen.nodes if name not in {unseen.node for unseen in seen.unseen}],
        "trains": all(unseen.trains_on for unseen in seen.unseen),
        "lease": _lease(seen),
        "split": queries.step_time_split(job_id),
        "generations": tuple(reversed(seen.generations)),
        "checkpoints": checkpoints,
        "saving": saving,
        "incidents": incidents,
        "marks": {
            "generations": [
                {"number": one.number, "parent_step": one.parent_step, "reached_step": one.reached_step}
                for one in seen.generations
            ],
            "checkpoints": [{"generation": one.generation, "step": one.step} for one in checkpoints],
            "incidents": [
                {"generation": one.broken_generation, "step": one.reached_step, "drill": one.drill is not None}
                for one in incidents
                if one.reached_step is not None
            ],
        },
    }
    return present(request, "job", context, parts={"head": "_job_head.html", "job": "_job.html"})


@signed_in
@require_POST
def stop(request: HttpRequest, job_id: str) -> HttpResponse:
    try:
        job_commands.stop_job(job_id, by=request.user.get_username())
        messages.success(request, "Stopping. The ranks are ended on every node, and each node proves it.")
    except CommandRefused as refused:
        messages.error(request, str(refused))
    return redirect("job", job_id)


@signed_in
@require_POST
def checkpoint(request: HttpRequest, job_id: str) -> HttpResponse:
    try:
        request_save(job_id, by=request.user.get_username())
        messages.success(request, "A checkpoint is asked for: the ranks save at the next step that they agree on.")
    except CommandRefused as refused:
        messages.error(request, str(refused))
    return redirect("job", job_id)


def _lease(job: JobDetail) -> list[tuple[str, float]]:
    """Phase and seconds of the newest generation's lease, in the order in which a rank goes through them."""
    terms = (job.generations[-1].lease if job.generations else None) or {}
    return [(phase.value, terms[f"{phase.value}_s"]) for phase in Phase if f"{phase.value}_s" in terms]


def _steps(job_id: str) -> dict[str, Any]:
    """The last steps of rank 0, newest first; each marked if a later generation went on from before it."""
    reached = max((one.reached_step or 0 for one in queries.get_job(job_id).generations), default=0)
    metrics = queries.job_metrics(job_id, after_step=max(0, reached - TABLE_STEPS))
    cuts = canonical_cuts({series.generation: series.parent_step for series in metrics.series})
    rows = [
        (point, (cut := cuts[series.generation]) is not None and point.step > cut)
        for series in metrics.series
        for point in series.points
    ]
    rows.sort(key=lambda row: (row[0].generation, row[0].step), reverse=True)
    return {"rows": rows, "rank": metrics.rank, "table_steps": TABLE_STEPS}
