"""The API object: its operations, callers and errors, and its OpenAPI document.

`dashboard.urls` mounts it at `/api/v1/`; `manage.py export_openapi` writes the document to `docs/openapi.json`.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from django.http import HttpRequest, JsonResponse
from ninja import NinjaAPI

from dashboard.api import agents, drills, incidents, jobs, nodes
from dashboard.api.callers import CALLERS
from dashboard.api.problems import CONTENT_TYPE, install
from dashboard.api.strict import refuse_unknown_parameters

PREFIX = "/api/v1/"

DESCRIPTION = """\
Nodes, jobs, incidents and drills of Everstep. Times are RFC 3339 in UTC; durations end in `_s` and are seconds.
Lists are paged by `limit` and `cursor`; errors are RFC 9457 problem documents; a query parameter that an operation
does not know is refused. A POST may carry `Idempotency-Key`: within 24 hours a repeat by the same caller gets the
stored answer with `Idempotent-Replayed: true`."""

api = NinjaAPI(
    title="Everstep",
    version="1",
    description=DESCRIPTION,
    urls_namespace="api",
    auth=CALLERS,
    openapi_url=None,
    docs_url=None,
)
install(api)
api.add_decorator(refuse_unknown_parameters, mode="view")
api.add_router("agents", agents.router)
api.add_router("nodes", nodes.router)
api.add_router("jobs", jobs.router)
api.add_router("incidents", incidents.router)
api.add_router("drills", drills.router)


@api.get("openapi.json", include_in_schema=False)
def get_openapi(request: HttpRequest) -> JsonResponse:
    """The OpenAPI document."""
    return JsonResponse(openapi_document())


_PROBLEM_SCHEMA = {
    "title": "Problem",
    "description": "RFC 9457. `instance` is the request's id; `errors` points into the body or names parameters.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "instance"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
        "guard": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["detail"],
                "properties": {
                    "pointer": {"type": "string"},
                    "parameter": {"type": "string"},
                    "detail": {"type": "string"},
                },
            },
        },
    },
}


@cache
def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1: what django-ninja knows, the problem document of every operation, and the header of each POST."""
    document: dict[str, Any] = copy.deepcopy(dict(api.get_openapi_schema(path_prefix=PREFIX)))
    document["components"]["schemas"]["Problem"] = _PROBLEM_SCHEMA
    for operations in document["paths"].values():
        for method, operation in operations.items():
            _complete(method, operation)
    return document


def _complete(method: str, operation: dict[str, Any]) -> None:
    operation["responses"] = {str(status): answer for status, answer in operation["responses"].items()}
    operation["responses"]["default"] = {
        "description": "The request failed or was refused.",
        "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if method == "post" and "security" in operation:
        operation["parameters"].append(
            {
                "in": "header",
                "name": "Idempotency-Key",
                "required": operation["operationId"] == "trigger_drill",
                "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,200}$"},
            }
        )
