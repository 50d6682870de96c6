"""What fences an old generation, and which proofs the server finds by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import NOW, exited, fleet, leased, lost, node, plan, prepared, proven, situation, stopping

from recovery.domain.fences import (
    PROOF_WORDS,
    boot_proof,
    lease_proofs,
    next_lease_end,
    proof_entry,
    proofs_of,
)
from recovery.domain.generations import FenceProof, GenerationView, ProofKind
from recovery.domain.lease import DRIFT, MARGIN_S

LONGEST = 30.0 * (1 + DRIFT) + MARGIN_S
OVER = NOW + 60.0


def broken(*, stopped_at: float = NOW - 5) -> GenerationView:
    return proven(stopping(leased(1)), "gpu-01", at=stopped_at)


def gone(**changes: object) -> object:
    return lost("gpu-02", **{"observed_until": OVER, **changes})  # type: ignore[arg-type]


def test_records_a_lease_proof_for_the_silent_node_once_it_has_run_out() -> None:
    world = situation(broken(), fleet=fleet(node("gpu-01"), gone()))  # type: ignore[arg-type]
    assert lease_proofs(world, NOW) == ()
    (recorded,) = lease_proofs(world, OVER)
    assert (recorded.job, recorded.generation, recorded.proof.node) == ("job-1", 1, "gpu-02")
    assert recorded.proof.kind is ProofKind.LEASE_EXPIRED


def test_never_for_the_generation_that_is_being_launched_nor_for_one_that_never_ran() -> None:
    world = situation(broken(), prepared(plan(2)), fleet=fleet(node("gpu-01"), gone()))  # type: ignore[arg-type]
    assert lease_proofs(world, OVER, except_generation=1) == ()
    assert [proof.generation for proof in lease_proofs(world, OVER)] == [1]


def test_not_twice() -> None:
    done = proven(broken(), "gpu-02", at=NOW, kind=ProofKind.LEASE_EXPIRED)
    assert lease_proofs(situation(done, fleet=fleet(node("gpu-01"), gone())), OVER) == ()  # type: ignore[arg-type]


def test_the_last_lease_that_stands_in_the_way_is_waited_for() -> None:
    three = plan(1, nodes=("gpu-01", "gpu-02", "gpu-03"))
    view = proven(stopping(leased(1, of=three, ago_s=60)), "gpu-01", at=NOW - 50)
    snapshot = fleet(node("gpu-01"), lost("gpu-02", heard_at=NOW - 40), lost("gpu-03", heard_at=NOW - 20))
    assert next_lease_end(situation(view, fleet=snapshot)) == pytest.approx(NOW - 20 + LONGEST)


def test_no_end_is_known_where_one_node_has_no_lease_that_counts() -> None:
    view = broken()
    view = replace(view, shares=(view.shares[0], replace(view.shares[1], keeps_lease=False)))
    assert next_lease_end(situation(view, fleet=fleet(node("gpu-01"), lost("gpu-02")))) is None
    alone = stopping(leased(1, of=plan(1, nodes=("gpu-01",))))
    assert next_lease_end(situation(alone, fleet=fleet(lost("gpu-01")))) is None


def test_the_lease_of_a_node_in_contact_has_no_end_however_long_its_processes_take_to_die() -> None:
    view = leased(1)
    dead = replace(stopping(view), ranks=(exited(view.ranks[0], code=1), view.ranks[1]))
    world = situation(proven(dead, "gpu-01", at=NOW - 5), fleet=fleet(node("gpu-01"), node("gpu-02")))
    assert next_lease_end(world) is None


def test_a_new_boot_proves_that_nothing_of_before_is_left() -> None:
    proof = boot_proof(node="gpu-02", generation=3, ran_in="boot-a", boot_id="boot-b", at=NOW)
    assert proof is not None
    assert (proof.kind, proof.at, proof.generation) == (ProofKind.BOOT_CHANGED, NOW, 3)
    assert "boot-a" in proof.evidence
    assert "boot-b" in proof.evidence


@pytest.mark.parametrize(("ran_in", "boot_id"), [("boot-a", "boot-a"), ("", "boot-b"), ("boot-a", "")])
def test_the_same_or_an_unknown_boot_proves_nothing(ran_in: str, boot_id: str) -> None:
    assert boot_proof(node="gpu-02", generation=1, ran_in=ran_in, boot_id=boot_id, at=NOW) is None


@pytest.mark.parametrize("kind", ProofKind)
def test_every_kind_of_proof_is_told_in_words(kind: ProofKind) -> None:
    entry = proof_entry(4, FenceProof(node="gpu-02", kind=kind, at=NOW, evidence="seen"))
    assert entry.text == f"Generation 4 is gone from gpu-02: {PROOF_WORDS[kind]}."
    assert (entry.at, entry.data["proof"], entry.data["evidence"]) == (NOW, kind.value, "seen")


def test_proofs_are_those_of_generations_that_ran() -> None:
    ran, never_ran = broken(), replace(proven(prepared(plan(2)), "gpu-01", at=NOW), run_ordered=False)
    assert [proof.node for proof in proofs_of([ran, never_ran])] == ["gpu-01"]
