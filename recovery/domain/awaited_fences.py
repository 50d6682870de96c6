"""What an incident waits for: nodes without proof of stop, and what would bring one. Shown; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from recovery.domain.fleet import FleetSnapshot, NodeView
from recovery.domain.generations import GenerationView, ShareView
from recovery.domain.lease import lease_ends_at
from recovery.domain.silence import Contact


class FenceHelp(StrEnum):
    """What would bring the missing proof."""

    STOP = "stop"
    """The node is in contact: its agent stops what is left and proves it."""
    LEASE = "lease"
    """Its lease runs out at a known time."""
    RETURN = "return"
    """Its agent comes back, in this boot or another."""
    PROVIDER = "provider"
    """The fence provider is asked to switch it off."""
    ATTESTATION = "attestation"
    """An operator attests that it is powered off."""


@dataclass(frozen=True, kw_only=True)
class AwaitedFence:
    """One node of one generation whose proof is missing."""

    node: str
    generation: int
    contact: Contact
    last_heard_at: float | None
    silent_s: float
    lease_ends_at: float | None
    """None: no lease proves anything here."""
    helps: tuple[FenceHelp, ...]


def awaited_fences(
    generations: tuple[GenerationView, ...],
    fleet: FleetSnapshot,
    *,
    synchronous: bool,
    provider: bool,
    except_generation: int | None = None,
) -> tuple[AwaitedFence, ...]:
    """Every proof that is missing, oldest generation first. `provider`: one is configured."""
    return tuple(
        _awaited(share, generation, fleet.node(share.node), synchronous=synchronous, provider=provider)
        for generation in generations
        if generation.number != except_generation and not generation.fenced
        for share in generation.shares
        if share.proof is None
    )


def _awaited(
    share: ShareView, generation: GenerationView, node: NodeView | None, *, synchronous: bool, provider: bool
) -> AwaitedFence:
    contact = node.contact if node else Contact.UNOBSERVED
    ends_at = lease_ends_at(share, generation, node, synchronous=synchronous)
    if contact in (Contact.SEEN, Contact.SUSPECT):
        helps: tuple[FenceHelp, ...] = (FenceHelp.STOP,)
    else:
        lost = contact is Contact.LOST
        helps = (
            *((FenceHelp.LEASE,) if ends_at is not None else ()),
            FenceHelp.RETURN,
            *((FenceHelp.PROVIDER,) if lost and provider else ()),
            *((FenceHelp.ATTESTATION,) if lost else ()),
        )
    return AwaitedFence(
        node=share.node,
        generation=generation.number,
        contact=contact,
        last_heard_at=node.last_heard_at if node else None,
        silent_s=node.silent_s if node else 0.0,
        lease_ends_at=ends_at,
        helps=helps,
    )
