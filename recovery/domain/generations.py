"""Generations as the machine sees them: what was wanted of each node, what its agent reports, what its ranks did."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.protocol.messages import AssignmentPhase, Phase, ProofKind, SeenPhase
from recovery.domain.plan import FenceProof, LeaseLimits, RecoveryPlan

__all__ = [
    "AssignmentPhase",
    "FenceProof",
    "GenerationView",
    "LeaseLimits",
    "Phase",
    "ProofKind",
    "RankView",
    "SeenPhase",
    "ShareView",
]


NONFINITE_STEPS = 3
"""Losses in a row that are not finite after which training is taken for lost: a gradient scaler skips single ones."""


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank of one generation."""

    rank: int
    node: str
    pid: int | None = None
    exited_at: float | None = None
    exit_recorded_at: float | None = None
    """When the server heard of it, by its own clock; `exited_at` is the agent's word, corrected."""
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    resumed_step: int | None = None
    """Steps done when the rank entered its training loop; None before that."""
    resumed_at: float | None = None
    saved_digest: dict[str, str] = field(default_factory=dict)
    live_digest: dict[str, str] = field(default_factory=dict)
    first_step_at: float | None = None
    last_step: int | None = None
    phase: Phase | None = None
    """None: it has not said."""
    progress_at: float | None = None
    """When it last finished a step or began another phase; server's clock."""
    progress_seen_at: float | None = None
    """When the server heard of the newest progress, by its own clock."""
    pace_s: float | None = None
    """Longest of its recent steps."""
    finished_step: int | None = None
    """Set when the training loop said that it did its last step."""
    nonfinite_since: int | None = None
    """First step of its present run of losses that are not finite; None while they are."""
    nonfinite_count: int = 0
    """Losses of that run."""
    nonfinite_at: float | None = None
    """When the run began."""

    @property
    def exited(self) -> bool:
        return self.exited_at is not None

    @property
    def ended_well(self) -> bool:
        """Exit code 0 after the last step; exit code 0 alone is no success."""
        return self.exited and self.exit_code == 0 and not self.signal and self.finished_step is not None

    @property
    def died(self) -> bool:
        return self.exited and not self.ended_well


@dataclass(frozen=True, kw_only=True)
class ShareView:
    """One generation on one node."""

    node: str
    seen: SeenPhase | None = None
    """None until the agent has reported on it."""
    reason: str = ""
    detail: str = ""
    master_port: int | None = None
    fingerprint: str = ""
    fingerprint_parts: dict[str, str] = field(default_factory=dict)
    proof: FenceProof | None = None
    boot_id: str = ""
    """Boot of the node in which it was last reported."""
    keeps_lease: bool = False
    confirmed: bool = False
    """The node's own agent has proven the stop."""


@dataclass(frozen=True, kw_only=True)
class GenerationView:
    """One generation: its plan, the phase that is wanted, and what is known of its shares and ranks."""

    plan: RecoveryPlan
    wanted: AssignmentPhase
    shares: tuple[ShareView, ...]
    ranks: tuple[RankView, ...] = ()
    broken_continuity: bool = False
    run_ordered: bool = False
    """`run` was given at least once; without it no process can ever have started."""
    lease: LeaseLimits | None = None
    """Terms that hold now: those of the plan, or raised since."""

    @property
    def number(self) -> int:
        return self.plan.generation

    @property
    def may_have_run(self) -> bool:
        """`run` was ordered; or a node says that it runs, by an order that was lost with newer rows."""
        return self.run_ordered or any(share.seen is SeenPhase.RUNNING for share in self.shares)

    @property
    def fenced(self) -> bool:
        """It never ran, or each of its nodes has a proof of stop."""
        return not self.may_have_run or all(share.proof is not None for share in self.shares)

    @property
    def proofs(self) -> tuple[FenceProof, ...]:
        return tuple(share.proof for share in self.shares if share.proof is not None)

    @property
    def unfenced_nodes(self) -> tuple[str, ...]:
        return tuple(share.node for share in self.shares if share.proof is None)

    @property
    def prepared(self) -> bool:
        return all(share.seen is SeenPhase.PREPARED for share in self.shares)

    @property
    def dead_ranks(self) -> tuple[RankView, ...]:
        return tuple(rank for rank in self.ranks if rank.died)

    @property
    def ended_well(self) -> bool:
        """Every rank did its last step and exited with 0."""
        return len(self.ranks) == self.plan.world_size and all(rank.ended_well for rank in self.ranks)

    @property
    def stepping(self) -> bool:
        """Every rank has completed a step of this generation (or had none left to do)."""
        return len(self.ranks) == self.plan.world_size and all(
            rank.first_step_at is not None or rank.finished_step is not None for rank in self.ranks
        )

    @property
    def failed_shares(self) -> tuple[ShareView, ...]:
        """Nodes that refused or could not do what was wanted, or whose runner is gone though ranks were wanted."""
        return tuple(
            share
            for share in self.shares
            if share.seen in (SeenPhase.PREPARE_FAILED, SeenPhase.REFUSED)
            or (
                self.wanted is AssignmentPhase.RUN
                and share.seen is SeenPhase.STOPPED
                and not self.ended_well_on(share.node)
            )
        )

    def ended_well_on(self, node: str) -> bool:
        """Every rank of a node did its last step and exited with 0."""
        ranks = [rank for rank in self.ranks if rank.node == node]
        return len(ranks) == self.plan.ranks_per_node and all(rank.ended_well for rank in ranks)

    @property
    def not_restored(self) -> str:
        """Which rank came back without which part of its checkpoint, by its own digests; empty if none did."""
        for rank in self.ranks:
            if not rank.saved_digest:
                continue
            for part in sorted(set(rank.saved_digest) | set(rank.live_digest)):
                if rank.saved_digest.get(part) != rank.live_digest.get(part):
                    return f"rank {rank.rank} did not restore the {part}"
        return ""

    @property
    def sound(self) -> bool:
        """What it did and saved may be gone on from: nobody has judged it broken, and its own digests do not say so."""
        return not self.broken_continuity and not self.not_restored

    @property
    def loaded_whole(self) -> bool:
        """Every rank has taken digests of what it loaded, and they are those of the checkpoint."""
        return (
            len(self.ranks) == self.plan.world_size
            and all(rank.saved_digest for rank in self.ranks)
            and not self.not_restored
        )

    @property
    def loss_lost(self) -> bool:
        """A rank's loss has not been finite for so many steps that it will not come back."""
        return any(rank.nonfinite_count >= NONFINITE_STEPS for rank in self.ranks)

    @property
    def nonfinite_step(self) -> int | None:
        """From which step on its loss is not finite; None if it is, or if that may still be a passing one."""
        over = self.wanted is AssignmentPhase.STOP
        return min(
            (
                rank.nonfinite_since
                for rank in self.ranks
                if rank.nonfinite_since is not None and (over or rank.exited or rank.nonfinite_count >= NONFINITE_STEPS)
            ),
            default=None,
        )

    @property
    def reached_step(self) -> int | None:
        """Highest step that any rank completed."""
        return max((rank.last_step for rank in self.ranks if rank.last_step is not None), default=None)
