"""Refuses query parameters that an operation does not know: a misspelt filter must not be ignored in silence.

NUL characters are refused too: no name holds one, and PostgreSQL takes none in a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from ninja.operation import Operation

from dashboard.api.problems import problem_response

Run = Callable[..., HttpResponseBase]


def refuse_unknown_parameters(run: Run) -> Run:
    """Wrap an operation's `run` (a bound method, so that the operation and its parameters are known)."""
    operation: Operation = run.__self__  # type: ignore[attr-defined]
    known = query_parameters(operation)

    @wraps(run)
    def checked(request: HttpRequest, **path: Any) -> HttpResponseBase:
        unknown = sorted(set(request.GET) - known)
        if unknown:
            names = ", ".join(sorted(known)) or "none"
            detail = f"Unknown query parameter {', '.join(unknown)}; this operation knows: {names}."
            return problem_response(request, "unknown_parameter", detail, members={"parameters": unknown})
        if any("\0" in str(value) for value in (*path.values(), *request.GET.values())):
            return problem_response(request, "bad_request", "The address holds a NUL character, which no name has.")
        return run(request, **path)

    return checked


def query_parameters(operation: Operation) -> frozenset[str]:
    """Names of the query parameters that an operation takes, as its OpenAPI entry states them."""
    return frozenset(
        name
        for model in operation.models
        if model.__ninja_param_source__ == "query"
        for name in model.__ninja_flatten_map__
    )
