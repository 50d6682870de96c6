"""Drills: faults injected on purpose."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Router
from pydantic import Field

from dashboard.api.callers import caller
from dashboard.api.idempotency import once
from dashboard.api.paging import Cursor, Limit, Page, page, position
from dashboard.api.values import Document, Moment, Request
from recovery import drills, queries
from recovery.domain.drill_promises import DrillState
from recovery.queries import DrillView

router = Router(tags=["drills"])


class DrillRequest(Request):
    kind: str = Field(min_length=1, max_length=30, description=f"One of {', '.join(drills.DRILL_KINDS)}.")
    job: str = Field(max_length=40, pattern=r"^[\x21-\x7e]+$")
    rank: int | None = Field(default=None, ge=0, description="Rank to hit, or the node that it runs on.")
    node: str | None = Field(default=None, max_length=200, description="Node to hit; by default that of the last rank.")
    duration_s: float | None = Field(default=None, ge=0, le=600, description="By default what the kind says.")
    steps_after_save: int = Field(default=0, ge=0, description="Wait until this many steps after the last checkpoint.")
    recovered_within_s: float = Field(
        default=120.0, gt=0, le=86_400, description="The promise, of a kind that breaks the job."
    )
    allow_waiting: bool = Field(
        default=False, description="Also where the job may then wait for a human or for the node's return."
    )


class DrillDocument(Document):
    id: str
    kind: str
    job: str
    job_name: str
    node: str = Field(description="Empty where the server itself is what was broken.")
    rank: int | None
    generation: int
    duration_s: float
    steps_after_save: int
    state: str
    ended: bool
    detail: str
    promise: dict[str, Any]
    requested_by: str
    requested_at: Moment
    not_after: Moment
    applied_at: Moment | None
    undone_at: Moment | None
    ended_at: Moment | None
    incident: str | None
    result: dict[str, Any]


@router.post("", response={201: DrillDocument}, operation_id="trigger_drill")
def trigger_drill(request: HttpRequest, body: DrillRequest) -> JsonResponse:
    """Trigger a drill. `Idempotency-Key` is required: a repeated request never injects a second fault."""
    by = caller(request).get_username()

    def effect() -> DrillDocument:
        drill = drills.trigger_drill(
            kind=body.kind,
            job_id=body.job,
            rank=body.rank,
            node=body.node,
            duration_s=body.duration_s,
            steps_after_save=body.steps_after_save,
            recovered_within_s=body.recovered_within_s,
            allow_waiting=body.allow_waiting,
            requested_by=by,
        )
        return DrillDocument.model_validate(queries.get_drill(drill.id))

    return once(request, effect, status=201, key_required=True)


@router.get("", response=Page[DrillDocument], operation_id="list_drills")
def list_drills(
    request: HttpRequest,
    response: HttpResponse,
    limit: Limit,
    cursor: Cursor,
    job: str | None = None,
    state: DrillState | None = None,
) -> dict[str, Any]:
    """Drills, newest first."""
    found = queries.list_drills(job=job, state=state, limit=limit + 1, after=position(cursor))
    return page(request, response, found, limit=limit, key=lambda one: [one.requested_at, one.id])


@router.get("/{drill_id}", response=DrillDocument, operation_id="get_drill")
def get_drill(request: HttpRequest, drill_id: str) -> DrillView:
    """One drill, with its result once it has ended."""
    return queries.get_drill(drill_id)
