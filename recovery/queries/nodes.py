"""Nodes as pages and API show them: their state in one word, since when, and their GPUs with the age of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from recovery.domain.silence import Contact, ObserverView, judge_silence
from recovery.errors import NotFound
from recovery.models import IncidentRow, Job, Node
from recovery.queries.incidents import IncidentSummary, summarize_incidents
from recovery.queries.moment import moment
from recovery.store.situations import load_observers, silence_limits


def contact_limit_s() -> float:
    """A node that was not heard for this long is shown as unknown, as decisions take it."""
    return silence_limits().lost_s


STALE_GPU_S = 10.0
"""GPU values older than this are shown as old; samples come each second."""


class NodeState(StrEnum):
    READY = "ready"
    BUSY = "busy"
    CORDONED = "cordoned"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"
    """We cannot see it; that does not mean that it is dead."""
    NEVER_JOINED = "never joined"
    """It has a credential but its agent never connected."""


@dataclass(frozen=True, kw_only=True)
class GpuView:
    """One GPU at its latest sample; None means unknown, never zero."""

    uuid: str
    index: int
    name: str
    at: float
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


@dataclass(frozen=True, kw_only=True)
class NodeSummary:
    name: str
    state: NodeState
    since: float | None
    """Since when the node is unknown; since when it is connected otherwise."""
    reason: str
    """A sentence for what keeps the node from being ready; empty if nothing does."""
    connected: bool
    contact: Contact
    silent_s: float
    """Seconds of silence that count."""
    last_heard_at: float | None
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
    gpus: tuple[GpuView, ...]

    @property
    def spare(self) -> bool:
        """In contact, healthy, not cordoned, and no job's."""
        return self.state is NodeState.READY


@dataclass(frozen=True, kw_only=True)
class NodeDetail(NodeSummary):
    hostname: str
    cpu_count: int
    memory_bytes: int
    boot_id: str
    joined_at: float
    connected_since: float | None
    clock_offset_s: float
    revision: int
    """Newest order for this node, and the newest that its agent has taken over."""
    seen_revision: int
    incidents: tuple[IncidentSummary, ...]
    """The newest incidents of jobs that had a share on this node."""


def list_nodes(*, limit: int | None = None, after_name: str = "", now: float | None = None) -> tuple[NodeSummary, ...]:
    """Nodes by name, those after `after_name`; three queries at most."""
    now = moment(now)
    nodes = list(Node.objects.select_related("claimed_by").filter(name__gt=after_name).order_by("name")[:limit])
    observers = load_observers()
    return tuple(NodeSummary(**_summary(node, observers, now)) for node in nodes)


def get_node(name: str, *, now: float | None = None) -> NodeDetail:
    """One node by name. Raises `NotFound`."""
    now = moment(now)
    node = Node.objects.select_related("claimed_by").filter(name=name).first()
    if node is None:
        raise NotFound(f"There is no node {name}: it never joined under this name.")
    return NodeDetail(
        **_summary(node, load_observers(), now),
        hostname=str(node.facts.get("hostname", "")),
        cpu_count=int(node.facts.get("cpu_count", 0)),
        memory_bytes=int(node.facts.get("memory_bytes", 0)),
        boot_id=node.boot_id,
        joined_at=node.joined_at,
        connected_since=node.connected_since,
        clock_offset_s=node.clock_offset_s,
        revision=node.revision,
        seen_revision=node.seen_revision,
        incidents=summarize_incidents(_incidents_of(node), now=now),
    )


def _incidents_of(node: Node) -> Sequence[IncidentRow]:
    jobs = Job.objects.filter(generations__shares__node=node).values("id")
    return list(IncidentRow.objects.select_related("job").filter(job__in=jobs).order_by("-opened_at")[:10])


def state_of(node: Node, contact: Contact, now: float) -> tuple[NodeState, float | None, str]:
    """The node's state, since when (Unix seconds), and a sentence for why it is not ready."""
    if node.last_heard_at is None:
        return NodeState.NEVER_JOINED, node.joined_at, "Its agent has never connected."
    if node.revoked:
        return NodeState.UNKNOWN, node.last_heard_at, "Its credential is revoked."
    if contact is Contact.UNOBSERVED:
        return NodeState.UNKNOWN, node.last_heard_at, "No web process has listened for long enough to know."
    if contact is Contact.LOST:
        return NodeState.UNKNOWN, node.last_heard_at, "Its agent is silent."
    if not node.session:
        return NodeState.UNKNOWN, node.last_heard_at, "No connection from its agent."
    if node.quarantined_boot_id:
        reason = f"Quarantined until it reboots: {node.quarantine_reason}."
        return NodeState.UNHEALTHY, node.connected_since, reason
    if node.unhealthy_reason:
        return NodeState.UNHEALTHY, node.connected_since, node.unhealthy_reason
    if node.cordoned:
        return NodeState.CORDONED, node.connected_since, "Cordoned by an operator."
    if node.claimed_by_id is not None:
        return NodeState.BUSY, node.connected_since, ""
    return NodeState.READY, node.connected_since, ""


def _summary(node: Node, observers: Sequence[ObserverView], now: float) -> dict[str, Any]:
    silence = judge_silence(
        last_heard_at=node.last_heard_at, observer=node.observer, observers=observers, now=now, limits=silence_limits()
    )
    state, since, reason = state_of(node, silence.contact, now)
    facts: Mapping[str, Any] = node.facts
    gpus = tuple(_gpu(sample, now) for sample in node.gpus)
    return {
        "name": node.name,
        "state": state,
        "since": since,
        "reason": reason,
        "connected": bool(node.session) and state not in (NodeState.UNKNOWN, NodeState.NEVER_JOINED),
        "contact": silence.contact,
        "silent_s": silence.silent_s,
        "last_heard_at": node.last_heard_at,
        "heartbeat_age_s": None if node.last_heard_at is None else max(0.0, now - node.last_heard_at),
        "address": node.address,
        "rack": str(facts.get("rack", "")),
        "slots": int(facts.get("slots", 1)),
        "job": node.claimed_by_id,
        "job_name": node.claimed_by.name if node.claimed_by else None,
        "cordoned": node.cordoned,
        "unhealthy_reason": node.unhealthy_reason,
        "agent_version": node.agent_version,
        "gpu_model": str(facts.get("gpu_model", "")) or (gpus[0].name if gpus else ""),
        "gpus_expected": int(facts.get("gpu_count", 0)),
        "gpus_seen": len(gpus),
        "simulated_gpus": bool(facts.get("simulated_gpus", False)),
        "gpus": gpus,
    }


def _gpu(sample: Mapping[str, Any], now: float) -> GpuView:
    at = float(sample.get("at", 0.0))
    age_s = max(0.0, now - at)
    return GpuView(
        uuid=str(sample.get("uuid", "")),
        index=int(sample.get("index", 0)),
        name=str(sample.get("name", "")),
        at=at,
        age_s=age_s,
        stale=age_s > STALE_GPU_S,
        utilization_percent=sample.get("utilization_percent"),
        memory_used_bytes=sample.get("memory_used_bytes"),
        memory_total_bytes=sample.get("memory_total_bytes"),
        temperature_c=sample.get("temperature_c"),
        power_w=sample.get("power_w"),
        power_limit_w=sample.get("power_limit_w"),
        sm_clock_mhz=sample.get("sm_clock_mhz"),
        problem=str(sample.get("problem", "")),
    )
