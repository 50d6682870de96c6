"""Incidents: the list, one incident with its story and receipt, and what an operator may ask of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from dashboard.views.page import present, signed_in, whole_number
from dashboard.views.progress import progress_of
from recovery import breaker, queries
from recovery import incidents as incident_commands
from recovery.domain.incident import IncidentState
from recovery.domain.silence import Contact
from recovery.errors import CommandRefused
from recovery.queries import IncidentDetail

TABS = ("open", "done", "all")
ENTRIES_PER_FETCH = 500
"""More of them come with the next fetch; the page asks until it has the last."""

ACTIONS = {
    "pause": ("Pause", "Everstep takes no further step in this incident until you resume it."),
    "resume": ("Resume", "Everstep goes on: it makes sure that the old generation is stopped, then places it anew."),
    "retry": ("Try again", "Everstep makes a new plan and relaunches from the newest trusted checkpoint."),
    "close": ("Close incident", "Everstep gives this recovery up. The job is not relaunched by it."),
}
"""Kind of command -> its name on the button, and what it will do."""


@signed_in
@require_safe
def incidents(request: HttpRequest) -> HttpResponse:
    tab = request.GET.get("tab", "")
    tab = tab if tab in TABS else "all"
    found = queries.list_incidents(ended={"open": False, "done": True}.get(tab))
    needing = [incident for incident in found if incident.needs_human]
    others = [incident for incident in found if not incident.needs_human]
    context = {
        "incidents": [*needing, *others],
        "tab": tab,
        "tabs": TABS,
        "last_drill": next(iter(queries.list_drills(limit=1)), None),
    }
    return present(request, "incidents", context, parts={"incidents": "_incidents.html"})


@signed_in
@require_safe
def incident(request: HttpRequest, incident_id: str) -> HttpResponse:
    seen = queries.get_incident(incident_id)
    after_seq = whole_number(request.GET.get("after_seq"), otherwise=0)
    timeline = queries.incident_timeline(incident_id, after_seq=after_seq, limit=ENTRIES_PER_FETCH)
    if seen.job is None:
        context = {"incident": seen, "timeline": timeline} | _fleet_of(seen)
        return present(request, "breaker", context, parts={"head": "_breaker_head.html", "timeline": "_timeline.html"})
    context = {
        "incident": seen,
        "progress": progress_of(seen),
        "total_s": None if seen.ended_at is None else seen.ended_at - seen.opened_at,
        "actions": [(kind, *ACTIONS[kind]) for kind in _possible_actions(seen)],
        "timeline": timeline,
        "proofs": (seen.body.get("plan") or {}).get("fences") or seen.fences,
    }
    parts = {"head": "_incident_head.html", "timeline": "_timeline.html", "receipt": "_receipt.html"}
    return present(request, "incident", context, parts=parts)


@signed_in
@require_POST
def act(request: HttpRequest, incident_id: str) -> HttpResponse:
    kind, by = request.POST.get("kind", ""), request.user.get_username()
    try:
        if kind == "rearm":
            breaker.rearm_breaker(incident_id, by=by)
            messages.success(request, "Re-armed: a silent node is looked at on its own again.")
            return redirect("incident", incident_id)
        incident_commands.command_incident(incident_id, kind=kind, by=by)
        messages.success(request, f"Asked for: {ACTIONS[kind][0].lower()}. The timeline tells when it is done.")
    except CommandRefused as refused:
        messages.error(request, str(refused))
    return redirect("incident", incident_id)


def _possible_actions(incident: IncidentDetail) -> tuple[str, ...]:
    if incident.ended:
        return ()
    stop_ordered = bool(incident.body.get("stop_ordered", True))
    fitting = incident_commands.fitting_commands(IncidentState(incident.state), stop_ordered=stop_ordered)
    return tuple(kind for kind in ACTIONS if kind in fitting)


def _fleet_of(incident: IncidentDetail) -> dict[str, Any]:
    """The fleet's contact as it is now, and each node that fell silent with what is known of it."""
    fleet = queries.list_nodes()
    by_name = {node.name: node for node in fleet}
    counted = Counter(node.contact for node in fleet)
    return {
        "fleet": fleet,
        "contacts": [(contact.value, counted[contact]) for contact in Contact if counted[contact]],
        "silent": [(name, by_name.get(name)) for name in incident.nodes],
    }
