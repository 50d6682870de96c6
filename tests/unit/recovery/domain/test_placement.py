from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import NODES, fleet, node, plan
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.placement import (
    NoCapacity,
    Placed,
    choose_as_many,
    choose_nodes,
    lost_nodes,
    possible_sizes,
    unseen_nodes,
)
from recovery.domain.silence import Contact


def choose(snapshot: FleetSnapshot, **changes: object) -> Placed | NoCapacity:
    given_by_default = {"job": "job-1", "node_count": 2, "ranks_per_node": 1, "keep": NODES}
    return choose_nodes(fleet=snapshot, **{**given_by_default, **changes})  # type: ignore[arg-type]


def nodes_of(placed: Placed | NoCapacity) -> tuple[str, ...]:
    assert isinstance(placed, Placed), placed
    return placed.nodes


UNUSABLE = {
    "unhealthy": {"health": NodeHealth.UNHEALTHY},
    "no contact with its agent": {"health": NodeHealth.UNKNOWN, "contact": Contact.LOST},
    "quarantined until it reboots: stuck in its kernel": {"quarantined": "stuck in its kernel"},
    "its agent has not said yet that generation 1 of job-1 is gone": {"unconfirmed": "generation 1 of job-1"},
    "cordoned": {"cordoned": True},
    "claimed by job-2": {"claimed_by": "job-2"},
    "0 slots, 1 needed": {"slots": 0},
}


def test_keeps_the_same_nodes_in_their_order_when_all_are_well() -> None:
    assert nodes_of(choose(fleet(), keep=("gpu-02", "gpu-01"))) == ("gpu-02", "gpu-01")


@pytest.mark.parametrize("why", UNUSABLE)
def test_spare_takes_the_lost_slot_and_the_survivor_keeps_its_rank(why: str) -> None:
    placed = choose(fleet(node("gpu-01", **UNUSABLE[why]), node("gpu-02"), node("gpu-03")))
    assert nodes_of(placed) == ("gpu-03", "gpu-02")
    assert placed.reason == f"gpu-03 for gpu-01 ({why}); the other nodes keep their ranks."


@pytest.mark.parametrize("why", UNUSABLE)
def test_refuses_placement_when_too_few_nodes_are_left_and_says_why(why: str) -> None:
    placed = choose(fleet(node("gpu-01"), node("gpu-02", **UNUSABLE[why])))
    assert isinstance(placed, NoCapacity)
    assert placed.missing == 1
    assert f"gpu-02 ({why})" in placed.reason


def test_says_when_no_other_node_has_joined() -> None:
    placed = choose(fleet(node("gpu-01")), keep=())
    assert isinstance(placed, NoCapacity)
    assert "no other node has joined" in placed.reason


def test_prefers_a_spare_of_the_same_rack() -> None:
    away, near = node("gpu-03", rack="r2"), node("gpu-04", rack="r1")
    placed = choose(fleet(node("gpu-01", cordoned=True), node("gpu-02"), away, near))
    assert nodes_of(placed) == ("gpu-04", "gpu-02")


def test_takes_a_node_that_the_job_holds_already() -> None:
    held = fleet(node("gpu-01", claimed_by="job-1"), node("gpu-02", claimed_by="job-1"))
    assert nodes_of(choose(held)) == NODES


def test_never_takes_an_excluded_node_even_if_it_was_kept() -> None:
    assert nodes_of(choose(fleet(), excluded=("gpu-02",))) == ("gpu-01", "gpu-03")


def test_never_takes_an_excluded_spare() -> None:
    placed = choose(fleet(node("gpu-01", cordoned=True), node("gpu-02"), node("gpu-03")), excluded=("gpu-03",))
    assert isinstance(placed, NoCapacity)
    assert "gpu-03 (excluded after a failure)" in placed.reason


def test_a_node_that_left_the_fleet_is_replaced() -> None:
    assert nodes_of(choose(fleet(node("gpu-02"), node("gpu-03")))) == ("gpu-03", "gpu-02")


@pytest.mark.parametrize("why", UNUSABLE)
def test_a_planned_node_counts_as_lost_once_it_cannot_be_used(why: str) -> None:
    snapshot = fleet(node("gpu-01"), node("gpu-02", **UNUSABLE[why]))
    assert lost_nodes(plan(2), snapshot) == ["gpu-02"]


@pytest.mark.parametrize("contact", [Contact.SEEN, Contact.SUSPECT, Contact.UNOBSERVED])
def test_a_planned_node_that_only_reconnects_is_not_lost_but_unseen(contact: Contact) -> None:
    snapshot = fleet(node("gpu-01"), node("gpu-02", health=NodeHealth.UNKNOWN, contact=contact))
    assert lost_nodes(plan(2), snapshot) == []
    assert unseen_nodes(plan(2), snapshot) == ["gpu-02"]


_views = st.builds(
    NodeView,
    name=st.sampled_from([f"gpu-{number:02d}" for number in range(1, 8)]),
    address=st.just("10.0.0.1"),
    health=st.sampled_from(NodeHealth),
    slots=st.integers(0, 3),
    claimed_by=st.sampled_from([None, "job-1", "job-2"]),
    cordoned=st.booleans(),
    rack=st.sampled_from(["", "r1", "r2"]),
    quarantined=st.sampled_from(["", "", "stuck"]),
    unconfirmed=st.sampled_from(["", "", "generation 1 of job-2"]),
)
_fleets = st.lists(_views, unique_by=lambda view: view.name, max_size=7).map(
    lambda found: FleetSnapshot(nodes=tuple(found))
)


