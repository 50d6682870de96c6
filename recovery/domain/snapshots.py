"""Which snapshots the nodes' memory still holds whole, for ranks on given nodes to go on from.

A snapshot outlives its ranks, but not its node's boot. Ranks of the next generation find only what is in the memory of
their own nodes; so planning asks here once it knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recovery.domain.fleet import FleetSnapshot
from recovery.domain.plan import CheckpointRef


@dataclass(frozen=True, kw_only=True)
class SnapshotPart:
    """One rank's part of a snapshot in one node's memory, by the word of that node."""

    ref: CheckpointRef
    world_size: int
    rank: int
    node: str
    boot_id: str
    """Of the node when it was told; another one since means that it is gone."""


def newest_whole(
    parts: Sequence[SnapshotPart], *, nodes: Collection[str], fleet: FleetSnapshot
) -> CheckpointRef | None:
    """The newest snapshot of which these nodes hold every part; None if there is none.

    Ranks keep the newest whole one and what they write at the moment, so that an older one may be gone already.
    """
    boots = {node.name: node.boot_id for node in fleet.nodes}
    ranks: dict[tuple[CheckpointRef, int], set[int]] = {}
    for part in parts:
        if part.node in nodes and boots.get(part.node) == part.boot_id:
            ranks.setdefault((part.ref, part.world_size), set()).add(part.rank)
    whole = [ref for (ref, world_size), held in ranks.items() if held >= set(range(world_size))]
    return max(whole, key=lambda ref: (ref.generation, ref.step), default=None)
