"""The overview: does anything need you, and does the control plane itself work."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from dashboard.broker import broker_latency
from dashboard.views.page import present, signed_in
from dashboard.views.progress import progress_of
from recovery import queries


@signed_in
@require_safe
def overview(request: HttpRequest) -> HttpResponse:
    seen = queries.overview()
    by_need = sorted(seen.open_incidents, key=lambda incident: not incident.needs_human)
    context = {
        "overview": seen,
        "open": [(incident, progress_of(incident)) for incident in by_need],
        "recent": queries.list_incidents(ended=True, limit=5),
        "jobs_count": sum(seen.jobs_by_state.values()),
        "nodes_count": sum(seen.nodes_by_state.values()),
        "broker_latency": broker_latency(),
    }
    return present(request, "overview", context, parts={"overview": "_overview.html"})
