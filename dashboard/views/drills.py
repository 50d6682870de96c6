"""Drills: what can be broken on purpose, the button that does it, and how earlier ones went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods

from dashboard.views.page import present, signed_in, whole_number
from recovery import drills as drill_commands
from recovery import queries
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.errors import DrillRefused
from recovery.queries import JobSummary

DEFAULT_PROMISE_S = 120
LONGEST_PROMISE_S = 3600


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the form asks for."""

    kind: str
    job_id: str
    rank: int
    steps_after_save: int
    recovered_within_s: int


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def drills(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        return _trigger(request, _wish(request.POST.dict()))
    wish = _wish(request.GET.dict())
    live = [job for job in queries.list_jobs() if job.state not in JOB_ENDS]
    steady = [job for job in live if job.state == JobState.RUNNING and job.open_incident is None]
    chosen = next((job for job in live if job.id == wish.job_id), next(iter([*steady, *live]), None))
    past = queries.list_drills(limit=50)
    context = {
        "kinds": drill_commands.DRILL_KINDS.items(),
        "jobs": live,
        "chosen": chosen,
        "ranks": _ranks(chosen) if chosen else (),
        "wish": wish,
        "node": dict(_ranks(chosen)).get(wish.rank) if chosen else None,
        "ready": chosen in steady,
        "drills": past,
        "under_way": [drill for drill in past if not drill.ended],
    }
    parts = {"list": "_drills.html", "form": "_drill_form.html", "preview": "_drill_preview.html"}
    return present(request, "drills", context, parts=parts)


def _trigger(request: HttpRequest, wish: Wish) -> HttpResponse:
    try:
        drill = drill_commands.trigger_drill(
            kind=wish.kind,
            job_id=wish.job_id,
            rank=wish.rank,
            steps_after_save=wish.steps_after_save,
            recovered_within_s=float(wish.recovered_within_s),
            requested_by=request.user.get_username(),
        )
        messages.success(request, f"Drill {drill.id} is on its way to the node. It is listed below and updates itself.")
    except DrillRefused as refused:
        messages.error(request, f'Refused by the guard "{refused.guard}": {refused}')
    return redirect("drills")


def _wish(form: dict[str, Any]) -> Wish:
    return Wish(
        kind=form.get("kind", "kill-rank"),
        job_id=form.get("job", ""),
        rank=whole_number(form.get("rank"), otherwise=0),
        steps_after_save=whole_number(form.get("steps_after_save"), otherwise=0),
        recovered_within_s=min(
            max(whole_number(form.get("recovered_within_s"), otherwise=DEFAULT_PROMISE_S), 1), LONGEST_PROMISE_S
        ),
    )


def _ranks(job: JobSummary) -> tuple[tuple[int, str], ...]:
    """Each rank of the job's newest generation with the node that it runs on."""
    return tuple(
        (index * job.ranks_per_node + local, node)
        for index, node in enumerate(job.nodes)
        for local in range(job.ranks_per_node)
    )
