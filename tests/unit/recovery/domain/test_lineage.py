from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import CHECKPOINTS, fenced, generation, plan, prepared, rank, training
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.generations import GenerationView
from recovery.domain.lineage import (
    NoCheckpoint,
    ParentChoice,
    choose_parent,
    lineage_limits,
    reached_step,
    reference_generations,
)
from recovery.domain.plan import CheckpointRef
from recovery.domain.trust import Health, Integrity, Trust


def ref(number: int, step: int) -> CheckpointRef:
    return CheckpointRef(generation=number, step=step)


def parent_of(choice: ParentChoice | NoCheckpoint) -> CheckpointRef | None:
    assert isinstance(choice, ParentChoice), choice
    return choice.parent


def trained(number: int, *, parent: CheckpointRef | None = None, **changes: object) -> GenerationView:
    return fenced(generation(number, of=plan(number, parent=parent), **changes))


def test_chooses_the_newest_complete_checkpoint() -> None:
    assert parent_of(
        choose_parent(generations=[trained(1)], checkpoints=CHECKPOINTS, trust={}, reached_step=50)
    ) == ref(1, 40)


def test_starts_from_the_beginning_only_where_no_step_was_done() -> None:
    fresh = replace(trained(1), ranks=(rank(0), rank(1)))
    assert parent_of(choose_parent(generations=[fresh], checkpoints=[], trust={}, reached_step=None)) is None


def test_never_starts_silently_from_step_0() -> None:
    choice = choose_parent(generations=[trained(1)], checkpoints=[], trust={}, reached_step=1)
    assert isinstance(choice, NoCheckpoint)
    assert "step 1 was reached" in choice.reason


def test_prefers_a_saved_step_0_to_nothing() -> None:
    assert parent_of(
        choose_parent(generations=[trained(1)], checkpoints=[ref(1, 0)], trust={}, reached_step=None)
    ) == ref(1, 0)


def test_never_chooses_what_is_off_the_lineage() -> None:
    # Generation 2 went on from step 20, so generation 1's step 40 is a branch that was given up.
    lines = [trained(1), trained(2, parent=ref(1, 20))]
    assert parent_of(choose_parent(generations=lines, checkpoints=CHECKPOINTS, trust={}, reached_step=50)) == ref(1, 20)


def test_never_chooses_an_old_checkpoint_that_arrives_late() -> None:
    lines = [trained(1), trained(2, parent=ref(1, 40))]
    late = (*CHECKPOINTS, ref(1, 60))
    assert parent_of(choose_parent(generations=lines, checkpoints=late, trust={}, reached_step=70)) == ref(1, 40)


def test_never_chooses_what_a_broken_generation_saved() -> None:
    lines = [trained(1), trained(2, parent=ref(1, 40), broken_continuity=True)]
    found = (*CHECKPOINTS, ref(2, 60))
    assert parent_of(choose_parent(generations=lines, checkpoints=found, trust={}, reached_step=50)) == ref(1, 40)


def test_never_chooses_what_descends_from_a_broken_generation() -> None:
    lines = [trained(1), trained(2, parent=ref(1, 40), broken_continuity=True), trained(3, parent=ref(2, 60))]
    found = (*CHECKPOINTS, ref(2, 60), ref(3, 80))
    assert parent_of(choose_parent(generations=lines, checkpoints=found, trust={}, reached_step=50)) == ref(1, 40)


def test_never_chooses_what_a_generation_saved_that_had_not_restored_its_checkpoint() -> None:
    # Nobody has judged it yet: its own digests are enough.
    made = plan(2, parent=ref(1, 40))
    forgot = replace(training(0, of=made), saved_digest={"optimizer": "a"}, live_digest={"optimizer": "b"})
    lines = [trained(1), fenced(generation(2, of=made, ranks=(forgot, training(1, of=made))))]
    found = (*CHECKPOINTS, ref(2, 60))
    assert parent_of(choose_parent(generations=lines, checkpoints=found, trust={}, reached_step=50)) == ref(1, 40)


def test_a_generation_that_never_trained_does_not_move_the_tip() -> None:
    lines = [trained(1), prepared(plan(2, parent=ref(1, 20)))]
    assert parent_of(choose_parent(generations=lines, checkpoints=CHECKPOINTS, trust={}, reached_step=50)) == ref(1, 40)


def test_rolls_back_further_than_the_given_step() -> None:
    choice = choose_parent(generations=[trained(1)], checkpoints=CHECKPOINTS, trust={}, reached_step=50, before_step=40)
    assert parent_of(choice) == ref(1, 20)


def test_rolling_back_never_ends_at_the_beginning_without_a_checkpoint() -> None:
    choice = choose_parent(
        generations=[trained(1)], checkpoints=[ref(1, 40)], trust={}, reached_step=None, before_step=40
    )
    assert isinstance(choice, NoCheckpoint)


def test_ignores_checkpoints_of_generations_that_are_unknown() -> None:
    assert parent_of(
        choose_parent(generations=[trained(1)], checkpoints=[*CHECKPOINTS, ref(9, 90)], trust={}, reached_step=50)
    ) == ref(1, 40)


