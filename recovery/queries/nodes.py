"""Nodes as pages and API show them: their state in one word, since when, and their GPUs with the age of each value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from recovery.domain.fence_policy import FenceCandidate, why_not_fenced
from recovery.domain.silence import Contact, ObserverView, Silence, judge_silence
from recovery.domain.timeline import join_names
from recovery.errors import NotFound
from recovery.fence_providers import configured_provider
from recovery.models import FenceAction, IncidentRow, Job, Node, Probe, ShareRow, Stray
from recovery.proofs import unproven_on
from recovery.queries.incidents import IncidentSummary, summarize_incidents
from recovery.queries.moment import moment
from recovery.store.situations import load_observers, silence_limits


def contact_limit_s() -> float:
    """A node that was not heard for this long is shown as unknown, as decisions take it."""
    return silence_limits().lost_s


STALE_GPU_S = 10.0
"""GPU values older than this are shown as old; samples come each second."""

FENCE_ACTIONS_SHOWN = 20
PROBES_SHOWN = 10


class NodeState(StrEnum):
    """What may be done with a node, in a word; whether it can be heard is `contact`."""

    READY = "ready"
    BUSY = "busy"
    HELD = "held"
    """In contact and healthy, but its agent has not said yet that something is gone which was fenced without it, or
    which this database does not know."""
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
class ShareView:
    """One generation that was ordered to run on the node and that its agent has not called gone."""

    job: str
    job_name: str
    generation: int
    proof: str | None
    """Kind of the proof that others brought; None: it may run."""


@dataclass(frozen=True, kw_only=True)
class FenceActionView:
    """What was done or attested to make sure that a node is off."""

    id: str
    kind: str
    """provider or attestation."""
    state: str
    """requested, running, fenced, failed or cancelled."""
    boot_id: str
    requested_by: str
    requested_at: float
    attempts: int
    started_at: float | None
    ended_at: float | None
    """When it, or its last attempt, ended."""
    evidence: str
    contradicted_at: float | None
    """The node was heard again in the same boot: it was not off."""


@dataclass(frozen=True, kw_only=True)
class ProbeLook:
    """One look at the node by another node's agent."""

    prober: str
    asked_at: float
    answered_at: float | None
    outcome: str
    """reachable, unreachable or failed; empty while there is no answer."""
    detail: str


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
    quarantine_reason: str
    """Why it is not to be used before it has rebooted; empty if it is not quarantined."""
    unconfirmed: tuple[ShareView, ...]
    """Proven gone without this node's own word: nothing is placed on it before its agent says so too."""
    unproven: tuple[ShareView, ...]
    """What runs or may run on it."""
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
    gaps: int
    """How often its agent had to tell that messages were lost."""
    fence_actions: tuple[FenceActionView, ...]
    """The newest first."""
    probes: tuple[ProbeLook, ...]
    """The newest first."""
    fence_provider: str
    """Name of the configured fence provider; empty if there is none."""
    fence_refusal: str
    """Why nobody's word that this node is off would be taken now; empty if it would."""


def list_nodes(*, limit: int | None = None, after_name: str = "", now: float | None = None) -> tuple[NodeSummary, ...]:
    """Nodes by name, those after `after_name`; four queries."""
    now = moment(now)
    nodes = list(Node.objects.select_related("claimed_by").filter(name__gt=after_name).order_by("name")[:limit])
    observers = load_observers()
    shares, strays = _open_shares(nodes), _strays(nodes)
    return tuple(NodeSummary(**_summary(node, observers, shares[node.pk], strays[node.pk], now)) for node in nodes)


def get_node(name: str, *, now: float | None = None) -> NodeDetail:
    """One node by name. Raises `NotFound`."""
    now = moment(now)
    node = Node.objects.select_related("claimed_by").filter(name=name).first()
    if node is None:
        raise NotFound(f"There is no node {name}: it never joined under this name.")
    provider = configured_provider()
    summary = _summary(node, load_observers(), _open_shares([node])[node.pk], _strays([node])[node.pk], now)
    return NodeDetail(
        **summary,
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
        gaps=node.gaps,
        fence_actions=tuple(
            fence_action_view(action) for action in FenceAction.objects.filter(node=node)[:FENCE_ACTIONS_SHOWN]
        ),
        probes=tuple(
            ProbeLook(
                prober=probe.prober.name,
                asked_at=probe.asked_at,
                answered_at=probe.answered_at,
                outcome=probe.outcome,
                detail=probe.detail,
            )
            for probe in Probe.objects.select_related("prober").filter(node=node)[:PROBES_SHOWN]
        ),
        fence_provider=provider.name if provider else "",
        fence_refusal=why_not_fenced(
            FenceCandidate(
                name=node.name,
                contact=summary["contact"],
                silent_s=summary["silent_s"],
                unproven=unproven_on(node),
            )
        ),
    )


