"""Nodes: what they are, how they stand, their GPUs."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Router

from dashboard.api.paging import Cursor, Limit, Page, name_position, page
from dashboard.api.values import Document, Moment
from recovery import queries
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


class NodeDocument(Document):
    name: str
    state: NodeState
    since: Moment | None
    reason: str
    connected: bool
    last_heard_at: Moment | None
    heartbeat_age_s: float | None
    address: str
    rack: str
    slots: int
    job: str | None
    job_name: str | None
    cordoned: bool
    unhealthy_reason: str
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


@router.get("", response=Page[NodeDocument], operation_id="list_nodes")
def list_nodes(request: HttpRequest, response: HttpResponse, limit: Limit, cursor: Cursor) -> dict[str, Any]:
    """Nodes by name."""
    nodes = queries.list_nodes(limit=limit + 1, after_name=name_position(cursor))
    return page(request, response, nodes, limit=limit, key=lambda node: [node.name])


@router.get("/{name}", response=NodeDetailDocument, operation_id="get_node")
def get_node(request: HttpRequest, name: str) -> NodeDetail:
    """One node by name."""
    return queries.get_node(name)
