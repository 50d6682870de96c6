"""Incidents: state and phases, timeline, receipt, and an operator's actions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Query, Router
from pydantic import Field

from dashboard.api.callers import caller
from dashboard.api.idempotency import once
from dashboard.api.paging import MAX_LIMIT, Cursor, Limit, Page, page, position
from dashboard.api.values import Document, Moment, ProofDocument, Request
from recovery import breaker, incidents, queries
from recovery.domain.awaited_fences import FenceHelp
from recovery.domain.breaker import BreakerState
from recovery.domain.incident import IncidentState
from recovery.domain.receipt import Receipt
from recovery.domain.silence import Contact
from recovery.queries import IncidentDetail, Timeline

router = Router(tags=["incidents"])


class IncidentActionRequest(Request):
    kind: Literal["pause", "resume", "retry", "close", "rearm"] = Field(
        description="`rearm` is for an incident of the control plane, the others for a job's."
    )


class PhaseDocument(Document):
    state: str
    started_at: Moment
    ended_at: Moment | None
    seconds: float
    limit_s: float | None
    over_limit: bool


class WaitingForDocument(Document):
    """A node without proof that the old generation is gone from it, and what would bring one."""

    node: str
    generation: int
    contact: Contact
    last_heard_at: Moment | None
    silent_s: float
    lease_ends_at: Moment | None = Field(description="Null: no lease proves anything here.")
    helps: list[FenceHelp] = Field(description="What would bring the proof.")
    fence_action: str | None = Field(description="State of the newest fence action since the incident began.")


class IncidentDocument(Document):
    id: str
    kind: Literal["job", "control_plane"]
    job: str | None = Field(description="Null for an incident of the control plane.")
    job_name: str
    nodes: list[str] = Field(description="Of the control plane: the nodes that fell silent together.")
    fleet_size: int | None = Field(description="Of the control plane: how many nodes there were.")
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
    broken_generation: int | None
    generation: int | None = Field(description="The generation that replaces the broken one, once it is planned.")
    attempt: int = Field(description="The relaunch that this recovery is at, from 1; 0 before one is planned.")
    escalation: str
    verdict: str | None
    phases: list[PhaseDocument]
    entries_count: int


class IncidentDetailDocument(IncidentDocument):
    waiting_for: list[WaitingForDocument] = Field(description="Proofs that are missing.")
    fences: list[ProofDocument] = Field(description="Proofs that the next generation stands on, as far as known.")
    still_silent: list[str] = Field(description="Of the control plane: nodes that are not in contact yet.")
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
    state: IncidentState | BreakerState | None = None,
    kind: Literal["job", "control_plane"] | None = None,
    job: str | None = None,
) -> dict[str, Any]:
    """Incidents, newest first; `ended=false` keeps the open ones."""
    found = queries.list_incidents(
        ended=ended, state=state, kind=kind, job=job, limit=limit + 1, after=position(cursor)
    )
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
    """Pause, resume, retry or close, taken up by the next step of the recovery; or re-arm the breaker, at once."""
    by = caller(request).get_username()

    def effect() -> IncidentDetailDocument:
        if body.kind == "rearm":
            row = breaker.rearm_breaker(incident_id, by=by)
        else:
            row = incidents.command_incident(incident_id, kind=body.kind, by=by)
        return IncidentDetailDocument.model_validate(queries.get_incident(row.id))

    return once(request, effect, status=202)