def fence_action_view(row: FenceAction) -> FenceActionView:
    """One row as it is shown."""
    return FenceActionView(
        id=row.id,
        kind=row.kind,
        state=row.state,
        boot_id=row.boot_id,
        requested_by=row.requested_by,
        requested_at=row.requested_at,
        attempts=row.attempts,
        started_at=row.started_at,
        ended_at=row.ended_at,
        evidence=row.evidence,
        contradicted_at=row.contradicted_at,
    )


def get_fence_action(action_id: str) -> FenceActionView:
    """One fence action. Raises `NotFound`."""
    row = FenceAction.objects.filter(pk=action_id).first()
    if row is None:
        raise NotFound(f"There is no fence action {action_id}.")
    return fence_action_view(row)


def _open_shares(nodes: Sequence[Node]) -> dict[int, list[ShareView]]:
    """For each of these nodes, what its agent has not called gone; one query."""
    found: dict[int, list[ShareView]] = defaultdict(list)
    rows = ShareRow.objects.filter(
        node__in=nodes, confirmed_at__isnull=True, generation__run_ordered_at__isnull=False
    ).select_related("generation__job")
    for row in rows.order_by("generation__job", "generation__number"):
        generation = row.generation
        found[row.node_id].append(
            ShareView(
                job=generation.job_id,
                job_name=generation.job.name,
                generation=generation.number,
                proof=str(row.proof["kind"]) if row.proof else None,
            )
        )
    return found


def _strays(nodes: Sequence[Node]) -> dict[int, list[ShareView]]:
    """For each of these nodes, what it runs though the database, which is older, does not know it; one query."""
    found: dict[int, list[ShareView]] = defaultdict(list)
    for stray in Stray.objects.filter(node__in=nodes).select_related("job").order_by("job", "number"):
        found[stray.node_id].append(
            ShareView(job=stray.job_id, job_name=stray.job.name, generation=stray.number, proof=None)
        )
    return found


def _incidents_of(node: Node) -> Sequence[IncidentRow]:
    jobs = Job.objects.filter(generations__shares__node=node).values("id")
    return list(IncidentRow.objects.select_related("job").filter(job__in=jobs).order_by("-opened_at")[:10])


def state_of(node: Node, silence: Silence, held_by: Sequence[ShareView]) -> tuple[NodeState, float | None, str]:
    """The node's state, since when (Unix seconds), and a sentence for why it is not ready."""
    if node.last_heard_at is None:
        return NodeState.NEVER_JOINED, node.joined_at, "Its agent has never connected."
    since = node.last_heard_at
    if node.revoked:
        return NodeState.UNKNOWN, since, "Its credential is revoked."
    if silence.contact is Contact.UNOBSERVED:
        return NodeState.UNKNOWN, since, "No web process has listened for long enough to know."
    if silence.contact is Contact.LOST:
        return NodeState.UNKNOWN, since, "Lost: its agent is silent. Whether anything runs there is not known."
    if not node.session:
        return NodeState.UNKNOWN, since, "No connection from its agent."
    if node.quarantined_boot_id:
        reason = f"Quarantined until it reboots: {node.quarantine_reason}."
        return NodeState.UNHEALTHY, node.connected_since, reason
    if node.unhealthy_reason:
        return NodeState.UNHEALTHY, node.connected_since, node.unhealthy_reason
    if node.cordoned:
        return NodeState.CORDONED, node.connected_since, "Cordoned by an operator."
    if held_by:
        names = join_names([f"generation {one.generation} of {one.job_name}" for one in held_by])
        return NodeState.HELD, node.connected_since, f"Its agent has not said yet that {names} is gone."
    if node.claimed_by_id is not None:
        return NodeState.BUSY, node.connected_since, ""
    return NodeState.READY, node.connected_since, ""


def _summary(
    node: Node,
    observers: Sequence[ObserverView],
    shares: Sequence[ShareView],
    strays: Sequence[ShareView],
    now: float,
) -> dict[str, Any]:
    silence = judge_silence(
        last_heard_at=node.last_heard_at, observer=node.observer, observers=observers, now=now, limits=silence_limits()
    )
    unconfirmed = tuple(share for share in shares if share.proof is not None)
    state, since, reason = state_of(node, silence, (*unconfirmed, *strays))
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
        "quarantine_reason": node.quarantine_reason if node.quarantined_boot_id else "",
        "unconfirmed": unconfirmed,
        "unproven": (*(share for share in shares if share.proof is None), *strays),
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
