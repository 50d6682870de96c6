"""Errors of the REST API as RFC 9457 problem documents, each with a `type` that names a documented kind.

`ProblemMiddleware` makes sure that everything below `/api/` answers in this form, also what Django refuses before a
handler is found; `install` gives django-ninja the handlers for exceptions inside of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import Http404, HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, Throttled, ValidationError

from recovery.errors import (
    CommandRefused,
    DrillRefused,
    FenceRefused,
    JobRefused,
    JoinRefused,
    NotConfirmed,
    NotFound,
    RecoveryError,
)
from recovery.ids import fresh_id

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"


@dataclass(frozen=True)
class Kind:
    """One documented kind of error: its name in `type`, HTTP status, title, and what to do."""

    name: str
    status: int
    title: str
    advice: str


_KINDS = (
    Kind("bad_request", 400, "Bad request", "The request cannot be read: correct it as `detail` says."),
    Kind("unknown_parameter", 400, "Unknown query parameter", "Correct or remove the named parameter."),
    Kind("bad_parameter", 400, "Bad query parameter", "Correct the parameters that `errors` names."),
    Kind("bad_cursor", 400, "Bad cursor", "Use `next` of the page before, or begin again without `cursor`."),
    Kind("key_required", 400, "Idempotency-Key required", "Send a fresh `Idempotency-Key` per intended effect."),
    Kind("unauthenticated", 401, "Not authenticated", "Send `Authorization: Bearer <token>` with a valid token."),
    Kind("csrf", 403, "CSRF check failed", "Send the `X-CSRFToken` header, or use a bearer token."),
    Kind("forbidden", 403, "Forbidden", "The caller may not do this."),
    Kind("join_refused", 403, "Join refused", "Create a new join token, or correct the node's name."),
    Kind("not_found", 404, "Not found", "Check the address and the id."),
    Kind("method_not_allowed", 405, "Method not allowed", "Use one of the methods in the `Allow` header."),
    Kind("drill_refused", 409, "Drill refused", "A guard forbids the drill now; `guard` names it. Try later."),
    Kind("command_refused", 409, "Command refused", "It does not fit the present state; read the state again."),
    Kind("fence_refused", 409, "Fence refused", "The node is in contact, or waits for no proof; `detail` says which."),
    Kind("in_progress", 409, "Request in progress", "The first request with this key still runs. Try later."),
    Kind("refused", 409, "Refused", "Recovery refused the request; `detail` says why."),
    Kind("validation", 422, "Invalid request", "Correct the members that `errors` points to."),
    Kind("not_confirmed", 422, "Not confirmed", "Send the node's exact name as `confirm`."),
    Kind("job_refused", 422, "Job refused", "Correct the job's spec as `detail` says."),
    Kind("key_reused", 422, "Idempotency-Key reused", "Use a fresh key for another request."),
    Kind("too_many_requests", 429, "Too many requests", "Wait as long as `Retry-After` says."),
    Kind("internal_error", 500, "Internal error", "Report the request id in `instance` to the operator."),
    Kind("unavailable", 503, "Unavailable", "Try again shortly."),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}

_KIND_OF_STATUS = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    429: "too_many_requests",
    503: "unavailable",
}

_KIND_OF_REFUSAL: tuple[tuple[type[RecoveryError], str], ...] = (
    (NotFound, "not_found"),
    (JobRefused, "job_refused"),
    (DrillRefused, "drill_refused"),
    (JoinRefused, "join_refused"),
    (NotConfirmed, "not_confirmed"),
    (FenceRefused, "fence_refused"),
    (CommandRefused, "command_refused"),
    (RecoveryError, "refused"),
)


class Problem(Exception):
    """Raised by the API's own parts to end a request with a documented kind of error."""

    def __init__(self, kind: str, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = headers or {}


def request_id(request: HttpRequest) -> str:
    """The request's id, made on first use: in error answers, in the `X-Request-Id` header and in the log."""
    known: str | None = getattr(request, "everstep_request_id", None)
    if known is None:
        known = fresh_id("req")
        request.everstep_request_id = known  # type: ignore[attr-defined]
    return known


def problem_response(
    request: HttpRequest,
    kind: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    members: Mapping[str, object] | None = None,
) -> JsonResponse:
    """Return the problem document of a kind in `KINDS`, with further `members` of that kind."""
    known = KINDS[kind]
    body = {
        "type": f"/docs/errors#{known.name}",
        "title": known.title,
        "status": known.status,
        "detail": detail,
        "instance": request_id(request),
        **(members or {}),
    }
    response = JsonResponse(body, status=known.status, content_type=CONTENT_TYPE)
    response["X-Request-Id"] = request_id(request)
    if known.status == 401:
        response["WWW-Authenticate"] = 'Bearer realm="everstep"'
    for name, value in (headers or {}).items():
        response[name] = value
    return response


def install(api: NinjaAPI) -> None:
    """Register the handlers of every exception that may leave an operation."""
    api.add_exception_handler(Problem, _on_problem)
    api.add_exception_handler(RecoveryError, _on_refusal)
    api.add_exception_handler(ValidationError, _on_validation_error)
    api.add_exception_handler(HttpError, _on_http_error)
    api.add_exception_handler(Http404, _on_not_found)
    api.add_exception_handler(Exception, _on_surprise)


def _on_problem(request: HttpRequest, error: Problem | type[Problem]) -> JsonResponse:
    assert isinstance(error, Problem)
    return problem_response(request, error.kind, error.detail, headers=error.headers)


def _on_refusal(request: HttpRequest, error: RecoveryError | type[RecoveryError]) -> JsonResponse:
    kind = next(kind for family, kind in _KIND_OF_REFUSAL if isinstance(error, family))
    members = {"guard": error.guard} if isinstance(error, DrillRefused) else {}
    return problem_response(request, kind, str(error), members=members)


def _on_validation_error(request: HttpRequest, error: ValidationError | type[ValidationError]) -> JsonResponse:
    assert isinstance(error, ValidationError)
    body = _body_of(request)
    errors = _merged([_pointed(one["loc"], one["msg"], body) for one in error.errors])
    detail = "; ".join(f"{one.get('pointer') or one.get('parameter')}: {one['detail']}" for one in errors)
    kind = "validation" if any("pointer" in one for one in errors) else "bad_parameter"
    return problem_response(request, kind, detail, members={"errors": errors})


def _merged(errors: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """One error per parameter: a value that fits none of several kinds is told of once for each of them."""
    merged: list[dict[str, str]] = []
    for one in errors:
        if merged and "parameter" in one and merged[-1].get("parameter") == one["parameter"]:
            merged[-1]["detail"] += f", or {one['detail'].removeprefix('Input should be ')}"
        else:
            merged.append(dict(one))
    return merged


def _body_of(request: HttpRequest) -> object:
    try:
        return json.loads(request.body or b"null")
    except ValueError:
        return None


def _pointed(location: Sequence[int | str], message: str, body: object) -> dict[str, str]:
    """Where it is wrong: a JSON pointer into the body, or the name of a parameter. Values are not repeated."""
    if location[0] == "body":
        # The second part is the name of the handler's argument, which callers do not know.
        path = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in _in_body(location[2:], body))
        return {"pointer": f"#{path}", "detail": message}
    return {"parameter": str(location[1]), "detail": message}


def _in_body(location: Sequence[int | str], body: object) -> list[int | str]:
    """The location without the names of alternatives, which are no part of the body."""
    parts: list[int | str] = []
    value = body
    for index, part in enumerate(location):
        if isinstance(value, dict) and (part in value or index == len(location) - 1):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(value, dict):
            continue
        else:
            break
        parts.append(part)
    return parts


def _on_http_error(request: HttpRequest, error: HttpError | type[HttpError]) -> JsonResponse:
    assert isinstance(error, HttpError)
    if isinstance(error, AuthenticationError):
        detail = "This needs a bearer token or a session: send `Authorization: Bearer <token>`, or log in."
        return problem_response(request, "unauthenticated", detail)
    headers = {"Retry-After": str(math.ceil(error.wait))} if isinstance(error, Throttled) and error.wait else None
    kind = _KIND_OF_STATUS.get(error.status_code, "bad_request")
    return problem_response(request, kind, str(error), headers=headers)


def _on_not_found(request: HttpRequest, error: Http404 | type[Http404]) -> JsonResponse:
    return problem_response(request, "not_found", f"There is nothing at {request.path}.")


def _on_surprise(request: HttpRequest, error: Exception | type[Exception]) -> JsonResponse:
    logger.error(
        "Request %s: %s %s failed",
        request_id(request),
        request.method,
        request.path,
        exc_info=error,  # type: ignore[arg-type]
    )
    return problem_response(request, "internal_error", "Something failed inside the server; its log has the details.")


class ProblemMiddleware:
    """Below `/api/`, whatever error is no problem document becomes one: 404, 405, 400 and 500 of Django itself."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self._get_response(request)
        if not request.path.startswith("/api/"):
            return response
        if response.status_code < 400 or response.get("Content-Type", "").startswith(CONTENT_TYPE):
            response.setdefault("X-Request-Id", request_id(request))
            return response
        return _as_problem(request, response)


def _as_problem(request: HttpRequest, response: HttpResponseBase) -> JsonResponse:
    status = response.status_code
    kind = _KIND_OF_STATUS.get(status, "internal_error" if status >= 500 else "bad_request")
    details: dict[str, Any] = {
        "not_found": f"There is nothing at {request.path}.",
        "method_not_allowed": f"{request.method} is not possible at {request.path}.",
        "internal_error": "Something failed inside the server; its log has the details.",
    }
    headers = {"Allow": response["Allow"]} if "Allow" in response else None
    detail = details.get(kind, f"The server refused the request with status {status}.")
    return problem_response(request, kind, detail, headers=headers)
