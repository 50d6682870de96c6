"""The auditor must find each planted wrongness: a check that cannot fail is a defect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo_check.auditor import Audit, audit, disagreements, read_stories
from logged_worlds import FAULT, JOB, REACHED, SAVED, World, good_world, judge, shrunk_world


def receipt_of(found: Audit) -> dict[str, Any]:
    return {
        "verdict": {
            "kind": found.continuity,
            "steps_lost": found.steps_lost,
            "steps_compared": found.steps_compared,
        },
        "generation": found.generation,
        "reached_step": found.reached_step,
        "parent": {"generation": 1, "step": found.parent_step},
        "detect_s": found.detect_s,
        "stop_s": found.stop_s,
        "first_step_s": found.first_step_s,
        "caught_up_s": found.caught_up_s,
    }


def test_recomputes_a_good_recovery_and_finds_nothing_wrong(tmp_path: Path) -> None:
    found = judge(tmp_path, good_world())
    assert found.wrong == ()
    assert (found.continuity, found.steps_lost, found.steps_compared) == ("bit-equal", 8, 8)
    assert (found.generation, found.killed_rank, found.parent_step, found.reached_step) == (2, 1, SAVED, REACHED)
    assert found.detect_s == pytest.approx(0.1, abs=0.03)
    assert found.stop_s == pytest.approx(0.31, abs=0.03)
    assert found.first_step_s == pytest.approx(2.05, abs=0.03)
    assert found.caught_up_s == pytest.approx(2.45, abs=0.03)
    assert found.overlap_margin_s == pytest.approx(0.69, abs=0.03)
    assert disagreements(found, receipt_of(found)) == []


def change_step(world: World, generation: int, rank: int, step: int, **fields: Any) -> None:
    for line in world[generation, rank]:
        if line["kind"] == "step" and line["step"] == step:
            line.update(fields)


def forget_optimizer(world: World) -> None:
    world[2, 1][1]["live_digest"]["optimizer"] = "cc"


def lose_a_digest_part(world: World) -> None:
    del world[2, 0][1]["live_digest"]["model"]


def lose_all_digests(world: World) -> None:
    world[2, 0][1] |= {"saved_digest": {}, "live_digest": {}}


def change_one_loss(world: World) -> None:
    change_step(world, 2, 0, 30, loss_hex=(1.0).hex())


def restart_the_schedule(world: World) -> None:
    change_step(world, 2, 0, 26, learning_rate=0.001)


def rewind_the_sampler(world: World) -> None:
    change_step(world, 2, 1, 26, span_start=0, span_stop=8)


def skip_samples_after_the_replay(world: World) -> None:
    change_step(world, 2, 1, 37, span_start=300, span_stop=308)


def resume_elsewhere(world: World) -> None:
    world[2, 1][1]["step"] = 20


def resume_at_an_unsaved_step(world: World) -> None:
    for rank in (0, 1):
        world[1, rank] = [line for line in world[1, rank] if line["kind"] != "saved"]


def start_before_the_old_ones_ended(world: World) -> None:
    world[2, 0][0]["at"] = FAULT + 0.2


def relaunch_twice(world: World) -> None:
    for rank in (0, 1):
        world[3, rank] = [line | {"generation": 3} for line in world[2, rank]]


def start_a_rank_twice(world: World) -> None:
    world[2, 0].insert(1, world[2, 0][0])


def save_too_often(world: World) -> None:
    world[1, 0].append({"kind": "saved", "step": 30, "at": FAULT})


def leave_a_child(world: World) -> None:
    world[1, 0].insert(1, {"kind": "child", "pid": 150, "at": 990.0})


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (forget_optimizer, "the optimizer was not restored"),
        (lose_a_digest_part, "the model was not restored"),
        (lose_all_digests, "logged no state digest"),
        (change_one_loss, "Step 30, rank 0: the replayed loss"),
        (restart_the_schedule, "the scheduler was not restored"),
        (rewind_the_sampler, "the sampler was not restored"),
        (skip_samples_after_the_replay, "step 37 does not begin where step 36 ended"),
        (resume_elsewhere, "resumed at different steps"),
        (resume_at_an_unsaved_step, "never logged as saved"),
        (start_before_the_old_ones_ended, "The generations overlapped"),
        (relaunch_twice, "There were 2 relaunches, not one"),
        (start_a_rank_twice, "was started 2 times"),
        (save_too_often, "less than 20 steps apart"),
        (leave_a_child, "a process of generation 1 outlived the stop: pid 150"),
    ],
)
def test_finds_what_is_planted(tmp_path: Path, plant: Callable[[World], None], words: str) -> None:
    world = good_world()
    plant(world)
    found = judge(tmp_path, world)
    assert any(words in sentence for sentence in found.wrong), found.wrong


@pytest.mark.parametrize("plant", [forget_optimizer, change_one_loss, restart_the_schedule, rewind_the_sampler])
def test_never_calls_a_broken_replay_bit_equal(tmp_path: Path, plant: Callable[[World], None]) -> None:
    world = good_world()
    plant(world)
    assert judge(tmp_path, world).continuity == "broken"


def test_finds_a_rank_that_outlived_the_stop(tmp_path: Path) -> None:
    found = judge(tmp_path, good_world(), exits={101: FAULT})
    assert any("a process of generation 1 outlived the stop: pid 100" in sentence for sentence in found.wrong)


def test_finds_a_kill_right_after_a_save(tmp_path: Path) -> None:
    world = good_world()
    for rank in (0, 1):
        world[1, rank] = [line for line in world[1, rank] if line["kind"] != "step" or line["step"] <= SAVED + 3]
    assert any("died 3 steps after a save" in sentence for sentence in judge(tmp_path, world).wrong)


def test_finds_missing_beats(tmp_path: Path) -> None:
    judge(tmp_path, good_world())
    for path in tmp_path.glob("gpu-02/runs/*/2/logs/*.beats"):
        path.unlink()
    found = audit(read_stories(tmp_path, JOB), old=1, opened_at=FAULT, exits={100: FAULT, 101: FAULT})
    assert any("Rank 1 of generation 2 left no beats" in sentence for sentence in found.wrong)


def test_refuses_to_judge_without_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rank logs of generation 2"):
        judge(tmp_path, {key: lines for key, lines in good_world().items() if key[0] == 1})


@pytest.mark.parametrize("name", ["detect_s", "stop_s", "first_step_s", "caught_up_s"])
def test_finds_seconds_that_the_receipt_has_wrong(tmp_path: Path, name: str) -> None:
    found = judge(tmp_path, good_world())
    for wrong in (getattr(found, name) + 0.6, None):
        assert any(name in words for words in disagreements(found, receipt_of(found) | {name: wrong}))


def test_a_late_look_at_exits_widens_the_seconds_by_as_much_and_not_without_end(tmp_path: Path) -> None:
    for lateness_s, accepted_s, refused_s in [(1.0, 1.4, 1.6), (60.0, 2.4, 2.6)]:
        found = judge(tmp_path, good_world(), lateness_s=lateness_s)
        claimed = receipt_of(found)
        assert disagreements(found, claimed | {"detect_s": found.detect_s + accepted_s}) == []
        assert len(disagreements(found, claimed | {"detect_s": found.detect_s + refused_s})) == 1


def test_of_ranks_whose_exits_were_seen_as_one_the_first_to_fall_silent_was_hit(tmp_path: Path) -> None:
    together = {100: FAULT + 0.31, 101: FAULT + 0.311}
    assert judge(tmp_path, good_world(), exits=together).killed_rank == 0
    assert judge(tmp_path, good_world(), exits=together, lateness_s=0.1).killed_rank == 1


@pytest.mark.parametrize("name", ["steps_lost", "steps_compared", "generation", "reached_step", "parent_step"])
def test_finds_integers_that_the_receipt_has_wrong(tmp_path: Path, name: str) -> None:
    found = judge(tmp_path, good_world())
    claimed = receipt_of(dataclasses.replace(found, **{name: getattr(found, name) + 1}))
    assert [words for words in disagreements(found, claimed) if name in words]


def test_finds_a_verdict_that_the_logs_do_not_bear_out(tmp_path: Path) -> None:
    world = good_world()
    change_one_loss(world)
    found = judge(tmp_path, world)
    claimed = receipt_of(dataclasses.replace(found, continuity="bit-equal"))
    assert [words for words in disagreements(found, claimed) if "continuity" in words]


# --- A job that goes on with fewer ranks --------------------------------------------------------------------------


def test_recomputes_a_recovery_on_fewer_ranks(tmp_path: Path) -> None:
    found = judge(tmp_path, shrunk_world(), new_world=1)
    assert found.wrong == ()
    assert (found.continuity, found.steps_lost, found.steps_compared) == ("state-equal", 8, 8)
    claimed = receipt_of(found)
    claimed["verdict"]["steps_compared"] = 0
    assert disagreements(found, claimed) == [], "the server compares no losses of other world sizes"
    claimed["verdict"]["kind"] = "bit-equal"
    assert len(disagreements(found, claimed)) == 1


def lose_more_of_the_loss_than_dropout_does(world: World) -> None:
    change_step(world, 2, 0, 30, loss_hex=(4.5).hex())


def rewind_the_only_sampler(world: World) -> None:
    change_step(world, 2, 0, 26, span_start=0, span_stop=8)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lose_more_of_the_loss_than_dropout_does, "over all ranks"),
        (restart_the_schedule, "the scheduler was not restored"),
        (rewind_the_only_sampler, "the sampler was not restored"),
        (lose_a_digest_part, "the model was not restored"),
    ],
)
def test_finds_what_is_wrong_on_fewer_ranks(tmp_path: Path, plant: Callable[[World], None], words: str) -> None:
    world = shrunk_world()
    plant(world)
    found = judge(tmp_path, world, new_world=1)
    assert any(words in wrong for wrong in found.wrong), found.wrong
    assert found.continuity == "broken"


def test_finds_a_job_that_did_not_shrink_as_told(tmp_path: Path) -> None:
    words = "The ranks of the new generation are not those of the old one."
    assert words in judge(tmp_path / "unasked", shrunk_world()).wrong
    assert any("2 ranks, not 1" in wrong for wrong in judge(tmp_path / "as-before", good_world(), new_world=1).wrong)
