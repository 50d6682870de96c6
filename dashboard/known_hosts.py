"""Refuses requests under a foreign name: names the setting that would allow it, and logs it once an hour.

Django refuses them too, but with a page that does not say why and a traceback in the log for each request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.core.exceptions import DisallowedHost
from django.http import HttpRequest, HttpResponse
from django.http.request import split_domain_port

from dashboard.api.problems import problem_response

log = logging.getLogger(__name__)

TOLD_AGAIN_AFTER_S = 3600.0
MOST_TOLD = 100
"""Names told within that time: who tries one name after the other does not fill the log."""


class KnownHosts:
    """First of the middlewares that look at the name; a problem document below `/api/`, else a sentence."""

    def __init__(
        self, get_response: Callable[[HttpRequest], HttpResponse], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.get_response = get_response
        self._told = _ToldNames(clock)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        try:
            request.get_host()
        except DisallowedHost:
            return self._refuse(request)
        return self.get_response(request)

    def _refuse(self, request: HttpRequest) -> HttpResponse:
        said = request.META.get("HTTP_HOST", "")
        name, _ = split_domain_port(said)
        if name:
            sentence = (
                f"This server is not reached as {name:.253}: if that is its name, add it to EVERSTEP_ALLOWED_HOSTS and "
                "restart the server."
            )
        else:
            sentence = (
                "The Host header of this request is no name: use one of EVERSTEP_ALLOWED_HOSTS, 127.0.0.1 or localhost."
            )
        if self._told.is_due(name):
            log.warning("Refused a request for host %.260r: %s", said, sentence)
        response: HttpResponse
        if request.path.startswith("/api/"):
            response = problem_response(request, "bad_request", sentence)
        else:
            response = HttpResponse(f"{sentence}\n", status=400, content_type="text/plain; charset=utf-8")
        response._has_been_logged = True  # type: ignore[attr-defined]  # Django logs each refused request otherwise
        return response


class _ToldNames:
    """Which names were logged of late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_due(self, name: str) -> bool:
        now = self._clock()
        with self._lock:
            self._told_at = {one: at for one, at in self._told_at.items() if now - at < TOLD_AGAIN_AFTER_S}
            if name in self._told_at or len(self._told_at) >= MOST_TOLD:
                return False
            self._told_at[name] = now
            return True
