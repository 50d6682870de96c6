"""A slice of `make exactness`: real ranks that are killed and resumed end where an uninterrupted run ends, or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from exactness.case import run_case, run_uninterrupted
from exactness.comparison import Record, differences
from exactness.faults import ON_DISK, Kind, draw_faults
from exactness.jobs import TIERS, Job, Scale
from exactness.moments import SaveWatch
from exactness.script import FORGETS

from tests.integration.forked_generation import warm_up

JOB = Job(ranks=2, wrapping="ddp", nodes=2, workers=2)
DISK = TIERS[0]
SCALE = Scale(seed=24, steps=60, save_every=5, faults=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Record:
    warm_up()
    assert torch.get_num_threads() == 1, "ranks are forked from here"
    return run_uninterrupted(JOB, SCALE, tmp_path_factory.mktemp("exactness") / "uninterrupted")


def test_run_that_was_killed_in_a_step_and_in_a_save_ends_as_if_nothing_had_happened(
    whole: Record, tmp_path: Path
) -> None:
    result = run_case(JOB, DISK, SCALE, tmp_path / "case", whole=whole)
    assert (result.error, result.differs) == ("", [])
    assert [fired.fault.kind for fired in result.fired] == [Kind.RANK, Kind.FLUSH]
    assert "rank 0; save of step" in result.fired[1].words and "renamed and without manifest" in result.fired[1].words
    assert result.generations == 3 and result.replayed > 0


@pytest.mark.parametrize("forgotten", FORGETS)
def test_run_that_forgets_a_part_is_not_identical(whole: Record, tmp_path: Path, forgotten: str) -> None:
    scale = dataclasses.replace(SCALE, faults=1, forget=forgotten)
    result = run_case(JOB, DISK, scale, tmp_path / "case", whole=whole)
    assert result.error == "" and not result.identical
    # The moments decide nothing of the first replayed step, and all of the second.
    first = result.differs[0]
    assert " of rank 0 in generation 2: " in first and "loss_hex" in first
    assert ("span_start" in first) is (forgotten == "sampler")


def test_fault_that_never_finds_its_moment_is_an_error(
    whole: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SaveWatch, "catch", lambda *_, **__: None)
    scale = Scale(seed=16, steps=24, save_every=4, faults=1)
    result = run_case(JOB, DISK, scale, tmp_path / "case", whole=whole)
    assert not result.identical and "DidNotHappen: no save was caught where the leader waits" in result.error


def test_one_bit_or_one_step_more_or_less_is_a_difference(whole: Record) -> None:
    def compared(*records: Record) -> list[str]:
        return differences(whole, records, steps=SCALE.steps, world_size=2)

    assert compared(whole) == []
    loss, *others = whole.steps[7, 1]
    assert compared(dataclasses.replace(whole, steps=whole.steps | {(7, 1): (f"{loss}1", *others)})) == [
        f"step 7 of rank 1 in generation 1: loss_hex {loss}1 instead of {loss}"
    ]
    shorter = {place: made for place, made in whole.steps.items() if place != (7, 1)}
    assert compared(dataclasses.replace(whole, steps=shorter)) == [
        "step 7 of rank 1 is missing in the line that survived"
    ]
    path = next(path for path in whole.final[1] if path.startswith("/optimizer/state"))
    final = whole.final | {1: whole.final[1] | {path: "else"}}
    assert compared(dataclasses.replace(whole, final=final)) == [f"final state of rank 1: {path} differs"]
    block = next(iter(whole.saved))
    assert compared(dataclasses.replace(whole, saved=whole.saved | {block: "else"})) == [
        f"last checkpoint: {block} differs"
    ]
    early = {place: made for place, made in whole.steps.items() if place[0] < 20}
    late = {place: made for place, made in whole.steps.items() if place[0] > 20}
    lost = dataclasses.replace(whole, steps=early, final={})
    assert compared(lost, dataclasses.replace(whole, number=2, parent_step=20, steps=late)) == [
        f"step 20 of rank {rank} is missing in the line that survived" for rank in range(2)
    ]


def test_final_state_holds_every_part_of_each_rank(whole: Record) -> None:
    for rank in range(2):
        parts = {path.split("/")[1] for path in whole.final[rank]}
        assert parts == {"model", "optimizer", "scheduler", "sampler", "scaler", "averages", "rng", "steps"}
    mine, theirs = whole.final[0], whole.final[1]
    differing = {path.split("/")[1] for path in mine if mine[path] != theirs[path]}
    assert differing == {"model", "rng"}, "batch averages and generators are each rank's own"


def test_faults_are_drawn_from_the_seed_and_no_kind_comes_twice_before_each_has_come() -> None:
    def draw(seed: str) -> list[Kind]:
        drawn = draw_faults(seed, ON_DISK, count=5, ranks=4, steps=300, save_every=10)
        assert [fault.step for fault in drawn] == sorted({fault.step for fault in drawn})
        assert drawn == draw_faults(seed, ON_DISK, count=5, ranks=4, steps=300, save_every=10)
        return [fault.kind for fault in drawn]

    assert sorted(draw("a")) == sorted(draw("b")) == sorted(ON_DISK)
    assert draw("a") != draw("b")