def test_lineage_is_bounded_by_where_each_descendant_resumed() -> None:
    lines = [trained(1), trained(2, parent=ref(1, 20)), trained(3, parent=ref(2, 40))]
    assert lineage_limits(lines) == {3: None, 2: 40, 1: 20}


def test_reached_step_leaves_out_broken_and_later_generations() -> None:
    lines = [trained(1), trained(2, parent=ref(1, 40), broken_continuity=True), trained(3, parent=ref(1, 40))]
    lines[1] = replace(lines[1], ranks=tuple(replace(r, last_step=90) for r in lines[1].ranks))
    lines[2] = replace(lines[2], ranks=tuple(replace(r, last_step=70) for r in lines[2].ranks))
    assert reached_step(lines) == 70
    assert reached_step(lines, before=3) == 50
    assert reached_step([]) is None


def test_replay_is_compared_with_older_sound_generations_newest_first() -> None:
    lines = {number: trained(number) for number in (1, 2, 3, 4)}
    lines[2] = replace(lines[2], broken_continuity=True)
    assert reference_generations(lines, upto=4) == (3, 1)


@st.composite
def _histories(draw: st.DrawFn) -> tuple[list[GenerationView], list[CheckpointRef]]:
    lines: list[GenerationView] = []
    saved: list[CheckpointRef] = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        parent = draw(st.sampled_from(saved)) if saved and draw(st.booleans()) else None
        lines.append(trained(number, parent=parent, broken_continuity=draw(st.integers(0, 3)) == 0))
        start = parent.step if parent else 0
        saved += [ref(number, start + 10 * index) for index in range(1, draw(st.integers(0, 3)) + 1)]
    return lines, saved


@given(history=_histories(), before=st.none() | st.integers(0, 60))
def test_choice_always_descends_from_sound_generations_only(
    history: tuple[list[GenerationView], list[CheckpointRef]], before: int | None
) -> None:
    lines, saved = history
    choice = choose_parent(generations=lines, checkpoints=saved, trust={}, reached_step=50, before_step=before)
    if isinstance(choice, NoCheckpoint):
        return
    assert choice.parent in saved
    assert before is None or choice.parent.step < before
    by_number = {line.number: line for line in lines}
    link: CheckpointRef | None = choice.parent
    while link is not None:
        assert not by_number[link.generation].broken_continuity
        link = by_number[link.generation].plan.parent


# --- Trust ---

CLEAN = Trust(health=Health.CLEAN, health_reason="10 sane steps after it")


def lost_loss(number: int, step: int, *, parent: CheckpointRef | None = None) -> GenerationView:
    """A generation whose loss was not finite from a step on."""
    base = trained(number, parent=parent)
    return replace(base, ranks=(replace(base.ranks[0], nonfinite_since=step, nonfinite_count=3), *base.ranks[1:]))


def chosen(lines: list[GenerationView], trust: dict[CheckpointRef, Trust], **more: int) -> ParentChoice:
    choice = choose_parent(generations=lines, checkpoints=CHECKPOINTS, trust=trust, reached_step=50, **more)
    assert isinstance(choice, ParentChoice), choice
    return choice


def test_without_a_doubt_the_newest_is_chosen_though_an_older_one_is_known_to_be_clean() -> None:
    assert chosen([trained(1)], {ref(1, 20): CLEAN}).parent == ref(1, 40)


def test_once_the_loss_was_lost_the_newest_clean_one_is_preferred_and_the_reason_says_why() -> None:
    choice = chosen([lost_loss(1, 48)], {ref(1, 0): CLEAN, ref(1, 20): CLEAN})
    assert choice.parent == ref(1, 20)
    assert choice.reason == (
        "the newest clean checkpoint on the job's lineage (10 sane steps after it); preferred to step 40 of "
        "generation 1, of which nothing is known yet, since the loss of generation 1 was not finite from step 48 on"
    )


def test_once_continuity_broke_the_newest_clean_one_is_preferred() -> None:
    assert chosen([trained(1)], {ref(1, 0): CLEAN}, before_step=40).parent == ref(1, 0)


def test_in_doubt_without_a_clean_one_the_newest_is_taken_and_the_reason_says_so() -> None:
    choice = chosen([lost_loss(1, 48)], {})
    assert choice.parent == ref(1, 40)
    assert "none is known to be clean" in choice.reason


@pytest.mark.parametrize("bad", [Trust(health=Health.TAINTED), Trust(integrity=Integrity.DAMAGED)])
def test_never_chooses_a_tainted_or_damaged_one(bad: Trust) -> None:
    choice = chosen([trained(1)], {ref(1, 40): bad})
    assert choice.parent == ref(1, 20)
    assert "passing over step 40 of generation 1" in choice.reason
    nothing = choose_parent(
        generations=[trained(1)], checkpoints=CHECKPOINTS, trust=dict.fromkeys(CHECKPOINTS, bad), reached_step=50
    )
    assert isinstance(nothing, NoCheckpoint)
    assert "none of 3 checkpoints" in nothing.reason
