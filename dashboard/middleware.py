"""What every response gets: a strict content policy, no caching of what is behind the log-in, whole static files."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from whitenoise.middleware import WhiteNoiseMiddleware

GetResponse = Callable[[HttpRequest], HttpResponse]

CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
"""No inline script and no inline style anywhere; `data:` images are the browser's own form controls and icons."""


class ContentPolicy:
    """Adds the policy to every response, and `no-store` to every one that a view made."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response.headers.setdefault("Content-Security-Policy", CONTENT_POLICY)
        if not request.path.startswith(f"/{settings.STATIC_URL.strip('/')}/"):
            # A page and its partial share one address, and after log-out "back" must show neither.
            response.headers.setdefault("Cache-Control", "no-store")
        return response


class StaticFiles(WhiteNoiseMiddleware):  # type: ignore[misc]
    """WhiteNoise without streaming: under ASGI Django would read each streamed file in a thread and warn about it."""

    @staticmethod
    def serve(static_file: object, request: HttpRequest) -> HttpResponse:
        made = static_file.get_response(request.method, request.META)  # type: ignore[attr-defined]
        body = b""
        if made.file is not None:
            with made.file as file:
                body = file.read()
        response = HttpResponse(body, status=int(made.status))
        del response["content-type"]
        for name, value in made.headers:
            response[name] = value
        if body:
            # The header was computed at start; a file that was replaced since then would be cut off by it.
            response["content-length"] = str(len(body))
        return response
