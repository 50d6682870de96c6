"""Who says that a node is gone: silence alone never does, a second kind of witness must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import ECHO, NOW, TERMS, at_step, exited, fleet, killed, leased, lost, node

from recovery.domain.fleet import FleetSnapshot
from recovery.domain.generations import GenerationView, Phase
from recovery.domain.silence import Contact
from recovery.domain.witnesses import (
    STALL_AT_LEAST_S,
    ProbeView,
    Witness,
    WitnessKind,
    is_confirmed,
    stall_limit_s,
    stands_still,
    witnesses,
)

K = WitnessKind
GONE = fleet(node("gpu-01"), lost("gpu-02"), node("gpu-03"))


def said(
    view: GenerationView,
    *,
    of: str = "gpu-02",
    snapshot: FleetSnapshot = GONE,
    probes: tuple[ProbeView, ...] = (),
    synchronous: bool = True,
) -> tuple[Witness, ...]:
    return witnesses(of, generation=view, fleet=snapshot, probes=probes, synchronous=synchronous, now=NOW)


def kinds(*args: object, **kwargs: object) -> list[WitnessKind]:
    return [witness.kind for witness in said(*args, **kwargs)]  # type: ignore[arg-type]


def with_peer(view: GenerationView, **changes: object) -> GenerationView:
    return replace(view, ranks=(replace(view.ranks[0], **changes), view.ranks[1]))  # type: ignore[arg-type]


def looked(*, reachable: bool, at: float = NOW - 3, of: str = "gpu-02") -> ProbeView:
    return ProbeView(node=of, prober="gpu-03", asked_at=at, reachable=reachable, detail="timed out")


@pytest.mark.parametrize("contact", [Contact.SEEN, Contact.SUSPECT, Contact.UNOBSERVED])
def test_nothing_speaks_for_an_absence_before_the_node_is_lost(contact: Contact) -> None:
    snapshot = fleet(node("gpu-01"), lost("gpu-02", contact=contact))
    assert said(leased(ago_s=60), snapshot=snapshot, probes=(looked(reachable=False),)) == ()


def test_silence_while_peers_step_is_one_witness_and_not_enough() -> None:
    assert kinds(leased(ago_s=0.4)) == [K.HEARTBEAT]
    assert not is_confirmed(said(leased(ago_s=0.4)))


def test_one_missed_probe_without_silence_is_nothing() -> None:
    assert said(leased(), snapshot=fleet(), probes=(looked(reachable=False),)) == ()


def test_peers_that_stand_still_are_the_second_witness() -> None:
    found = said(leased(ago_s=9))
    assert [witness.kind for witness in found] == [K.HEARTBEAT, K.PEER_STALLED]
    assert is_confirmed(found)
    assert "no progress for 9 s" in found[1].sentence


def test_one_peer_that_steps_outweighs_those_that_do_not() -> None:
    view = leased(ago_s=20)
    three = replace(view, plan=replace(view.plan, nodes=("gpu-01", "gpu-02", "gpu-03")))
    stepping = at_step(replace(view.ranks[0], rank=2, node="gpu-03"), ago_s=0.3)
    assert kinds(replace(three, ranks=(*view.ranks, stepping))) == [K.HEARTBEAT]


def test_peers_on_nodes_that_cannot_be_seen_say_nothing() -> None:
    snapshot = fleet(lost("gpu-01", contact=Contact.SUSPECT), lost("gpu-02"))
    assert kinds(leased(ago_s=60), snapshot=snapshot) == [K.HEARTBEAT]


def test_a_peer_that_never_spoke_or_has_finished_is_not_called_stalled() -> None:
    assert kinds(with_peer(leased(ago_s=60), progress_at=None, progress_seen_at=None)) == [K.HEARTBEAT]
    assert kinds(with_peer(leased(ago_s=60), finished_step=100)) == [K.HEARTBEAT]


def test_stalled_peers_say_nothing_where_ranks_step_alone() -> None:
    assert kinds(leased(ago_s=60), synchronous=False) == [K.HEARTBEAT]


def test_a_peer_that_died_of_a_broken_collective_is_the_second_witness() -> None:
    view = leased()
    assert kinds(replace(view, ranks=(exited(view.ranks[0], code=1, detail=ECHO), view.ranks[1]))) == [
        K.HEARTBEAT,
        K.PEER_FAILED,
    ]


@pytest.mark.parametrize("own", ["signal", "error"])
def test_a_peer_that_died_of_its_own_says_nothing_of_the_silent_node(own: str) -> None:
    view = leased()
    dead = killed(view.ranks[0]) if own == "signal" else exited(view.ranks[0], code=1, detail="ValueError: bad batch")
    assert K.PEER_FAILED not in kinds(replace(view, ranks=(dead, view.ranks[1])))


def test_an_echo_that_another_ranks_own_death_explains_is_no_witness() -> None:
    view = leased()
    three = replace(view, plan=replace(view.plan, nodes=("gpu-01", "gpu-02", "gpu-03")))
    echo = exited(view.ranks[0], code=1, detail=ECHO)
    culprit = killed(replace(view.ranks[0], rank=2, node="gpu-03"))
    assert K.PEER_FAILED not in kinds(replace(three, ranks=(echo, view.ranks[1], culprit)))


def test_a_probe_without_answer_after_the_last_contact_is_the_second_witness() -> None:
    assert kinds(leased(), probes=(looked(reachable=False),)) == [K.HEARTBEAT, K.PROBE]


@pytest.mark.parametrize(
    "probe", [looked(reachable=True), looked(reachable=False, at=NOW - 60), looked(reachable=False, of="gpu-01")]
)
def test_a_probe_that_was_answered_or_asked_before_or_of_another_node_says_nothing(probe: ProbeView) -> None:
    assert kinds(leased(), probes=(probe,)) == [K.HEARTBEAT]


def test_the_newest_probe_counts() -> None:
    probes = (looked(reachable=False, at=NOW - 8), looked(reachable=True, at=NOW - 2))
    assert kinds(leased(), probes=probes) == [K.HEARTBEAT]


def test_two_witnesses_of_one_kind_are_one() -> None:
    twice = Witness(kind=K.HEARTBEAT, sentence="silent")
    assert not is_confirmed((twice, twice))


@pytest.mark.parametrize(
    ("phase", "pace_s", "limit_s"),
    [
        (None, None, TERMS.setup_s),
        (Phase.SETUP, 1.0, TERMS.setup_s),
        (Phase.COMPILE, 1.0, TERMS.compile_s),
        (Phase.SAVE, 1.0, TERMS.save_s),
        (Phase.EVALUATION, 1.0, TERMS.evaluation_s),
        (Phase.STEP, None, STALL_AT_LEAST_S),
        (Phase.STEP, 0.1, STALL_AT_LEAST_S),
        (Phase.STEP, 4.0, 32.0),
    ],
)
def test_a_stall_is_judged_by_the_phase_and_the_jobs_own_pace(
    phase: Phase | None, pace_s: float | None, limit_s: float
) -> None:
    rank = replace(leased().ranks[0], phase=phase, pace_s=pace_s, progress_at=NOW, progress_seen_at=NOW)
    assert stall_limit_s(rank, limits=TERMS) == limit_s
    assert not stands_still(rank, limits=TERMS, now=NOW + limit_s)
    assert stands_still(rank, limits=TERMS, now=NOW + limit_s + 0.1)


def test_an_agent_whose_clock_is_an_hour_back_does_not_make_its_ranks_look_stalled() -> None:
    rank = replace(at_step(leased().ranks[0], ago_s=0.2), progress_at=NOW - 3600)
    assert not stands_still(rank, limits=TERMS, now=NOW)
