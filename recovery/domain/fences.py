"""What is proven of old generations, and the proofs that the server finds by itself, without the node's word."""

from __future__ import annotations

from collections.abc import Iterable

from recovery.domain.generations import FenceProof, GenerationView, ProofKind, ShareView
from recovery.domain.instructions import RecordProof
from recovery.domain.lease import lease_ends_at, lease_proof
from recovery.domain.silence import Contact
from recovery.domain.situation import Situation
from recovery.domain.timeline import Entry, EntryKind

_WITHOUT_ITS_WORD = (
    ProofKind.BOOT_CHANGED,
    ProofKind.LEASE_EXPIRED,
    ProofKind.PROVIDER,
    ProofKind.ATTESTATION,
)
"""Proofs that do not need the node's agent, so that what it still has to tell comes after them."""

LAST_WORDS_S = 10.0
"""So long a node that returned is listened to before the next generation is planned without it."""

LEASE_SLACK_S = 10.0
"""After a lease's end, until its proof must be there: a few looks of the sweep."""
LEASE_WAIT_AT_MOST_S = 300.0
"""A lease that runs longer (that of a setup) is waited for too, but a human is told: he may know better."""

PROOF_WORDS = {
    ProofKind.CGROUP_EMPTY: "its control group is empty",
    ProofKind.PROC_SCAN_EMPTY: "no process carries its mark",
    ProofKind.NEVER_STARTED: "it never started there",
    ProofKind.UNKILLABLE: "what is left is stuck in the kernel and never returns to user mode",
    ProofKind.BOOT_CHANGED: "the node has booted since",
    ProofKind.LEASE_EXPIRED: "its lease has run out and its peers are stopped, so that none of its ranks can step",
    ProofKind.PROVIDER: "the fence provider says that the node is off",
    ProofKind.ATTESTATION: "an operator attests that the node is powered off",
}


def lease_proofs(situation: Situation, now: float, *, except_generation: int | None = None) -> tuple[RecordProof, ...]:
    """Proofs that time alone has brought for generations that are wanted gone."""
    return tuple(
        RecordProof(job=situation.job.id, generation=generation.number, proof=proof)
        for generation, share in open_shares(situation, except_generation=except_generation)
        if (proof := _lease_proof(share, generation, situation, now)) is not None
    )


def next_lease_end(situation: Situation, *, except_generation: int | None = None) -> float | None:
    """When the last of the leases ends that stand in the way; None if one of the nodes has no lease that counts.

    Contact renews a lease: the one of a node in contact, whose processes do not die, never ends.
    """
    ends = [
        None
        if node is None or node.contact is Contact.SEEN
        else lease_ends_at(share, generation, node, synchronous=situation.job.synchronous)
        for generation, share in open_shares(situation, except_generation=except_generation)
        for node in [situation.fleet.node(share.node)]
    ]
    known = [end for end in ends if end is not None]
    return max(known) if known and len(known) == len(ends) else None


def nodes_with_last_words(situation: Situation, now: float, *, except_generation: int | None = None) -> tuple[str, ...]:
    """Nodes in contact on which a generation is fenced without their own word, and that may just be telling of it.

    A node that returns has its facts in an outbox: steps and checkpoints that the next plan should know of come before
    its own proof of the stop. They are waited for, but not for long.
    """
    here = {node.name for node in situation.fleet.nodes if node.contact is Contact.SEEN}
    return tuple(
        share.node
        for generation in situation.generations
        if generation.number != except_generation and generation.run_ordered
        for share in generation.shares
        if share.node in here
        and share.proof is not None
        and share.proof.kind in _WITHOUT_ITS_WORD
        and not share.confirmed
        and now - (share.proof.recorded_at or share.proof.at) < LAST_WORDS_S
    )


def boot_proof(*, node: str, generation: int, ran_in: str, boot_id: str, at: float) -> FenceProof | None:
    """The proof that a reboot brings; None if the node is still in the boot in which the generation ran."""
    if not ran_in or not boot_id or ran_in == boot_id:
        return None
    evidence = f"it ran in boot {ran_in}; the node is in boot {boot_id} now"
    return FenceProof(node=node, kind=ProofKind.BOOT_CHANGED, at=at, evidence=evidence, generation=generation)


def proof_entry(generation: int, proof: FenceProof) -> Entry:
    """The sentence that tells a proof."""
    return Entry(
        kind=EntryKind.PROOF,
        at=proof.at,
        text=f"Generation {generation} is gone from {proof.node}: {PROOF_WORDS[proof.kind]}.",
        data={"node": proof.node, "proof": proof.kind.value, "evidence": proof.evidence},
    )


def proofs_of(generations: Iterable[GenerationView]) -> tuple[FenceProof, ...]:
    """Every proof of generations that ran."""
    return tuple(proof for generation in generations if generation.run_ordered for proof in generation.proofs)


def _lease_proof(share: ShareView, generation: GenerationView, situation: Situation, now: float) -> FenceProof | None:
    node = situation.fleet.node(share.node)
    return lease_proof(share, generation, node, synchronous=situation.job.synchronous, now=now)


def open_shares(
    situation: Situation, *, except_generation: int | None = None
) -> Iterable[tuple[GenerationView, ShareView]]:
    """Every share of which a proof of stop is missing."""
    for generation in situation.generations:
        if generation.number == except_generation or generation.fenced:
            continue
        for share in generation.shares:
            if share.proof is None:
                yield generation, share
