"""The auditor must find each wrongness that a node which was frozen, cut off or powered off could bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo_check.auditor import Audit, FaultMark, Fence, audit, disagreements, read_stories
from demo_check.step_audit import Unharmed, audit_unharmed
from logged_worlds import FAULT, JOB, LAST, REACHED, SAVED, World, good_world, step_line, write_world

THAWED = FAULT + 60.0
FENCED = FAULT + 45.0
RELAUNCHED = 46.0 - 1.0
"""By how much later than in the good world generation 2 starts."""


def frozen_world() -> World:
    """Rank 1 is frozen after step 33; rank 0 is stopped at once; generation 2 starts behind the fence."""
    world = good_world()
    for rank in (0, 1):
        world[2, rank] = [line | {"at": line["at"] + RELAUNCHED} for line in world[2, rank]]
    return world


def judge_frozen(
    folder: Path,
    world: World,
    *,
    exits: Mapping[int, float] | None = None,
    thaws: Mapping[int, float] | None = None,
    fences: Sequence[Fence] = (Fence("gpu-01", "cgroup_empty", FAULT + 0.4), Fence("gpu-02", "lease_expired", FENCED)),
) -> Audit:
    write_world(folder, world)
    return audit(
        read_stories(folder, JOB),
        old=1,
        opened_at=FAULT + 12.0,
        exits={100: FAULT + 0.31, 101: THAWED + 0.5} if exits is None else exits,
        thaws={101: THAWED} if thaws is None else thaws,
        hit=1,
        mark=FaultMark.FREEZE,
        fences=fences,
    )


def test_recomputes_a_frozen_node_and_finds_nothing_wrong(tmp_path: Path) -> None:
    found = judge_frozen(tmp_path, frozen_world())
    assert found.wrong == ()
    assert (found.killed_rank, found.continuity, found.steps_lost) == (1, "bit-equal", REACHED - SAVED)
    assert found.detect_s == pytest.approx(12.0, abs=0.05)
    assert found.stop_s == pytest.approx(0.31, abs=0.05)
    assert found.overlap_margin_s == pytest.approx(45.69, abs=0.05)


def step_once_more_after_the_thaw(world: World) -> None:
    world[1, 1].append(step_line(REACHED + 1, THAWED + 0.2))


def save_after_the_thaw(world: World) -> None:
    world[1, 1].append({"kind": "saved", "step": 50, "at": THAWED + 0.2})


def step_beside_the_new_generation(world: World) -> None:
    world[1, 0].append(step_line(REACHED + 1, FAULT + 50.0))


def save_beside_the_new_generation(world: World) -> None:
    world[1, 0].append({"kind": "saved", "step": 50, "at": FAULT + 50.0})


def resume_from_what_was_saved_too_late(world: World) -> None:
    for rank in (0, 1):
        for line in world[1, rank]:
            if line["kind"] == "saved":
                line["at"] = FAULT + 50.0


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (step_once_more_after_the_thaw, "Rank 1 made step 34 after it was thawed"),
        (save_after_the_thaw, "Rank 1 saved step 50 after it was thawed"),
        (step_beside_the_new_generation, "Two generations at once: rank 0 of generation 1 made step 34"),
        (save_beside_the_new_generation, "Two generations at once: rank 0 of generation 1 saved step 50"),
        (resume_from_what_was_saved_too_late, "resumed at step 25, which was saved after its start"),
    ],
)
def test_finds_what_an_old_generation_does_too_late(tmp_path: Path, plant: Callable[[World], None], words: str) -> None:
    world = frozen_world()
    plant(world)
    found = judge_frozen(tmp_path, world)
    assert any(words in sentence for sentence in found.wrong), found.wrong


def test_finds_a_thawed_rank_that_lives_on(tmp_path: Path) -> None:
    found = judge_frozen(tmp_path, frozen_world(), exits={100: FAULT + 0.31, 101: THAWED + 6.0})
    assert found.wrong == ("Process 101 of rank 1 lived for 6.0 s after it was thawed.",)
    found = judge_frozen(tmp_path, frozen_world(), exits={100: FAULT + 0.31})
    assert any("a process of generation 1 outlived the stop: pid 101" in words for words in found.wrong)


def test_finds_a_fence_that_was_called_before_the_end_of_what_it_fenced(tmp_path: Path) -> None:
    early = (Fence("gpu-01", "cgroup_empty", FAULT - 1.0), Fence("gpu-02", "lease_expired", FAULT - 2.0))
    words = " ".join(judge_frozen(tmp_path, frozen_world(), fences=early).wrong)
    assert "gpu-01 was called fenced (cgroup_empty) 1.3 s before the last of rank 0 was over" in words
    assert "gpu-02 was called fenced (lease_expired) 2.0 s before the last of rank 1 was over" in words


def test_a_rank_that_was_never_frozen_is_an_overlap(tmp_path: Path) -> None:
    found = judge_frozen(tmp_path, frozen_world(), thaws={})
    assert any("The generations overlapped" in words for words in found.wrong)
    assert any("gpu-02 was called fenced" in words for words in found.wrong)


def test_the_stop_of_a_silent_node_is_no_number_to_agree_on_but_the_others_are(tmp_path: Path) -> None:
    found = judge_frozen(tmp_path, frozen_world())
    claimed: dict[str, Any] = {
        "verdict": {
            "kind": found.continuity,
            "steps_lost": found.steps_lost,
            "steps_compared": found.steps_compared,
        },
        "generation": found.generation,
        "reached_step": found.reached_step,
        "parent": {"generation": 1, "step": found.parent_step},
        "detect_s": found.detect_s + 2.0,
        "stop_s": 45.0,
        "first_step_s": found.first_step_s,
        "caught_up_s": found.caught_up_s,
    }
    assert disagreements(found, claimed, of_silence=True) == []
    assert len(disagreements(found, claimed)) == 2
    assert len(disagreements(replace(found, detect_s=found.detect_s - 1.0), claimed, of_silence=True)) == 1


def test_of_its_last_moments_a_broken_node_may_have_told_nobody_but_of_nothing_else(tmp_path: Path) -> None:
    world = frozen_world()
    for step in range(REACHED + 1, REACHED + 41):  # rank 1 alone was ahead, for its last 2.4 s
        world[1, 1].append(step_line(step, FAULT - 3.0 + (step - REACHED) * 0.06))
    found = judge_frozen(tmp_path, world)
    assert (found.reached_step, found.heard_step) == (REACHED + 40, REACHED + 16)

    def claims(unheard: int, *, uncompared: int = 0) -> list[str]:
        verdict = {
            "kind": found.continuity,
            "steps_lost": found.steps_lost - unheard,
            "steps_compared": min(found.steps_compared, found.steps_lost - unheard) - uncompared,
        }
        reached = found.reached_step - unheard
        times = {name: getattr(found, name) for name in ("detect_s", "stop_s", "first_step_s", "caught_up_s")}
        parent = {"generation": 1, "step": found.parent_step}
        receipt = {"verdict": verdict, "generation": 2, "reached_step": reached, "parent": parent, **times}
        return [words for words in disagreements(found, receipt, of_silence=True) if "caught_up_s" not in words]

    assert claims(0) == claims(24) == []
    silent = found.steps_compared - found.heard_compared
    assert silent >= 3
    assert claims(0, uncompared=silent) == []
    assert any("steps_compared" in words for words in claims(0, uncompared=silent + 1))
    assert any("reached_step" in words for words in claims(25))


# --- Jobs that should not notice ------------------------------------------------------------------------------------

Rows = dict[int, list[dict[str, Any]]]
UNTIL = 1004.0 + RELAUNCHED


def quiet_world() -> World:
    """Generation 2 of the good world alone, its ranks never disturbed."""
    return {(2, rank): lines for (generation, rank), lines in frozen_world().items() if generation == 2}


def rows_of(world: World) -> Rows:
    return {
        rank: [
            {"step": line["step"], "loss": float.fromhex(line["loss_hex"])} for line in lines if line["kind"] == "step"
        ]
        for (_, rank), lines in world.items()
    }


def judge_quiet(
    folder: Path,
    world: World,
    *,
    rows: Rows | None = None,
    checkpoints: Sequence[tuple[int, int]] = (),
    pids: Mapping[int, int] | None = None,
    until: float = UNTIL,
) -> Unharmed:
    write_world(folder, world)
    return audit_unharmed(
        read_stories(folder, JOB),
        generation=2,
        pids=pids or {0: 200, 1: 201},
        since=1002.5 + RELAUNCHED,
        until=until,
        rows=rows_of(world) if rows is None else rows,
        checkpoints=[{"generation": generation, "step": step} for generation, step in checkpoints],
        stall_limit_s=2.0,
    )


def test_finds_nothing_wrong_with_a_job_that_trained_on(tmp_path: Path) -> None:
    found = judge_quiet(tmp_path, quiet_world())
    assert found.wrong == ()
    assert (found.steps_checked, found.steps_lost, found.events_lost) == (2 * (LAST - SAVED), 0, 0)
    assert found.largest_step_gap_s == pytest.approx(UNTIL - (1002.75 + RELAUNCHED), abs=0.01)


def test_finds_a_step_that_the_server_lost_has_twice_or_has_wrong(tmp_path: Path) -> None:
    world = quiet_world()
    lost, twice, wrong, invented = (rows_of(world) for _ in range(4))
    del lost[1][3]
    twice[0].append(twice[0][2])
    wrong[0][4]["loss"] = 1.0
    invented[1].append({"step": LAST + 1, "loss": 1.0})
    for rows, words in (
        (lost, "The server has step 29 of rank 1 0 times, not once."),
        (twice, "The server has step 28 of rank 0 2 times, not once."),
        (wrong, "The server has another loss for step 30 of rank 0 than the rank."),
        (invented, "The server has step 41 of rank 1, which it never made."),
    ):
        found = judge_quiet(tmp_path, world, rows=rows)
        assert (found.wrong, found.events_lost) == ((words,), 1)


def test_a_step_that_was_made_a_moment_ago_may_be_on_its_way(tmp_path: Path) -> None:
    rows = rows_of(quiet_world())
    last = rows[0].pop()
    made_at = 1002.0 + (last["step"] - SAVED) * 0.05 + RELAUNCHED
    assert judge_quiet(tmp_path, quiet_world(), rows=rows, until=made_at - 0.01).wrong == ()
    assert judge_quiet(tmp_path, quiet_world(), rows=rows, until=made_at + 0.01).wrong != ()


def test_finds_a_step_that_no_rank_made(tmp_path: Path) -> None:
    world = quiet_world()
    world[2, 0] = [line for line in world[2, 0] if line.get("step") != 30]
    found = judge_quiet(tmp_path, world)
    assert found.steps_lost == 1
    assert "Rank 0 never logged step 30 and 0 others." in found.wrong


def test_finds_a_checkpoint_that_the_server_does_not_know(tmp_path: Path) -> None:
    world = quiet_world()
    world[2, 0].append({"kind": "saved", "step": 40, "at": 1002.8 + RELAUNCHED})
    assert judge_quiet(tmp_path, world, checkpoints=[(2, 40)]).wrong == ()
    found = judge_quiet(tmp_path, world, checkpoints=[(1, 40)])
    assert (found.events_lost, found.wrong) == (1, ("The server does not know of the checkpoint of step 40.",))


def test_finds_a_rank_that_was_started_again_a_relaunch_and_a_stall(tmp_path: Path) -> None:
    assert judge_quiet(tmp_path, quiet_world(), pids={0: 199, 1: 201}).wrong == (
        "Rank 0 was process 199 and is 200: it was started again.",
    )
    relaunched = quiet_world() | {(3, 0): quiet_world()[2, 0][:1]}
    relaunched[3, 0][0] = relaunched[3, 0][0] | {"generation": 3}
    assert "The job was relaunched" in judge_quiet(tmp_path, relaunched).wrong[0]
    stalled = judge_quiet(tmp_path / "stalled", quiet_world(), until=UNTIL + 1.0)
    assert [words for words in stalled.wrong if "made no step for 2.2 s" in words]


def test_refuses_to_judge_a_generation_without_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no logs of all ranks"):
        judge_quiet(tmp_path, {(2, 0): quiet_world()[2, 0]})
