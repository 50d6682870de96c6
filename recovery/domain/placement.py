"""Which nodes a generation runs on: survivors keep their ranks, a spare takes the lost slot, claims are respected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.plan import RecoveryPlan
from recovery.domain.silence import Contact
from recovery.domain.timeline import join_names

RULE_VERSION = "placement-2"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Nodes were found."""

    nodes: tuple[str, ...]
    """In order of node rank."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class NoCapacity:
    """Too few nodes can be taken."""

    reason: str
    missing: int


def choose_nodes(
    *,
    fleet: FleetSnapshot,
    job: str,
    node_count: int,
    ranks_per_node: int,
    keep: Sequence[str] = (),
    excluded: Sequence[str] = (),
) -> Placed | NoCapacity:
    """Choose `node_count` nodes. `keep` are the former nodes in order of node rank; `excluded` are never taken.

    A node of `keep` that cannot be taken leaves its slot to a spare, the same rack first, then by name, so that the
    same fleet gives the same choice.
    """
    slots: list[str | None] = [None] * node_count
    lost: list[str] = []
    moved: list[str] = []
    """Survivors whose slot is gone because the job shrinks: they take a lost one before any spare does."""
    for index, name in enumerate(keep):
        why = _why_not(fleet.node(name), name, job=job, ranks=ranks_per_node, excluded=excluded)
        if why:
            lost.append(f"{name} ({why})")
        elif index < node_count:
            slots[index] = name
        else:
            moved.append(name)
    racks = {node.rack for node in fleet.nodes if node.name in keep and node.rack}
    spares = sorted(
        (
            node
            for node in fleet.nodes
            if node.name not in slots
            and node.name not in excluded
            and node.name not in keep
            and node.can_take(job=job, ranks=ranks_per_node)
        ),
        key=lambda node: (node.rack not in racks, node.name),
    )
    taken: list[str] = []
    for index, slot in enumerate(slots):
        if slot is None and moved:
            slots[index] = moved.pop(0)
        elif slot is None and spares:
            slots[index] = spares[0].name
            taken.append(spares.pop(0).name)
    missing = slots.count(None)
    if missing:
        return NoCapacity(
            reason=_no_capacity(fleet, job=job, ranks=ranks_per_node, missing=missing, excluded=excluded),
            missing=missing,
        )
    nodes = tuple(slot for slot in slots if slot is not None)
    return Placed(nodes=nodes, reason=_reason(keep=keep, nodes=nodes, lost=lost, taken=taken))


def possible_sizes(*, most: int, least: int | None, multiple_of: int) -> tuple[int, ...]:
    """Numbers of nodes that a job can go on with, the largest first. Without `least` there is one."""
    if least is None:
        return (most,)
    return tuple(count for count in range(most, least - 1, -1) if count % multiple_of == 0)


def choose_as_many(
    *,
    fleet: FleetSnapshot,
    job: str,
    sizes: Sequence[int],
    ranks_per_node: int,
    keep: Sequence[str] = (),
    excluded: Sequence[str] = (),
) -> Placed | NoCapacity:
    """The largest of `sizes` for which nodes are found; what is missing is told for the smallest."""
    placed: Placed | NoCapacity = NoCapacity(reason="the job allows no number of nodes", missing=0)
    for count in sizes:
        placed = choose_nodes(
            fleet=fleet, job=job, node_count=count, ranks_per_node=ranks_per_node, keep=keep, excluded=excluded
        )
        if isinstance(placed, Placed):
            if count == max(sizes):
                return placed
            return Placed(nodes=placed.nodes, reason=f"{placed.reason} Shrunk to {count} of {max(sizes)} nodes.")
    return placed


def lost_nodes(plan: RecoveryPlan, fleet: FleetSnapshot) -> list[str]:
    """Nodes of a plan on which it could not be placed any more. A short break of contact loses no node."""
    lost = []
    for name in plan.nodes:
        node = fleet.node(name)
        if node is None or _cannot_hold(node, plan):
            lost.append(name)
    return lost


def _cannot_hold(node: NodeView, plan: RecoveryPlan) -> bool:
    if node.health is NodeHealth.UNKNOWN or node.contact is not Contact.SEEN:
        return node.contact is Contact.LOST
    return not node.can_take(job=plan.job, ranks=plan.ranks_per_node)


def unseen_nodes(plan: RecoveryPlan, fleet: FleetSnapshot) -> list[str]:
    """Nodes of a plan of which nothing is known right now: what their ranks do is not known either."""
    seen = {node.name for node in fleet.nodes if node.health is not NodeHealth.UNKNOWN and node.contact is Contact.SEEN}
    return [name for name in plan.nodes if name not in seen]


def _why_not(node: NodeView | None, name: str, *, job: str, ranks: int, excluded: Sequence[str]) -> str:
    if name in excluded:
        return "excluded after a failure"
    if node is None:
        return "unknown"
    return node.why_not(job=job, ranks=ranks)


def _reason(*, keep: Sequence[str], nodes: tuple[str, ...], lost: list[str], taken: list[str]) -> str:
    if not keep:
        return f"{join_names(nodes)}: healthy, in contact and free."
    if not lost:
        return f"{join_names(nodes)}: the same nodes, all healthy and in contact."
    if not taken:
        return f"{join_names(nodes)}: the survivors, without {join_names(lost)}."
    return f"{join_names(taken)} for {join_names(lost)}; the other nodes keep their ranks."


def _no_capacity(fleet: FleetSnapshot, *, job: str, ranks: int, missing: int, excluded: Sequence[str]) -> str:
    reasons = [
        f"{node.name} ({'excluded after a failure' if node.name in excluded else node.why_not(job=job, ranks=ranks)})"
        for node in fleet.nodes
        if node.name in excluded or not node.can_take(job=job, ranks=ranks)
    ]
    what = f"{missing} more node{'s' if missing > 1 else ''} needed"
    return f"{what}; not usable: {join_names(reasons)}." if reasons else f"{what}, and no other node has joined."
