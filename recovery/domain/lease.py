"""The lease as the server sees it: when a silent node's ranks cannot act any more, without a word from the node.

A runner kills its ranks when it has neither contact nor progress within the limit of their phase. A rank of a
synchronous job whose peer has stopped makes no progress beyond the step in hand. So after the last moment that can have
renewed the lease, plus its longest limit, plus a margin, nothing of that generation steps on the silent node.
"""

from __future__ import annotations

from recovery.domain.fleet import NodeView
from recovery.domain.generations import FenceProof, GenerationView, ProofKind, ShareView
from recovery.domain.plan import LeaseLimits

RULE_VERSION = "lease-1"

MARGIN_S = 2.0
"""A runner looks at its lease twice a second, and killing takes a moment."""
DRIFT = 0.02
"""Share of the limit by which two clocks may run apart: 1 % each, far beyond what crystals do."""
STEPS_OF_SETUP = 3
"""A rank that has finished fewer steps has the limit of its setup, since its pace is not known."""

PACES = 8.0
SAVES = 4.0
"""A step or a save may take this many times its longest recent one before it counts as no progress."""

_NO_STOP_OF_RANKS = (ProofKind.NEVER_STARTED, ProofKind.LEASE_EXPIRED)


def longest_limit_s(limits: LeaseLimits, *, settled: bool) -> float:
    """The longest time without contact and progress that a runner may allow, whatever phase its ranks are in.

    The server may not have heard of the last change of phase, so that all that can be entered without a peer count.
    `settled` ranks have left their setup for good.
    """
    if settled:
        return max(limits.step_s, limits.save_s, limits.evaluation_s)
    return max(limits.setup_s, limits.compile_s, limits.step_s, limits.save_s, limits.evaluation_s)


def lease_ends_at(
    share: ShareView, generation: GenerationView, node: NodeView | None, *, synchronous: bool
) -> float | None:
    """When the lease of a share has run out for certain, margin included; None if a lease proves nothing here."""
    limits = generation.lease
    if limits is None or not share.keeps_lease or not synchronous or node is None or node.heard_at_most is None:
        return None
    stopped_at = peer_stopped_at(share, generation)
    if stopped_at is None:
        return None
    mine = [rank for rank in generation.ranks if rank.node == share.node]
    settled = len(mine) == generation.plan.ranks_per_node and all(
        _is_settled(rank.resumed_step, rank.last_step) for rank in mine
    )
    limit_s = longest_limit_s(limits, settled=settled)
    # A node that thaws may finish the step in hand and tell of it: that sign is younger than its peers' stop, and may
    # be what made it settled, while the limit that held until then was its setup's.
    told = [rank.progress_seen_at or rank.progress_at or 0.0 for rank in mine]
    return max(node.heard_at_most, stopped_at, *told) + limit_s * (1 + DRIFT) + MARGIN_S


def peer_stopped_at(share: ShareView, generation: GenerationView) -> float | None:
    """When the first of its ranks elsewhere was proven stopped, by the server's clock; None if none was."""
    exits = [
        rank.exit_recorded_at or rank.exited_at
        for rank in generation.ranks
        if rank.exited_at is not None and rank.node != share.node
    ]
    proofs = [
        other.proof.recorded_at or other.proof.at
        for other in generation.shares
        if other.node != share.node and other.proof is not None and other.proof.kind not in _NO_STOP_OF_RANKS
    ]
    return min([*exits, *proofs], default=None)


def lease_proof(
    share: ShareView, generation: GenerationView, node: NodeView | None, *, synchronous: bool, now: float
) -> FenceProof | None:
    """The proof, once the lease has run out."""
    ends_at = lease_ends_at(share, generation, node, synchronous=synchronous)
    if ends_at is None or node is None or node.heard_at_most is None:
        return None
    if min(now, node.observed_until) < ends_at:
        return None  # what an observer heard since its last word could still have renewed it
    stopped_at = peer_stopped_at(share, generation) or ends_at
    evidence = (
        f"no contact that could renew its lease for {now - node.heard_at_most:.1f} s, and a rank of its generation "
        f"on another node has been stopped for {now - stopped_at:.1f} s, so that no other can step; the "
        f"step that it may have had in hand is over by then ({RULE_VERSION})"
    )
    return FenceProof(
        node=share.node, kind=ProofKind.LEASE_EXPIRED, at=ends_at, evidence=evidence, generation=generation.number
    )


def _is_settled(resumed_step: int | None, last_step: int | None) -> bool:
    return last_step is not None and resumed_step is not None and last_step - resumed_step >= STEPS_OF_SETUP


def raised(limits: LeaseLimits, *, pace_s: float | None = None, save_time_s: float | None = None) -> LeaseLimits:
    """Terms that suit a job's own pace: never less than they were, so that a slow healthy rank is not killed."""
    return LeaseLimits(
        setup_s=limits.setup_s,
        compile_s=limits.compile_s,
        step_s=max(limits.step_s, _rounded(PACES * (pace_s or 0.0))),
        save_s=max(limits.save_s, _rounded(SAVES * (save_time_s or 0.0))),
        evaluation_s=limits.evaluation_s,
    )


def _rounded(seconds: float) -> float:
    """Up to the next 5 s, so that a slowly growing pace does not make new orders each second."""
    return -(-seconds // 5.0) * 5.0
