"""The overview: does anything need you, and does the control plane itself work."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from dashboard.broker import broker_latency
from dashboard.views.page import open_breaker, present, signed_in
from dashboard.views.progress import progress_of
from recovery import queries


@signed_in
@require_safe
def overview(request: HttpRequest) -> HttpResponse:
    seen = queries.overview()
    # The banner tells of an incident of the control plane, on this page as on every other.
    of_jobs = [incident for incident in seen.open_incidents if incident.job is not None]
    by_need = sorted(of_jobs, key=lambda incident: not incident.needs_human)
    context = {
        "overview": seen,
        "open": [(incident, progress_of(incident)) for incident in by_need],
        "recent": queries.list_incidents(ended=True, limit=5),
        "jobs_count": sum(seen.jobs_by_state.values()),
        "nodes_count": sum(seen.nodes_by_state.values()),
        "broker_latency": broker_latency(),
    }
    return present(request, "overview", context, parts={"overview": "_overview.html"})


@signed_in
@require_safe
def banner(request: HttpRequest) -> HttpResponse:
    """The live part that all pages share: whether the breaker is open."""
    return render(request, "_banner.html", {"breaker": open_breaker()})
