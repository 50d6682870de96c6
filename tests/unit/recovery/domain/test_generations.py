"""What a generation says of itself, on which every decision rests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import NOW, ended_well, fenced, generation, plan, preparing, proof, rank, share, training

from recovery.domain.generations import SeenPhase


def test_a_generation_that_was_never_ordered_to_run_is_fenced() -> None:
    assert preparing(plan()).fenced
    assert preparing(plan()).unfenced_nodes == ("gpu-01", "gpu-02")


def test_a_generation_that_was_ordered_to_run_needs_a_proof_from_each_node() -> None:
    view = generation(1)
    assert not view.fenced
    half = replace(view, shares=(replace(view.shares[0], proof=proof("gpu-01")), view.shares[1]))
    assert not half.fenced
    assert half.unfenced_nodes == ("gpu-02",)
    assert fenced(view).fenced


def test_ranks_that_are_not_known_yet_do_not_count_as_done() -> None:
    view = generation(1)
    assert not replace(view, ranks=()).ended_well
    assert not replace(view, ranks=()).stepping
    assert not replace(view, ranks=(ended_well(view.ranks[0]),)).ended_well


def test_a_rank_with_nothing_left_to_do_counts_as_stepping() -> None:
    idle = [replace(training(number, of=plan()), first_step_at=None, finished_step=100) for number in (0, 1)]
    assert generation(1, ranks=tuple(idle)).stepping


@pytest.mark.parametrize(
    ("changes", "well"),
    [
        ({"exit_code": 0, "finished_step": 100}, True),
        ({"exit_code": 0}, False),
        ({"exit_code": 1, "finished_step": 100}, False),
        ({"signal": 9, "finished_step": 100}, False),
        ({"exit_code": 0, "signal": 15, "finished_step": 100}, False),
        ({"finished_step": 100}, False),
    ],
)
def test_a_rank_ends_well_only_after_its_last_step_with_code_0(changes: dict[str, int], well: bool) -> None:
    view = rank(0, exited_at=NOW, **changes)
    assert (view.ended_well, view.died) == (well, not well)
    assert not rank(0, **changes).died


def test_a_stopped_share_is_a_failure_only_where_ranks_are_wanted_and_had_not_ended() -> None:
    view = generation(1, shares=(share("gpu-01", SeenPhase.STOPPED), share("gpu-02", SeenPhase.RUNNING)))
    assert [part.node for part in view.failed_shares] == ["gpu-01"]
    well = replace(view, ranks=(ended_well(view.ranks[0]), view.ranks[1]))
    assert well.failed_shares == ()
    assert fenced(view).failed_shares == ()


@pytest.mark.parametrize(
    ("saved", "live", "told"),
    [
        ({"model": "a"}, {"model": "a"}, ""),
        ({"model": "a", "rng": "b"}, {"model": "a"}, "rank 0 did not restore the rng"),
        ({"model": "a"}, {"model": "x"}, "rank 0 did not restore the model"),
        ({"model": "a"}, {"model": "a", "rng": "b"}, "rank 0 did not restore the rng"),
        ({}, {"model": "a"}, ""),
    ],
)
def test_digests_tell_what_was_not_restored(saved: dict[str, str], live: dict[str, str], told: str) -> None:
    view = generation(1, ranks=(replace(training(0, of=plan()), saved_digest=saved, live_digest=live),))
    assert (view.not_restored, view.sound) == (told, not told)
    assert not replace(view, broken_continuity=True).sound


def test_ranks_lie_on_nodes_in_order() -> None:
    wide = plan(1, per_node=2)
    assert [wide.node_of(number) for number in range(wide.world_size)] == ["gpu-01", "gpu-01", "gpu-02", "gpu-02"]
