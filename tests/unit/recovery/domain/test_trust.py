from __future__ import annotations

import math
from dataclasses import replace

import pytest
from domain_scenes import DIGEST, fenced, generation, plan, training
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.generations import GenerationView
from recovery.domain.plan import CheckpointRef
from recovery.domain.trust import (
    UNKNOWN,
    Health,
    Integrity,
    Nonfinite,
    Trust,
    appraise,
    came_again,
    fold_loss,
    judge_sanity,
    risen,
)

REF = CheckpointRef(generation=1, step=40)


def child(number: int = 2, *, reached: int = 45, lost_at: int | None = None, count: int = 3) -> GenerationView:
    """A generation that loaded step 40 of generation 1."""
    made = plan(number, parent=REF)
    base = generation(number, of=made, ranks=tuple(training(rank, of=made, last_step=reached) for rank in range(2)))
    if lost_at is None:
        return base
    return replace(
        base, ranks=(replace(base.ranks[0], nonfinite_since=lost_at, nonfinite_count=count), *base.ranks[1:])
    )


def trust_after(*generations: GenerationView, known: Trust = UNKNOWN) -> Trust:
    return appraise({REF: known}, [fenced(generation(1)), *generations])[REF]


@pytest.mark.parametrize("loss_lost_at", [41, 43, 50])
def test_a_loss_that_is_lost_within_ten_steps_of_the_load_taints(loss_lost_at: int) -> None:
    found = trust_after(child(reached=60, lost_at=loss_lost_at))
    assert found.health is Health.TAINTED
    assert f"{loss_lost_at - 40} steps later" in found.health_reason
    assert not found.usable


def test_a_loss_that_is_lost_later_does_not_taint_what_was_loaded() -> None:
    assert trust_after(child(reached=60, lost_at=51)).health is Health.RESUMED_FROM


def test_taint_outweighs_that_it_was_clean_and_never_goes_away() -> None:
    tainted = trust_after(child(reached=60, lost_at=43), known=Trust(health=Health.CLEAN))
    assert tainted.health is Health.TAINTED
    assert trust_after(child(reached=90), known=tainted).health is Health.TAINTED


def test_broken_continuity_taints_what_was_loaded_and_what_was_saved_after_it() -> None:
    broken = replace(child(), broken_continuity=True)
    saved = CheckpointRef(generation=2, step=44)
    found = appraise({REF: UNKNOWN, saved: UNKNOWN}, [fenced(generation(1)), broken])
    assert [found[REF].health, found[saved].health] == [Health.TAINTED, Health.TAINTED]


def test_what_was_saved_after_the_loss_was_lost_is_tainted_and_what_was_saved_before_is_not() -> None:
    writer = child(reached=60, lost_at=55)
    refs = {CheckpointRef(generation=2, step=step): UNKNOWN for step in (50, 55, 60)}
    found = appraise(refs, [fenced(generation(1)), writer])
    assert [trust.health for trust in found.values()] == [Health.UNKNOWN, Health.TAINTED, Health.TAINTED]


def test_one_bad_loss_of_a_generation_that_trains_on_taints_nothing() -> None:
    assert trust_after(child(lost_at=43, count=1)).health is Health.UNKNOWN


def test_one_bad_loss_of_a_generation_that_ended_with_it_taints() -> None:
    assert trust_after(fenced(child(lost_at=43, count=1))).health is Health.TAINTED


def test_going_on_for_ten_steps_on_every_rank_proves_a_checkpoint() -> None:
    assert trust_after(child(reached=50)).health is Health.RESUMED_FROM
    assert trust_after(child(reached=49)).health is Health.UNKNOWN
    behind = child(reached=50)
    behind = replace(behind, ranks=(behind.ranks[0], replace(behind.ranks[1], last_step=49)))
    assert trust_after(behind).health is Health.UNKNOWN


def test_an_absolved_checkpoint_is_judged_by_later_generations_only() -> None:
    known = Trust(absolved_through=2)
    assert trust_after(child(2, lost_at=43), known=known).health is Health.UNKNOWN
    assert trust_after(child(2, lost_at=43), child(3, lost_at=43), known=known).health is Health.TAINTED