@given(
    snapshot=_fleets,
    count=st.integers(1, 4),
    ranks=st.integers(1, 2),
    keep=st.lists(st.sampled_from([f"gpu-{number:02d}" for number in range(1, 8)]), unique=True, max_size=4),
    excluded=st.sets(st.sampled_from([f"gpu-{number:02d}" for number in range(1, 8)])),
)
def test_only_ever_takes_usable_nodes_once_and_survivors_stay(
    snapshot: FleetSnapshot, count: int, ranks: int, keep: list[str], excluded: set[str]
) -> None:
    usable = {
        view.name
        for view in snapshot.nodes
        if view.health is NodeHealth.HEALTHY
        and not (view.cordoned or view.quarantined or view.unconfirmed)
        and view.claimed_by in (None, "job-1")
        and view.slots >= ranks
        and view.name not in excluded
    }
    placed = choose(
        snapshot, node_count=count, ranks_per_node=ranks, keep=tuple(keep), excluded=tuple(sorted(excluded))
    )
    if isinstance(placed, Placed):
        assert len(placed.nodes) == len(set(placed.nodes)) == count
        assert set(placed.nodes) <= usable
        for index, name in enumerate(keep[:count]):
            assert placed.nodes[index] == name or name not in usable
    else:
        assert len(usable) < count


@given(snapshot=_fleets)
def test_same_fleet_in_any_order_gives_the_same_choice(snapshot: FleetSnapshot) -> None:
    turned = replace(snapshot, nodes=snapshot.nodes[::-1])
    first, second = choose(snapshot), choose(turned)
    assert isinstance(first, Placed) == isinstance(second, Placed)
    if isinstance(first, Placed):
        assert nodes_of(first) == nodes_of(second)


# --- Shrinking ---


def test_a_job_without_a_range_has_one_size_only() -> None:
    assert possible_sizes(most=4, least=None, multiple_of=1) == (4,)


@pytest.mark.parametrize(
    ("most", "least", "multiple_of", "sizes"),
    [(4, 2, 1, (4, 3, 2)), (8, 2, 2, (8, 6, 4, 2)), (7, 3, 2, (6, 4)), (4, 4, 1, (4,)), (3, 2, 4, ())],
)
def test_sizes_go_from_the_most_to_the_least_by_multiples(
    most: int, least: int, multiple_of: int, sizes: tuple[int, ...]
) -> None:
    assert possible_sizes(most=most, least=least, multiple_of=multiple_of) == sizes


FOUR = tuple(f"gpu-{number:02d}" for number in range(1, 5))


def as_many(snapshot: FleetSnapshot, *sizes: int, keep: tuple[str, ...] = FOUR) -> Placed | NoCapacity:
    return choose_as_many(fleet=snapshot, job="job-1", sizes=sizes, ranks_per_node=1, keep=keep)


def test_shrinks_only_when_no_spare_is_there() -> None:
    four = [node("gpu-01"), node("gpu-02", cordoned=True), node("gpu-03"), node("gpu-04")]
    assert nodes_of(as_many(fleet(*four, node("gpu-05")), 4, 3)) == ("gpu-01", "gpu-05", "gpu-03", "gpu-04")
    placed = as_many(fleet(*four), 4, 3)
    assert nodes_of(placed) == ("gpu-01", "gpu-04", "gpu-03")
    assert placed.reason.endswith("Shrunk to 3 of 4 nodes.")


def test_survivor_whose_slot_is_gone_takes_the_lost_one_and_the_others_keep_their_ranks() -> None:
    placed = as_many(fleet(node("gpu-01", cordoned=True), node("gpu-02"), node("gpu-03"), node("gpu-04")), 4, 2)
    assert nodes_of(placed) == ("gpu-03", "gpu-02")


def test_does_not_shrink_below_the_least_and_says_what_the_least_would_need() -> None:
    placed = as_many(fleet(node("gpu-01")), 4, 2)
    assert isinstance(placed, NoCapacity)
    assert placed.missing == 1


def test_a_shrunk_job_grows_again_when_nodes_are_there() -> None:
    placed = as_many(fleet(node("gpu-01"), node("gpu-02"), node("gpu-03")), 3, 2, keep=("gpu-01", "gpu-03"))
    assert nodes_of(placed) == ("gpu-01", "gpu-03", "gpu-02")


def test_a_job_that_allows_no_number_of_nodes_is_told_so() -> None:
    placed = as_many(fleet())
    assert isinstance(placed, NoCapacity)
    assert "allows no number" in placed.reason


@given(snapshot=_fleets, most=st.integers(1, 5), least=st.integers(1, 5), multiple_of=st.integers(1, 3))
def test_takes_the_largest_size_for_which_there_are_nodes(
    snapshot: FleetSnapshot, most: int, least: int, multiple_of: int
) -> None:
    sizes = possible_sizes(most=most, least=least, multiple_of=multiple_of)
    usable = sum(view.can_take(job="job-1", ranks=1) for view in snapshot.nodes)
    placed = as_many(snapshot, *sizes, keep=NODES)
    fitting = [size for size in sizes if size <= usable]
    if fitting:
        assert len(nodes_of(placed)) == max(fitting)
        assert max(fitting) % multiple_of == 0
    else:
        assert isinstance(placed, NoCapacity)
