"""What every view needs: the log-in guard, and one answer for a whole page and for its live parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from recovery import queries
from recovery.errors import NotFound
from recovery.queries import IncidentSummary

View = Callable[..., HttpResponse]


def signed_in(view: View) -> View:
    """Only for users; others go to the log-in page. What recovery does not know becomes a 404 page."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return _to_login(request)
        try:
            return view(request, *args, **kwargs)
        except NotFound as missing:
            raise Http404(str(missing)) from missing

    return guarded


def _to_login(request: HttpRequest) -> HttpResponse:
    if "part" in request.GET:
        # A redirect would be followed and the log-in page put into the middle of this one.
        return HttpResponse(status=401, headers={"HX-Redirect": reverse("login")})
    return redirect_to_login(request.get_full_path())


def present(
    request: HttpRequest,
    page: str,
    context: Mapping[str, Any],
    *,
    parts: Mapping[str, str],
    status: int = 200,
) -> HttpResponse:
    """Render `<page>.html`, or with `?part=<name>` one of its partials: the very template that the page includes."""
    part = request.GET.get("part")
    if part is not None and part not in parts:
        raise Http404(f"The page {page} has no part {part}.")
    shown = {**context, "page": page, "now": time.time()}
    if part is not None:
        return render(request, parts[part], shown, status=status)
    return render(request, f"{page}.html", shown | {"breaker": open_breaker()}, status=status)


def open_breaker() -> IncidentSummary | None:
    """The control-plane incident that every page must tell of."""
    return next(iter(queries.list_incidents(ended=False, kind="control_plane", limit=1)), None)


def whole_number(value: str | None, *, otherwise: int) -> int:
    """A number from a query string; anything else counts as absent."""
    return int(value) if value is not None and value.isdecimal() and len(value) < 16 else otherwise
