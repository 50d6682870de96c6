"""Nodes as placement and the machine see them: one frozen snapshot of the fleet, taken by the engine per decision."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from recovery.domain.silence import Contact


class NodeHealth(StrEnum):
    """What is known of a node. Unknown means that we cannot see it, never that it is dead."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node at the moment of a decision."""

    name: str
    address: str
    health: NodeHealth
    slots: int
    """Ranks that the node takes at once."""
    claimed_by: str | None = None
    """Job that holds the node, whether or not its ranks run right now."""
    cordoned: bool = False
    rack: str = ""
    contact: Contact = Contact.SEEN
    last_heard_at: float | None = None
    silent_s: float = 0.0
    """Seconds of silence that count; see `silence`."""
    heard_at_most: float | None = None
    """No lease of this node can have been renewed between this moment and `observed_until`; None: not known."""
    observed_until: float = 0.0
    """The moment up to which what is said of contact is known."""
    boot_id: str = ""
    quarantined: str = ""
    """Why the node is not to be used until it has rebooted; empty if it is not quarantined."""
    unconfirmed: str = ""
    """A generation that was fenced without this node's own word and that its agent has not called gone yet."""

    def can_take(self, *, job: str, ranks: int) -> bool:
        """Healthy, in contact, not cordoned, large enough, and not another job's."""
        return self.why_not(job=job, ranks=ranks) == ""

    def why_not(self, *, job: str, ranks: int) -> str:
        """Why this node cannot take `ranks` ranks of `job`; empty if it can."""
        if self.health is NodeHealth.UNKNOWN or self.contact is not Contact.SEEN:
            return "no contact with its agent"
        if self.quarantined:
            return f"quarantined until it reboots: {self.quarantined}"
        if self.unconfirmed:
            return f"its agent has not said yet that {self.unconfirmed} is gone"
        if self.health is NodeHealth.UNHEALTHY:
            return "unhealthy"
        if self.cordoned:
            return "cordoned"
        if self.claimed_by not in (None, job):
            return f"claimed by {self.claimed_by}"
        if self.slots < ranks:
            return f"{self.slots} slots, {ranks} needed"
        return ""


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """Every node that has joined, at one moment."""

    nodes: tuple[NodeView, ...]
    breaker_open: bool = False
    """Too many nodes fell silent at once and nobody has re-armed the breaker yet: no absence is believed."""
    rearmed_at: float = 0.0
    """Silences that began before were looked at by an operator: they do not count as too many any more."""

    def node(self, name: str) -> NodeView | None:
        """The node of that name, or None if it never joined."""
        return next((node for node in self.nodes if node.name == name), None)
