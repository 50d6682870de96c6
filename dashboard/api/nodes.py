"""Nodes: what they are, how they stand, their GPUs; and how one that is silent is made sure to be off."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Router
from pydantic import Field

from dashboard.api.callers import caller
from dashboard.api.idempotency import once
from dashboard.api.paging import Cursor, Limit, Page, name_position, page
from dashboard.api.values import Document, Moment, Request
from recovery import checkpoints, fencing, queries
from recovery.domain.silence import Contact
from recovery.queries import NodeDetail, NodeState

router = Router(tags=["nodes"])


class GpuDocument(Document):
    """One GPU at its latest sample; null means unknown, never zero."""

    uuid: str
    index: int
    name: str
    at: Moment
    age_s: float
    stale: bool
    utilization_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: float | None
    problem: str


class ShareDocument(Document):
    """A generation that was ordered to run on the node and that its agent has not called gone."""

    job: str
    job_name: str
    generation: int
    proof: str | None = Field(description="Kind of the proof that others brought; null: it may run.")


class FenceActionDocument(Document):
    """What was done or attested to make sure that a node is off."""

    id: str
    kind: str = Field(description="`provider` or `attestation`.")
    state: str = Field(description="requested, running, fenced, failed or cancelled.")
    boot_id: str
    requested_by: str
    requested_at: Moment
    attempts: int
    started_at: Moment | None
    ended_at: Moment | None = Field(description="When it, or its last attempt, ended.")
    evidence: str
    contradicted_at: Moment | None = Field(description="The node was heard again in the same boot: it was not off.")


class ProbeDocument(Document):
    """One look at the node by another node's agent."""

    prober: str
    asked_at: Moment
    answered_at: Moment | None
    outcome: str = Field(description="reachable, unreachable or failed; empty while there is no answer.")
    detail: str


class NodeDocument(Document):
    name: str
    state: NodeState = Field(description="What may be done with it; `unknown` if it is lost.")
    since: Moment | None = Field(description="Since when it is unknown, or connected.")
    reason: str
    connected: bool
    contact: Contact = Field(description="`lost`: silent for too long; `unobserved`: nobody listens.")
    silent_s: float = Field(description="Seconds of its silence that count.")
    last_heard_at: Moment | None
    heartbeat_age_s: float | None
    address: str
    rack: str
    slots: int
    job: str | None
    job_name: str | None
    cordoned: bool
    unhealthy_reason: str
    quarantine_reason: str = Field(description="Why it is not used before it has rebooted; empty if it may be.")
    unconfirmed: list[ShareDocument] = Field(
        description="Proven gone without this node's word: nothing is placed on it before its agent says so too."
    )
    unproven: list[ShareDocument] = Field(description="What runs or may run on it.")
    agent_version: str
    gpu_model: str
    gpus_expected: int
    gpus_seen: int
    simulated_gpus: bool
    gpus: list[GpuDocument]


class NodeDetailDocument(NodeDocument):
    hostname: str
    cpu_count: int
    memory_bytes: int
    boot_id: str
    joined_at: Moment
    connected_since: Moment | None
    clock_offset_s: float
    revision: int
    seen_revision: int
    gaps: int = Field(description="How often its agent had to tell that messages were lost.")
    fence_actions: list[FenceActionDocument]
    probes: list[ProbeDocument]
    fence_provider: str = Field(description="Name of the configured fence provider; empty if there is none.")
    fence_refusal: str = Field(description="Why no attestation and no fence is taken now; empty if one would be.")


class AttestationRequest(Request):
    """An operator's word that a node is powered off."""

    confirm: str = Field(max_length=200, description="The node's exact name, typed.")
    statement: str = Field(
        default="", max_length=fencing.MAX_STATEMENT, pattern=r"^[^\x00]*$", description="How that is known."
    )


class FenceRequest(Request):
    confirm: str = Field(max_length=200, description="The node's exact name, typed.")


class MaintenanceRequest(Request):
    reason: str = Field(default="maintenance", max_length=200, pattern=r"^[^\x00]*$")


class MaintenanceDocument(Document):
    """What a notice of maintenance has asked for."""

    node: str
    jobs: list[str] = Field(description="Jobs that run on it: each saves at the next step that its ranks agree on.")


@router.get("", response=Page[NodeDocument], operation_id="list_nodes")
def list_nodes(request: HttpRequest, response: HttpResponse, limit: Limit, cursor: Cursor) -> dict[str, Any]:
    """Nodes by name."""
    nodes = queries.list_nodes(limit=limit + 1, after_name=name_position(cursor))
    return page(request, response, nodes, limit=limit, key=lambda node: [node.name])


@router.get("/{name}", response=NodeDetailDocument, operation_id="get_node")
def get_node(request: HttpRequest, name: str) -> NodeDetail:
    """One node by name."""
    return queries.get_node(name)


@router.post("/{name}/attestations", response={201: FenceActionDocument}, operation_id="attest_power_off")
def attest(request: HttpRequest, name: str, body: AttestationRequest) -> JsonResponse:
    """Attest that a silent node is powered off; what waits for it goes on. If that is wrong, a job may run twice."""
    by = caller(request).get_username()

    def effect() -> FenceActionDocument:
        action = fencing.attest_power_off(name, confirm=body.confirm, statement=body.statement, by=by)
        return FenceActionDocument.model_validate(queries.get_fence_action(action.pk))

    return once(request, effect, status=201)


@router.post("/{name}/fence", response={202: FenceActionDocument}, operation_id="fence_node")
def fence(request: HttpRequest, name: str, body: FenceRequest) -> JsonResponse:
    """Have the fence provider switch a silent node off; the node's `fence_actions` say what came of it."""
    by = caller(request).get_username()

    def effect() -> FenceActionDocument:
        action = fencing.request_fence(name, confirm=body.confirm, by=by)
        return FenceActionDocument.model_validate(queries.get_fence_action(action.pk))

    return once(request, effect, status=202)


@router.post("/{name}/maintenance", response={202: MaintenanceDocument}, operation_id="announce_maintenance")
def announce_maintenance(request: HttpRequest, name: str, body: MaintenanceRequest) -> JsonResponse:
    """Give notice that a node will go away: every job that runs on it saves now. Nothing is stopped."""
    by = caller(request).get_username()

    def effect() -> MaintenanceDocument:
        return MaintenanceDocument(node=name, jobs=checkpoints.request_saves_on(name, by=by, reason=body.reason))

    return once(request, effect, status=202)
