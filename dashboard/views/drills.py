"""Drills: what can be broken on purpose, the button that does it, and how earlier ones went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods

from dashboard.views.page import present, signed_in, whole_number
from recovery import drills as drill_commands
from recovery import queries
from recovery.domain.drill_kinds import KINDS, DrillKind, PromiseKind, Target
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.errors import DrillRefused
from recovery.queries import JobSummary

DEFAULT_KIND = "kill-rank"
DEFAULT_PROMISE_S = 120
LONGEST_PROMISE_S = 3600

GO = {
    "kill-rank": "Kill this rank",
    "kill-agent": "Kill agent and ranks",
    "restart-agent": "Restart this agent",
    "freeze-node": "Freeze this node",
    "partition": "Cut this agent off",
    "isolate-node": "Isolate this node",
    "server-down": "Take the server down",
}
"""Kind of drill -> what the last button before it says."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the form asks for."""

    kind: DrillKind
    job_id: str
    rank: int
    node: str
    duration_s: int
    steps_after_save: int
    recovered_within_s: int
    allow_waiting: bool


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def drills(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        return _trigger(request, request.POST.dict())
    live = [job for job in queries.list_jobs() if job.state not in JOB_ENDS]
    steady = [job for job in live if job.state == JobState.RUNNING and job.open_incident is None]
    wanted = request.GET.get("job", "")
    in_sight = [job for job in steady if not job.unseen]
    chosen = next((job for job in live if job.id == wanted), next(iter([*in_sight, *steady, *live]), None))
    wish = _wish(request.GET.dict(), chosen)
    past = queries.list_drills(limit=50)
    context = {
        "kinds": KINDS.values(),
        "jobs": live,
        "chosen": chosen,
        "ranks": _ranks(chosen) if chosen else (),
        "wish": wish,
        "go": GO[wish.kind.name],
        "hit": _hit(wish, chosen),
        "recovers": wish.kind.promise is PromiseKind.RECOVERED,
        "spares": [node.name for node in queries.list_nodes() if node.spare],
        "ready": chosen in steady,
        "drills": past,
        "under_way": [drill for drill in past if not drill.ended],
    }
    parts = {"list": "_drills.html", "form": "_drill_form.html", "preview": "_drill_preview.html"}
    return present(request, "drills", context, parts=parts)


def _trigger(request: HttpRequest, form: Mapping[str, Any]) -> HttpResponse:
    wish = _wish(form, None)
    # A kind that is not known is passed on as it came: the guard says what is.
    kind = str(form.get("kind", DEFAULT_KIND))
    target = wish.kind.target
    try:
        drill = drill_commands.trigger_drill(
            kind=kind,
            job_id=wish.job_id,
            rank=wish.rank if target is Target.RANK else None,
            node=wish.node or None if target is Target.NODE else None,
            duration_s=float(wish.duration_s),
            steps_after_save=wish.steps_after_save,
            recovered_within_s=float(wish.recovered_within_s),
            allow_waiting=wish.allow_waiting,
            requested_by=request.user.get_username(),
        )
        messages.success(request, f"Drill {drill.id} is on its way. It is listed below and updates itself.")
    except DrillRefused as refused:
        messages.error(request, f'Refused by the guard "{refused.guard}": {refused}')
    return redirect("drills")


def _wish(form: Mapping[str, Any], chosen: JobSummary | None) -> Wish:
    kind = KINDS.get(form.get("kind", ""), KINDS[DEFAULT_KIND])
    usual_s = int(kind.duration_s)
    # What was typed for another kind is no wish for this one.
    typed_s = form.get("duration_s") if form.get("fields_of", kind.name) == kind.name else None
    nodes = chosen.nodes if chosen else ()
    node = form.get("node", "")
    if nodes and node not in nodes:
        node = nodes[-1]
    return Wish(
        kind=kind,
        job_id=form.get("job", ""),
        rank=whole_number(form.get("rank"), otherwise=0),
        node=node,
        duration_s=whole_number(typed_s, otherwise=usual_s) if kind.lasts else 0,
        steps_after_save=whole_number(form.get("steps_after_save"), otherwise=0),
        recovered_within_s=min(
            max(whole_number(form.get("recovered_within_s"), otherwise=DEFAULT_PROMISE_S), 1), LONGEST_PROMISE_S
        ),
        allow_waiting=form.get("allow_waiting") == "yes",
    )


def _hit(wish: Wish, job: JobSummary | None) -> dict[str, Any] | None:
    """The node that is hit, and which of the job's ranks it runs; None if there is no such node right now."""
    if job is None or wish.kind.target is Target.SERVER:
        return None
    ranks = _ranks(job)
    node = dict(ranks).get(wish.rank) if wish.kind.target is Target.RANK else wish.node
    on_node = [rank for rank, name in ranks if name == node]
    return {"node": node, "ranks": on_node} if node and on_node else None


def _ranks(job: JobSummary) -> tuple[tuple[int, str], ...]:
    """Each rank of the job's newest generation with the node that it runs on."""
    return tuple(
        (index * job.ranks_per_node + local, node)
        for index, node in enumerate(job.nodes)
        for local in range(job.ranks_per_node)
    )
