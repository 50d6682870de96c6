"""What is shown of proofs that are missing."""

from __future__ import annotations

from domain_scenes import NOW, fleet, leased, lost, node, plan, prepared, proven, stopping

from recovery.domain.awaited_fences import AwaitedFence, FenceHelp, awaited_fences
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.generations import GenerationView
from recovery.domain.silence import Contact

H = FenceHelp


def awaited(
    generation: GenerationView, seen: FleetSnapshot, *, provider: bool = False, synchronous: bool = True
) -> tuple[AwaitedFence, ...]:
    return awaited_fences((generation,), seen, synchronous=synchronous, provider=provider)


def test_node_in_contact_is_waited_for_and_a_lost_one_can_be_helped() -> None:
    seen = fleet(node("gpu-01"), lost("gpu-02"))
    first, second = awaited(stopping(leased()), seen)
    assert (first.node, first.helps, first.lease_ends_at) == ("gpu-01", (H.STOP,), None)
    assert (second.node, second.helps) == ("gpu-02", (H.RETURN, H.ATTESTATION))
    assert (second.contact, second.last_heard_at, second.silent_s) == (Contact.LOST, NOW - 12.0, 12.0)
    assert awaited(stopping(leased()), seen, provider=True)[1].helps == (H.RETURN, H.PROVIDER, H.ATTESTATION)


def test_lease_helps_once_a_peer_is_proven_stopped() -> None:
    seen = fleet(node("gpu-01"), lost("gpu-02"))
    stopped = proven(stopping(leased()), "gpu-01", at=NOW - 2)
    (only,) = awaited(stopped, seen)
    assert only.helps == (H.LEASE, H.RETURN, H.ATTESTATION)
    assert only.lease_ends_at is not None and only.lease_ends_at > NOW
    (alone,) = awaited(stopped, seen, synchronous=False)
    assert (alone.helps, alone.lease_ends_at) == ((H.RETURN, H.ATTESTATION), None)


def test_no_word_helps_while_nobody_listens_or_the_node_only_paused() -> None:
    unobserved = fleet(node("gpu-01"), node("gpu-02", contact=Contact.UNOBSERVED))
    assert awaited(stopping(leased()), unobserved, provider=True)[1].helps == (H.RETURN,)
    suspect = fleet(node("gpu-01"), node("gpu-02", contact=Contact.SUSPECT))
    assert awaited(stopping(leased()), suspect)[1].helps == (H.STOP,)


def test_what_is_proven_never_ran_or_is_the_new_plan_is_not_waited_for() -> None:
    seen = fleet(node("gpu-01"), lost("gpu-02"))
    done = proven(proven(leased(), "gpu-01", at=NOW), "gpu-02", at=NOW)
    assert awaited(done, seen) == ()
    assert awaited(prepared(plan(1)), seen) == ()
    assert awaited_fences((leased(),), seen, synchronous=True, provider=False, except_generation=1) == ()
