"""A plan: everything one generation of a job needs, chosen once and frozen, so that execution chooses nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class CheckpointRef:
    """A checkpoint by its lineage: the generation that wrote it, and its step."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """One generation of one job. Generation 1 is the first launch; its parent is None."""

    job: str
    generation: int
    plan_id: str
    run_id: str
    """Fresh for each generation: names the rendezvous, so that no stale store is met."""
    nodes: tuple[str, ...]
    """In order of node rank."""
    ranks_per_node: int
    master_address: str
    """Address of node rank 0; its agent reserves the port while it prepares."""
    parent: CheckpointRef | None
    parent_reason: str
    placement_reason: str

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def node_of(self, rank: int) -> str:
        """The node that runs a rank."""
        return self.nodes[rank // self.ranks_per_node]
