"""Incidents: state and phases, timeline, receipt, and an operator's actions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Query, Router
from pydantic import Field

from dashboard.api.callers import caller
from dashboard.api.idempotency import once
from dashboard.api.paging import MAX_LIMIT, Cursor, Limit, Page, page, position
from dashboard.api.values import Document, Moment, Request
from recovery import incidents, queries
from recovery.domain.incident import IncidentState
from recovery.domain.receipt import Receipt
from recovery.queries import IncidentDetail, Timeline

router = Router(tags=["incidents"])


class IncidentActionRequest(Request):
    kind: Literal["pause", "resume", "retry", "close"]


class PhaseDocument(Document):
    state: str
    started_at: Moment
    ended_at: Moment | None
    seconds: float
    limit_s: float | None
    over_limit: bool


class IncidentDocument(Document):
    id: str
    job: str
    job_name: str
    state: str
    ended: bool
    needs_human: bool
    drill: str | None
    opened_at: Moment
    ended_at: Moment | None
    state_since: Moment
    deadline_at: Moment | None
    cause: dict[str, Any] | None
    cause_sentence: str
    reached_step: int | None
    broken_generation: int
    generation: int | None = Field(description="The generation that replaces the broken one, once it is planned.")
    attempt: int
    escalation: str
    verdict: str | None
    phases: list[PhaseDocument]
    entries_count: int


class IncidentDetailDocument(IncidentDocument):
    receipt: dict[str, Any] | None = Field(description="As `/receipt` gives it; null before the end.")


class EntryDocument(Document):
    seq: int
    occurred_at: Moment
    recorded_at: Moment
    kind: str
    text: str
    data: dict[str, Any]
    hash: str


class TimelineDocument(Document):
    items: list[EntryDocument]
    last_seq: int = Field(description="Seq of the last entry that exists, which may lie beyond these items.")


@router.get("", response=Page[IncidentDocument], operation_id="list_incidents")
def list_incidents(
    request: HttpRequest,
    response: HttpResponse,
    limit: Limit,
    cursor: Cursor,
    ended: bool | None = None,
    state: IncidentState | None = None,
    job: str | None = None,
) -> dict[str, Any]:
    """Incidents, newest first; `ended=false` keeps the open ones."""
    found = queries.list_incidents(ended=ended, state=state, job=job, limit=limit + 1, after=position(cursor))
    return page(request, response, found, limit=limit, key=lambda one: [one.opened_at, one.id])


@router.get("/{incident_id}", response=IncidentDetailDocument, operation_id="get_incident")
def get_incident(request: HttpRequest, incident_id: str) -> IncidentDetail:
    """One incident with its phases and its receipt."""
    return queries.get_incident(incident_id)


@router.get("/{incident_id}/timeline", response=TimelineDocument, operation_id="get_incident_timeline")
def get_timeline(
    request: HttpRequest,
    incident_id: str,
    after_seq: Annotated[int, Query(0, ge=0)],
    limit: Annotated[int, Query(MAX_LIMIT, ge=1, le=MAX_LIMIT)],
) -> Timeline:
    """The entries after `after_seq`, oldest first; their numbers have no holes."""
    return queries.incident_timeline(incident_id, after_seq=after_seq, limit=limit)


@router.get("/{incident_id}/receipt", response=Receipt, operation_id="get_incident_receipt")
def get_receipt(request: HttpRequest, incident_id: str) -> JsonResponse:
    """The receipt, exactly as it was issued; 404 until there is one."""
    return JsonResponse(queries.incident_receipt(incident_id))


@router.post("/{incident_id}/actions", response={202: IncidentDetailDocument}, operation_id="act_on_incident")
def act(request: HttpRequest, incident_id: str, body: IncidentActionRequest) -> JsonResponse:
    """Pause, resume, retry or close; taken up by the next step of the recovery."""
    by = caller(request).get_username()

    def effect() -> IncidentDetailDocument:
        row = incidents.command_incident(incident_id, kind=body.kind, by=by)
        return IncidentDetailDocument.model_validate(queries.get_incident(row.id))

    return once(request, effect, status=202)