def test_a_load_with_equal_digests_on_every_rank_is_a_test_of_the_files() -> None:
    made = child()
    whole = replace(made, ranks=tuple(replace(r, saved_digest=DIGEST, live_digest=DIGEST) for r in made.ranks))
    assert trust_after(whole, known=Trust(integrity=Integrity.REHASHED)).integrity is Integrity.TEST_LOADED
    assert trust_after(whole, known=Trust(integrity=Integrity.DAMAGED)).integrity is Integrity.DAMAGED
    half = replace(whole, ranks=(whole.ranks[0], made.ranks[1]))
    assert trust_after(half).integrity is Integrity.COMPLETE


@given(st.lists(st.sampled_from(Integrity), min_size=1, max_size=6))
def test_integrity_rises_or_ends_in_damage_whatever_the_order(words: list[Integrity]) -> None:
    found = Integrity.COMPLETE
    for word in words:
        found = risen(found, word)
    order = [Integrity.COMPLETE, Integrity.REHASHED, Integrity.TEST_LOADED, Integrity.DAMAGED]
    assert found is max([Integrity.COMPLETE, *words], key=order.index)


# --- Sane steps after a save ---


def losses(last: int, *, first: int = 21, ranks: int = 2, **odd: float | None) -> dict[tuple[int, int], float | None]:
    made: dict[tuple[int, int], float | None] = {
        (rank, step): 2.0 for rank in range(ranks) for step in range(first, last + 1)
    }
    made.update({(0, int(name.removeprefix("at_"))): loss for name, loss in odd.items()})
    return made


def test_ten_finite_losses_within_the_band_are_sane() -> None:
    assert judge_sanity(40, losses=losses(50), world_size=2).sane is True
    assert judge_sanity(40, losses=losses(50, at_45=3.9), world_size=2).sane is True


def test_nothing_is_said_before_every_rank_has_made_them() -> None:
    assert judge_sanity(40, losses=losses(49), world_size=2).sane is None
    assert judge_sanity(40, losses=losses(50, ranks=1), world_size=2).sane is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, 4.5])
def test_one_loss_that_is_not_finite_or_doubled_is_not_sane(loss: float) -> None:
    found = judge_sanity(40, losses=losses(50, at_47=loss), world_size=2)
    assert found.sane is False
    assert "step 47" in found.reason


def test_losses_that_nobody_reports_prove_nothing() -> None:
    silent: dict[tuple[int, int], float | None] = dict.fromkeys(losses(50))
    assert judge_sanity(40, losses=silent, world_size=2).sane is False
    only_rank_0 = {key: (2.0 if key[0] == 0 else None) for key in silent}
    assert judge_sanity(40, losses=only_rank_0, world_size=2).sane is True


def test_the_first_save_has_no_losses_before_it_to_be_held_against() -> None:
    assert judge_sanity(0, losses=losses(10, first=1), world_size=2).sane is True


# --- A loss that is not finite ---


def folded(*reports: float | None) -> Nonfinite:
    found = Nonfinite()
    for step, loss in enumerate(reports, start=1):
        found = fold_loss(found, step=step, loss=loss, enough=3)
    return found


def test_a_run_of_bad_losses_is_counted_from_its_first_step() -> None:
    assert folded(1.0, math.nan, math.inf, math.nan) == Nonfinite(since=2, count=3)


def test_a_good_loss_ends_a_run_that_is_short_and_not_one_that_is_long_enough() -> None:
    assert folded(math.nan, math.nan, 1.0) == Nonfinite()
    assert folded(math.nan, math.nan, math.nan, 1.0) == Nonfinite(since=1, count=3)


def test_steps_without_a_loss_neither_count_nor_end_a_run() -> None:
    assert folded(math.nan, None, None, math.nan) == Nonfinite(since=1, count=2)


def test_a_loss_that_is_lost_again_no_later_than_before_came_again() -> None:
    first = fenced(child(2, lost_at=53))
    assert came_again(first, [first]) == ""
    for step, again in ((43, True), (53, True), (63, True), (64, False)):
        second = child(3, lost_at=step)
        assert bool(came_again(second, [first, second])) is again
