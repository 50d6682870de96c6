"""The breaker: when too many nodes fall silent at once, that is the control plane's or the network's fault.

It counts absence only. While it is open no absence is believed and no job is stopped for one; what live agents report
first-hand is acted on as always. A person re-arms it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from recovery.domain.fleet import FleetSnapshot, NodeView
from recovery.domain.silence import Contact
from recovery.domain.timeline import Entry, EntryKind, join_names

RULE_VERSION = "breaker-1"

SHARE = 0.3
AT_LEAST = 3
WINDOW_S = 20.0
"""Silences that began within this are one event: several heartbeats, and the pause of a stalled switch."""


class BreakerState(StrEnum):
    """Where a control-plane incident stands."""

    OPEN = "breaker_open"
    CONTACT_RESTORED = "contact_restored"
    """All of the nodes that fell silent are back; re-arming is still asked for."""
    REARMED = "rearmed"


@dataclass(frozen=True, kw_only=True)
class ControlPlaneIncident:
    """One time that the breaker opened. Times are Unix seconds on the server's clock."""

    id: str
    state: BreakerState
    opened_at: float
    silent_since: float
    """When the first of the nodes was last heard."""
    nodes: tuple[str, ...]
    """Nodes that fell silent together; grows while it is open."""
    fleet_size: int
    rearmed_at: float | None = None
    rearmed_by: str = ""
    rule_version: str = RULE_VERSION

    @property
    def ended(self) -> bool:
        return self.state is BreakerState.REARMED


@dataclass(frozen=True, kw_only=True)
class BreakerOutcome:
    """The next control-plane incident, if there is one, and the sentences that tell it."""

    incident: ControlPlaneIncident | None
    entries: tuple[Entry, ...] = ()
    page: str = ""


def too_many_at_once(fleet: FleetSnapshot) -> tuple[NodeView, ...]:
    """The nodes that fell silent together, if they are too many to be believed; else none.

    Nodes that were silent long before are no part of the fleet that this looks at, and a suspect node counts: the
    first of many must not be acted on before the last is called lost.
    """
    silent = sorted(
        (
            node
            for node in fleet.nodes
            if node.contact in (Contact.SUSPECT, Contact.LOST)
            and node.last_heard_at is not None
            and node.last_heard_at > fleet.rearmed_at
        ),
        key=lambda node: node.last_heard_at or 0.0,
    )
    best: tuple[NodeView, ...] = ()
    for index, first in enumerate(silent):
        began = first.last_heard_at or 0.0
        together = tuple(node for node in silent[index:] if (node.last_heard_at or 0.0) - began <= WINDOW_S)
        before = sum(1 for node in fleet.nodes if node.contact is Contact.SEEN or (node.last_heard_at or 0.0) >= began)
        if len(together) >= AT_LEAST and len(together) >= SHARE * before and len(together) > len(best):
            best = together
    return best


def absence_is_credible(fleet: FleetSnapshot) -> bool:
    """Whether a silent node may be called lost at all right now."""
    return not fleet.breaker_open and not too_many_at_once(fleet)


def step_breaker(
    current: ControlPlaneIncident | None, fleet: FleetSnapshot, *, fresh_id: str, now: float
) -> BreakerOutcome:
    """Open a control-plane incident, follow the open one, or do nothing. `current` is the open one, if there is one."""
    together = too_many_at_once(fleet)
    if current is None:
        # Suspects alone are believed nothing of, but a stall of some seconds is no reason to wake a human either.
        certain = any(node.contact is Contact.LOST for node in together)
        return _open(together, fleet, fresh_id, now) if certain else BreakerOutcome(incident=None)
    silent = {node.name for node in fleet.nodes if node.contact in (Contact.SUSPECT, Contact.LOST)}
    joined = tuple(node.name for node in together if node.name not in current.nodes)
    if joined:
        grown = replace(current, nodes=(*current.nodes, *joined), state=BreakerState.OPEN)
        text = f"{join_names(joined)} fell silent too."
        return BreakerOutcome(incident=grown, entries=(_entry(EntryKind.FACT, now, text),))
    if together and current.state is BreakerState.CONTACT_RESTORED:
        text = f"{_short(tuple(node.name for node in together))} fell silent once more."
        again = replace(current, state=BreakerState.OPEN)
        return BreakerOutcome(incident=again, entries=(_entry(EntryKind.STATE, now, text),))
    unseen = [n.name for n in fleet.nodes if n.name in current.nodes and n.contact is Contact.UNOBSERVED]
    if current.state is BreakerState.OPEN and not silent & set(current.nodes) and not unseen:
        back = replace(current, state=BreakerState.CONTACT_RESTORED)
        text = "All of these nodes are in contact again. The breaker stays open until an operator re-arms it."
        return BreakerOutcome(incident=back, entries=(_entry(EntryKind.STATE, now, text),))
    return BreakerOutcome(incident=current)


def rearm(current: ControlPlaneIncident, *, by: str, now: float) -> BreakerOutcome:
    """An operator has looked: absence is believed again, also that of nodes which are silent still."""
    text = f"{by} re-armed the breaker: a silent node is looked at on its own again."
    ended = replace(current, state=BreakerState.REARMED, rearmed_at=now, rearmed_by=by)
    return BreakerOutcome(incident=ended, entries=(_entry(EntryKind.OPERATOR, now, text),))


def _open(together: tuple[NodeView, ...], fleet: FleetSnapshot, fresh_id: str, now: float) -> BreakerOutcome:
    names = tuple(node.name for node in together)
    since = min(node.last_heard_at or now for node in together)
    incident = ControlPlaneIncident(
        id=fresh_id,
        state=BreakerState.OPEN,
        opened_at=now,
        silent_since=since,
        nodes=names,
        fleet_size=len(fleet.nodes),
    )
    text = (
        f"{len(names)} of {len(fleet.nodes)} nodes fell silent within {WINDOW_S:.0f} s: {_short(names)}. "
        "That is taken for a fault of the control plane or its network. No job is stopped for it."
    )
    page = f"{len(names)} of {len(fleet.nodes)} nodes are silent at once; the breaker is open."
    return BreakerOutcome(
        incident=incident,
        entries=(_entry(EntryKind.FAULT, since, text), _entry(EntryKind.PAGE, now, f"Paged the operators: {page}")),
        page=page,
    )


def _short(names: tuple[str, ...]) -> str:
    return join_names(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


def _entry(kind: EntryKind, at: float, text: str) -> Entry:
    return Entry(kind=kind, at=at, text=text)
