"""A plan: everything one generation of a job needs, chosen once and frozen, so that execution chooses nothing."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.messages import ProofKind


@dataclass(frozen=True, kw_only=True, order=True)
class CheckpointRef:
    """A checkpoint by its lineage: the generation that wrote it, and its step."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, kw_only=True)
class FenceProof:
    """Why no process of a generation can act on a node any more."""

    node: str
    kind: ProofKind
    at: float
    """Server's clock."""
    evidence: str
    generation: int | None = None
    """The generation that it fences."""
    recorded_at: float | None = None
    """When the server took it; `at` may be by a clock that is not the server's."""


@dataclass(frozen=True, kw_only=True)
class LeaseLimits:
    """How long a runner lets its ranks go on without contact and without progress, by phase, in seconds."""

    setup_s: float = 600.0
    compile_s: float = 1800.0
    step_s: float = 15.0
    save_s: float = 30.0
    evaluation_s: float = 30.0


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
    parent_in_memory: bool = False
    """Its nodes hold the parent in memory; it need not be on disk."""
    lease: LeaseLimits | None = None
    """Terms with which its runners begin; None: they keep no lease."""
    save_every: str = ""
    """Steps between saves, `auto`, or empty where the script decides."""
    fences: tuple[FenceProof, ...] = ()
    """What the order to run stood on: a proof for each node of each older generation. Filled in with that order."""

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def node_of(self, rank: int) -> str:
        """The node that runs a rank."""
        return self.nodes[rank // self.ranks_per_node]
