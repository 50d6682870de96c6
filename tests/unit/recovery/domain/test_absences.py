"""Which nodes are gone though nobody said so: two witnesses, no peer that steps on, and no open breaker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import (
    ECHO,
    NOW,
    at_step,
    ended_well,
    exited,
    fleet,
    generation,
    killed,
    leased,
    lost,
    node,
    plan,
    proven,
    situation,
)

from recovery.domain.absences import hold_up_launch, missing_nodes, node_lost, peers_step_on, unseen_for_s
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.generations import GenerationView, Phase, ProofKind
from recovery.domain.incident import CauseKind
from recovery.domain.silence import Contact
from recovery.domain.situation import Situation
from recovery.domain.witnesses import ProbeView, WitnessKind

GONE = fleet(node("gpu-01"), lost("gpu-02"), node("gpu-03"))


def world(view: GenerationView, snapshot: FleetSnapshot = GONE, **changes: object) -> Situation:
    return situation(view, fleet=snapshot, **changes)


def missing(view: GenerationView, snapshot: FleetSnapshot = GONE, **changes: object) -> list[str]:
    even_fenced = bool(changes.pop("even_fenced", False))
    found = missing_nodes(view, world(view, snapshot, **changes), NOW, even_fenced=even_fenced)
    return [one.name for one in found]


def wide(ago_s: float, *silent: str, count: int = 4) -> tuple[GenerationView, FleetSnapshot]:
    """A job on many nodes whose ranks made their last step so long ago, and the fleet with some of them silent."""
    names = tuple(f"gpu-{number:02d}" for number in range(1, count + 1))
    view = leased(1, of=plan(1, nodes=names), ago_s=ago_s)
    spare = node(f"gpu-{count + 1:02d}")
    return view, fleet(*(lost(name) if name in silent else node(name) for name in names), spare)


def test_a_silent_node_whose_peers_stand_still_is_missing() -> None:
    (found,) = missing_nodes(leased(ago_s=9), world(leased(ago_s=9)), NOW)
    assert (found.name, found.last_heard_at) == ("gpu-02", NOW - 12)
    assert [witness.kind for witness in found.witnesses] == [WitnessKind.HEARTBEAT, WitnessKind.PEER_STALLED]
    assert found.sentence.startswith("gpu-02 is gone: gpu-02 has been silent for 12 s and the ranks on the other nodes")


def test_a_silent_node_whose_peers_step_is_not_missing_whatever_a_probe_says() -> None:
    probe = ProbeView(node="gpu-02", prober="gpu-03", asked_at=NOW - 2, reachable=False)
    assert missing(leased(ago_s=0.4), probes=(probe,)) == []


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.EVALUATION])
def test_peers_in_a_save_or_an_evaluation_go_on_as_long_as_it_may_take(phase: Phase) -> None:
    def at(ago_s: float) -> GenerationView:
        view = leased()
        return replace(view, ranks=tuple(at_step(rank, ago_s=ago_s, phase=phase) for rank in view.ranks))

    assert missing(at(29)) == []
    assert missing(at(31)) == ["gpu-02"]


def test_all_ranks_of_a_big_job_that_miss_two_nodes_name_both() -> None:
    view, snapshot = wide(9, "gpu-02", "gpu-04", count=8)
    assert missing(view, snapshot) == ["gpu-02", "gpu-04"]


def test_30_of_32_lost_nodes_are_found_in_one_look_once_the_breaker_was_rearmed() -> None:
    silent = tuple(f"gpu-{number:02d}" for number in range(3, 33))
    view, snapshot = wide(9, *silent, count=32)
    assert missing(view, snapshot) == []  # the breaker asks first
    assert missing(view, replace(snapshot, rearmed_at=NOW - 1)) == list(silent)


def test_three_unrelated_deaths_at_once_among_twenty_are_all_found() -> None:
    names = [f"gpu-{number:02d}" for number in range(1, 21)]
    dead = ("gpu-02", "gpu-08", "gpu-14")
    snapshot = fleet(*(lost(name) if name in dead else node(name) for name in names))
    for first, second in zip(names[::2], names[1::2], strict=True):
        pair = leased(1, of=plan(1, nodes=(first, second)), ago_s=9 if {first, second} & set(dead) else 0.4)
        assert missing(pair, snapshot) == [name for name in (first, second) if name in dead]


def test_nothing_is_missing_while_the_breaker_is_open() -> None:
    assert missing(leased(ago_s=60), replace(GONE, breaker_open=True)) == []
    nobody = replace(fleet(lost("gpu-01"), lost("gpu-02")), breaker_open=True)
    assert unseen_for_s(leased(), world(leased(), nobody)) is None


def test_nothing_is_missing_when_not_one_node_of_the_job_can_be_seen() -> None:
    nobody = fleet(lost("gpu-01"), lost("gpu-02"), node("gpu-03"))
    probes = tuple(
        ProbeView(node=name, prober="gpu-03", asked_at=NOW - 2, reachable=False) for name in ("gpu-01", "gpu-02")
    )
    assert missing(leased(ago_s=60), nobody, probes=probes) == []


def test_a_node_that_is_fenced_is_missing_no_more_except_to_tell_the_cause() -> None:
    view = proven(leased(ago_s=60), "gpu-02", at=NOW - 1, kind=ProofKind.ATTESTATION)
    assert missing(view) == []
    assert missing(view, even_fenced=True) == ["gpu-02"]


def test_ranks_that_step_alone_do_not_vouch_for_each_other() -> None:
    assert peers_step_on(leased(ago_s=0.4), GONE, synchronous=True, now=NOW)
    assert not peers_step_on(leased(ago_s=0.4), GONE, synchronous=False, now=NOW)


def test_the_cause_names_the_first_missing_node_and_what_died_of_it() -> None:
    view, snapshot = wide(9, "gpu-02", "gpu-04", count=8)
    cause = node_lost(missing_nodes(view, world(view, snapshot), NOW), cascade=(0, 5))
    assert (cause.kind, cause.node, cause.rank, cause.cascade) == (CauseKind.NODE_LOST, "gpu-02", None, (0, 5))
    assert "gpu-04 is gone" in cause.sentence


def test_the_cause_keeps_each_witness_with_its_kind() -> None:
    view, snapshot = wide(9, "gpu-02", "gpu-04", count=8)
    cause = node_lost(missing_nodes(view, world(view, snapshot), NOW))
    kinds = [kind for kind, _ in cause.witnesses]
    assert kinds.count("heartbeat") == 2
    assert len(set(kinds)) >= 2
    assert all(sentence in cause.sentence for _, sentence in cause.witnesses)


# --- Nothing can be seen ---


def unseen(view: GenerationView, *nodes: object) -> float | None:
    return unseen_for_s(view, world(view, fleet(*nodes)))  # type: ignore[arg-type]


def test_unseen_for_as_long_as_the_node_that_was_heard_last() -> None:
    assert unseen(leased(), lost("gpu-01", heard_at=NOW - 40), lost("gpu-02", heard_at=NOW - 70)) == 40


@pytest.mark.parametrize(
    "other", [node("gpu-02"), lost("gpu-02", contact=Contact.SUSPECT), lost("gpu-02", contact=Contact.UNOBSERVED)]
)
def test_not_unseen_while_one_node_may_still_say_something(other: object) -> None:
    assert unseen(leased(), lost("gpu-01"), other) is None


def test_a_node_whose_ranks_did_their_last_step_can_tell_nothing_of_the_others() -> None:
    view = leased()
    view = replace(view, ranks=(ended_well(view.ranks[0]), view.ranks[1]))
    assert unseen(view, node("gpu-01"), lost("gpu-02", heard_at=NOW - 33)) == 33


# --- Launches ---


def beginning(*stepped: int) -> GenerationView:
    base = generation(1)
    ranks = tuple(rank if rank.rank in stepped else replace(rank, first_step_at=None) for rank in base.ranks)
    return replace(base, ranks=ranks)


def test_a_lost_node_holds_a_launch_up_when_a_seen_peer_waits_for_its_first_step() -> None:
    assert hold_up_launch(beginning(), world(beginning())) == ("gpu-02",)
    nothing_said = replace(beginning(), ranks=())
    assert hold_up_launch(nothing_said, world(nothing_said)) == ("gpu-02",)


def test_a_lost_node_does_not_hold_up_peers_that_step() -> None:
    assert hold_up_launch(beginning(0), world(beginning(0))) == ()


@pytest.mark.parametrize(
    "snapshot",
    [
        fleet(),
        fleet(node("gpu-01"), lost("gpu-02", contact=Contact.UNOBSERVED)),
        fleet(lost("gpu-01"), lost("gpu-02")),
        replace(GONE, breaker_open=True),
    ],
)
def test_no_node_holds_a_launch_up_where_nothing_certain_is_known(snapshot: FleetSnapshot) -> None:
    assert hold_up_launch(beginning(), world(beginning(), snapshot)) == ()


def test_an_echo_heard_beside_a_lost_node_makes_it_missing_but_an_own_death_does_not() -> None:
    view = leased()
    echo = replace(view, ranks=(exited(view.ranks[0], code=1, detail=ECHO), view.ranks[1]))
    assert missing(echo) == ["gpu-02"]
    assert missing(replace(view, ranks=(killed(view.ranks[0]), view.ranks[1]))) == []
