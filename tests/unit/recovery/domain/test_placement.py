from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import NODES, fleet, node, plan
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.placement import NoCapacity, Placed, choose_nodes, lost_nodes


def choose(snapshot: FleetSnapshot, **changes: object) -> Placed | NoCapacity:
    given_by_default = {"job": "job-1", "node_count": 2, "ranks_per_node": 1, "keep": NODES}
    return choose_nodes(fleet=snapshot, **{**given_by_default, **changes})  # type: ignore[arg-type]


def nodes_of(placed: Placed | NoCapacity) -> tuple[str, ...]:
    assert isinstance(placed, Placed), placed
    return placed.nodes


UNUSABLE = {
    "unhealthy": {"health": NodeHealth.UNHEALTHY},
    "no contact with its agent": {"health": NodeHealth.UNKNOWN},
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


_views = st.builds(
    NodeView,
    name=st.sampled_from([f"gpu-{number:02d}" for number in range(1, 8)]),
    address=st.just("10.0.0.1"),
    health=st.sampled_from(NodeHealth),
    slots=st.integers(0, 3),
    claimed_by=st.sampled_from([None, "job-1", "job-2"]),
    cordoned=st.booleans(),
    rack=st.sampled_from(["", "r1", "r2"]),
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
        and not view.cordoned
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
        # A former node beyond the count holds no slot and is no spare either.
        assert len(usable - set(keep[count:])) < count


@given(snapshot=_fleets)
def test_same_fleet_in_any_order_gives_the_same_choice(snapshot: FleetSnapshot) -> None:
    turned = replace(snapshot, nodes=snapshot.nodes[::-1])
    first, second = choose(snapshot), choose(turned)
    assert isinstance(first, Placed) == isinstance(second, Placed)
    if isinstance(first, Placed):
        assert nodes_of(first) == nodes_of(second)
