from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from domain_scenes import DIGEST, PARENT, curve, record, resume
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.continuity import Verdict, VerdictKind, judge
from recovery.domain.loss_band import ORDER_OF_SUMS, noise_band
from recovery.domain.replay import relative_difference
from recovery.domain.step_records import StateProbe, StepRecord

Records = dict[tuple[int, int], StepRecord]


def judged(**changes: object) -> Verdict:
    """A sound resume from step 40 after step 50 was reached, replayed up to 51, unless changes say otherwise."""
    sound = {
        "parent": PARENT,
        "world_size": 2,
        "same_topology": True,
        "reached_step": 50,
        "resumes": [resume(0), resume(1)],
        "reference": curve(40, 50),
        "replayed": curve(41, 51, generation=2),
    }
    return judge(**{**sound, **changes})  # type: ignore[arg-type]


def bent(change: Callable[[StepRecord], StepRecord], *, first: int = 41, last: int = 51) -> Records:
    """The sound replay with each record from `first` on changed."""
    return {
        key: change(found) if found.step >= first else found for key, found in curve(41, last, generation=2).items()
    }


def broken(verdict: Verdict) -> str:
    assert verdict.kind is VerdictKind.BROKEN, verdict
    assert not verdict.proven
    return " ".join(verdict.findings)


# --- Sound resumes ---


def test_bit_equal_when_state_and_every_replayed_loss_are_equal() -> None:
    verdict = judged()
    assert verdict.kind is VerdictKind.BIT_EQUAL
    assert verdict.proven
    assert verdict.caught_up
    assert (verdict.steps_compared, verdict.steps_lost) == (10, 10)
    assert verdict.digest_parts == tuple(sorted(DIGEST))
    assert verdict.max_relative_difference == 0.0


def test_state_equal_when_digests_agree_before_any_step_was_replayed() -> None:
    verdict = judged(replayed={})
    assert verdict.kind is VerdictKind.STATE_EQUAL
    assert (verdict.steps_compared, verdict.steps_lost, verdict.caught_up) == (0, 10, False)


@pytest.mark.parametrize("change", [{"deterministic": False}])
def test_bit_equal_needs_the_script_to_promise_determinism_on_every_rank(change: dict[str, bool]) -> None:
    assert judged(resumes=[resume(0), resume(1, **change)]).kind is VerdictKind.STATE_EQUAL


def test_bit_equal_needs_the_same_topology() -> None:
    assert judged(same_topology=False).kind is VerdictKind.STATE_EQUAL


def test_bit_equal_needs_a_word_from_every_rank() -> None:
    assert judged(resumes=[resume(0)]).kind is VerdictKind.INCONCLUSIVE
    assert judged(resumes=[resume(0), resume(0)]).kind is VerdictKind.INCONCLUSIVE
    first_launch = judged(parent=None, resumes=[resume(0, 0)], reference=curve(1, 50), replayed=curve(1, 51))
    assert first_launch.kind is VerdictKind.INCONCLUSIVE


def test_small_differences_are_within_the_band_where_nothing_exact_was_promised() -> None:
    replayed = bent(lambda r: replace(r, loss=r.loss * (1 + ORDER_OF_SUMS / 2) if r.loss else None))
    verdict = judged(same_topology=False, replayed=replayed)
    assert verdict.kind is VerdictKind.STATE_EQUAL
    assert 0 < verdict.max_relative_difference < ORDER_OF_SUMS


def test_inconclusive_when_no_digests_were_reported() -> None:
    silent = [resume(rank, saved_digest={}, live_digest={}, deterministic=False) for rank in (0, 1)]
    verdict = judged(resumes=silent)
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    assert not verdict.proven
    assert "neither proven nor disproven" in verdict.findings[-1]


def test_restart_from_the_beginning_is_bit_equal_without_saved_digests() -> None:
    fresh = [resume(rank, 0, saved_digest={}, live_digest=DIGEST) for rank in (0, 1)]
    verdict = judged(parent=None, resumes=fresh, reference=curve(1, 50), replayed=curve(1, 51, generation=2))
    assert verdict.kind is VerdictKind.BIT_EQUAL
    assert verdict.steps_lost == 50


# --- Steps compared, lost, caught up ---


def test_steps_compared_counts_only_steps_that_every_rank_has_in_both_generations() -> None:
    replayed = curve(41, 47, generation=2)
    del replayed[1, 47]
    reference = curve(40, 50)
    del reference[0, 43]
    assert judged(replayed=replayed, reference=reference).steps_compared == 5


def test_steps_lost_is_what_was_done_after_the_parent() -> None:
    assert judged(reached_step=40).steps_lost == 0
    assert judged(reached_step=57).steps_lost == 17
    assert judged(reached_step=None).steps_lost == 0
    assert judged(reached_step=12).steps_lost == 0


def test_caught_up_once_every_rank_is_beyond_the_old_last_step() -> None:
    replayed = curve(41, 51, generation=2)
    del replayed[1, 51]
    assert not judged(replayed=replayed).caught_up
    assert judged().caught_up


# --- Digests ---


@pytest.mark.parametrize("part", sorted(DIGEST))
def test_case_C26_names_the_part_that_was_not_restored(part: str) -> None:
    forgot = resume(1, live_digest={**DIGEST, part: "fresh"})
    verdict = judged(resumes=[resume(0), forgot])
    assert f"Rank 1: the {part} was not restored" in broken(verdict)
    assert part not in verdict.digest_parts


def test_a_part_that_is_missing_in_the_resumed_run_is_broken() -> None:
    live = {part: value for part, value in DIGEST.items() if part != "scheduler"}
    assert "the scheduler is in the checkpoint but not in the resumed run" in broken(
        judged(resumes=[resume(0), resume(1, live_digest=live)])
    )


def test_a_part_that_the_checkpoint_lacks_is_broken() -> None:
    saved = {part: value for part, value in DIGEST.items() if part != "rng"}
    assert "the rng is in the resumed run but not in the checkpoint" in broken(
        judged(resumes=[resume(0, saved_digest=saved), resume(1)])
    )


def test_digest_is_judged_before_the_first_step() -> None:
    forgot = resume(0, live_digest={**DIGEST, "optimizer": "fresh"})
    assert "optimizer" in broken(judged(resumes=[forgot], replayed={}))


def test_case_R17_ranks_that_resume_at_different_steps_are_broken_within_the_first_step() -> None:
    verdict = judged(resumes=[resume(0), resume(1, 0)], replayed={})
    assert "Rank 1 resumed at step 0; the plan says 40: the rank is at another step." in broken(verdict)


@pytest.mark.parametrize("off", [1, -1])
def test_step_counter_that_is_off_by_one_is_named_by_the_first_rank_that_reports(off: int) -> None:
    assert "its step counter is off by one" in broken(judged(resumes=[resume(1, 40 + off)], replayed={}))


# --- Losses ---


@pytest.mark.parametrize("factor", [1.2, 0.8])
@pytest.mark.parametrize("same_topology", [True, False])
def test_case_R34_a_jump_of_the_loss_is_broken_in_both_directions(factor: float, same_topology: bool) -> None:
    replayed = bent(lambda r: replace(r, loss=r.loss * factor if r.loss else None))
    told = broken(judged(replayed=replayed, same_topology=same_topology))
    assert "Step 41, rank 0: loss" in told


@pytest.mark.parametrize("factor", [1.2, 0.8])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.3])
def test_case_R34_a_jump_of_the_loss_is_broken_however_noisy_the_old_curve_was(factor: float, noise: float) -> None:
    rng = random.Random(1)
    old = {
        key: replace(found, loss=(found.loss or 0.0) * (1 + rng.gauss(0.0, noise)))
        for key, found in curve(1, 50).items()
    }
    again = {key: replace(old[key], generation=2, loss=(old[key].loss or 0.0) * factor) for key in old if key[1] > 40}
    promising_nothing = [resume(rank, deterministic=False) for rank in (0, 1)]
    told = broken(judged(resumes=promising_nothing, reference=old, replayed=again))
    assert "Step 41, rank 0: loss" in told


def test_noise_of_the_old_curve_is_the_measure_where_nothing_was_promised() -> None:
    rng = random.Random(1)

    def noisy(records: Records) -> Records:
        return {
            key: replace(found, loss=3.0 * (1 + rng.gauss(0.0, 1e-3)), generation=found.generation)
            for key, found in records.items()
        }

    old, again = noisy(curve(1, 50)), noisy(curve(41, 51, generation=2))
    verdict = judged(resumes=[resume(rank, deterministic=False) for rank in (0, 1)], reference=old, replayed=again)
    assert verdict.kind is VerdictKind.STATE_EQUAL
    assert 1e-3 < verdict.max_relative_difference < verdict.loss_band < 0.02
    assert verdict.loss_band == noise_band(old)
    assert broken(judged(reference=old, replayed=again)), "the same replay of a script that promised equal bits"


def test_case_C26_forgotten_optimizer_without_digests_is_seen_from_the_second_step_on() -> None:
    # The first replayed loss is equal; the drift is 0.1 % at the tenth step.
    silent = [resume(rank, saved_digest={}, live_digest={}) for rank in (0, 1)]
    replayed = bent(lambda r: replace(r, loss=r.loss * (1 + 1e-4 * (r.step - 41)) if r.loss else None))
    assert "Step 42, rank 0" in broken(judged(resumes=silent, replayed=replayed))


def test_last_bit_counts_where_bit_equality_was_promised() -> None:
    replayed = bent(lambda r: replace(r, loss=math.nextafter(r.loss or 0.0, 9.0)), first=50)
    assert "a bit-equal replay was promised" in broken(judged(replayed=replayed))


@pytest.mark.parametrize(("sign", "kind"), [(0.99, VerdictKind.STATE_EQUAL), (1.01, VerdictKind.BROKEN)])
@pytest.mark.parametrize("direction", [1, -1])
def test_band_is_two_sided_and_sharp(sign: float, kind: VerdictKind, direction: int) -> None:
    factor = 1 + direction * sign * ORDER_OF_SUMS
    replayed = bent(lambda r: replace(r, loss=r.loss * factor if r.loss else None))
    assert judged(replayed=replayed, same_topology=False).kind is kind


def test_nan_after_a_finite_loss_is_broken() -> None:
    replayed = bent(lambda r: replace(r, loss=math.nan), first=45)
    assert "loss nan" in broken(judged(replayed=replayed))
    assert broken(judged(replayed=replayed, same_topology=False))


def test_nan_in_both_generations_is_the_same_curve() -> None:
    turned = {key: replace(found, loss=math.nan) for key, found in curve(40, 50).items()}
    assert judged(reference=turned, replayed=bent(lambda r: replace(r, loss=math.nan))).kind is VerdictKind.BIT_EQUAL


def test_unreported_losses_are_not_compared() -> None:
    verdict = judged(replayed=bent(lambda r: replace(r, loss=None)))
    assert (verdict.kind, verdict.steps_compared) == (VerdictKind.STATE_EQUAL, 0)


def test_frozen_weights_are_broken_though_each_loss_is_within_the_band() -> None:
    flat = {key: replace(found, loss=2.0 * (1 + 1e-7 * found.step)) for key, found in curve(40, 50).items()}
    frozen = bent(lambda r: replace(r, loss=2.0))
    assert "the weights are not being trained" in broken(judged(reference=flat, replayed=frozen, same_topology=False))


def test_a_loss_that_was_constant_before_the_fault_may_stay_constant() -> None:
    flat = {key: replace(found, loss=0.0) for key, found in curve(40, 50).items()}
    assert judged(reference=flat, replayed=bent(lambda r: replace(r, loss=0.0))).kind is VerdictKind.BIT_EQUAL


# --- Scheduler and sampler ---


def test_case_C26_a_reset_learning_rate_is_broken_and_named() -> None:
    told = broken(judged(replayed=bent(lambda r: replace(r, learning_rate=1e-3))))
    assert "the scheduler was not restored" in told


@pytest.mark.parametrize("offset", [8, -8])
def test_case_C26_a_sampler_that_stands_elsewhere_is_broken_and_named(offset: int) -> None:
    replayed = bent(
        lambda r: replace(r, span_start=(r.span_start or 0) + offset, span_stop=(r.span_stop or 0) + offset)
    )
    assert "the sampler was not restored to its position" in broken(judged(replayed=replayed))


@pytest.mark.parametrize(("offset", "word"), [(8, "skipped"), (-8, "repeated")])
def test_samples_skipped_or_repeated_beyond_the_replay_are_broken(offset: int, word: str) -> None:
    replayed = bent(
        lambda r: replace(r, span_start=(r.span_start or 0) + offset, span_stop=(r.span_stop or 0) + offset),
        first=51,
    )
    assert f"{word} samples between step 50 and 51" in broken(judged(replayed=replayed))


@pytest.mark.parametrize(("start", "word"), [(0, "repeated"), (400, "skipped")])
def test_first_new_span_must_follow_the_parent_though_nothing_is_replayed(start: int, word: str) -> None:
    # The fault struck right after the save: no step is lost, so no pair of losses can tell.
    replayed = {
        (rank, 41): record(rank, 41, 1.0, generation=2, span_start=start, span_stop=start + 8) for rank in (0, 1)
    }
    verdict = judged(reached_step=40, reference=curve(40, 40), replayed=replayed)
    assert f"Rank 0 {word} samples between step 40 and 41" in broken(verdict)


def test_next_epoch_begins_at_its_first_sample() -> None:
    def epoch(found: StepRecord, start: int, number: int = 1) -> StepRecord:
        return replace(found, epoch=number, span_start=start, span_stop=start + 8)

    last = curve(41, 51, generation=2)
    sound = {**last, **{(rank, 51): epoch(last[rank, 51], 0) for rank in (0, 1)}}
    assert judged(replayed=sound).kind is VerdictKind.BIT_EQUAL
    skipping = {**last, **{(rank, 51): epoch(last[rank, 51], 16) for rank in (0, 1)}}
    assert "skipped" in broken(judged(replayed=skipping))
    back = {key: epoch(found, found.span_start or 0, 2) for key, found in curve(40, 51).items()}
    again = {**back, **{(rank, 51): epoch(back[rank, 51], 0, 1) for rank in (0, 1)}}
    assert "repeated" in broken(judged(reference=back, replayed={k: v for k, v in again.items() if k[1] > 40}))


def test_scripts_that_report_no_spans_are_not_blamed() -> None:
    blind = {key: replace(found, span_start=None, span_stop=None) for key, found in curve(40, 50).items()}
    replayed = bent(lambda r: replace(r, span_start=None, span_stop=None))
    assert judged(reference=blind, replayed=replayed).kind is VerdictKind.BIT_EQUAL


def test_remark_about_the_generators_breaks_nothing() -> None:
    def look(found: StepRecord, rng: str) -> StepRecord:
        return replace(found, probe=StateProbe(digests={"rng": rng}))

    old = {key: look(found, "a") for key, found in curve(40, 50).items()}
    verdict = judged(reference=old, replayed=bent(lambda found: look(found, "b")))
    assert verdict.kind is VerdictKind.BIT_EQUAL
    assert "random generators" in verdict.findings[-1]


# --- Numbers ---


def test_relative_difference_of_what_is_not_finite() -> None:
    assert relative_difference(math.nan, math.nan) == 0.0
    assert relative_difference(math.inf, math.inf) == 0.0
    assert relative_difference(1.0, math.nan) == math.inf
    assert relative_difference(math.nan, 1.0) == math.inf
    assert relative_difference(math.inf, -math.inf) == math.inf


@given(old=st.floats(allow_nan=True), new=st.floats(allow_nan=True))
def test_relative_difference_is_never_negative_or_nan(old: float, new: float) -> None:
    assert relative_difference(old, new) >= 0.0


@given(factor=st.floats(0.5, 1.5), step=st.integers(41, 50), rank=st.integers(0, 1))
def test_one_loss_outside_the_band_is_always_found(factor: float, step: int, rank: int) -> None:
    replayed = curve(41, 51, generation=2)
    old = replayed[rank, step].loss or 0.0
    replayed[rank, step] = replace(replayed[rank, step], loss=old * factor)
    verdict = judged(replayed=replayed, same_topology=False)
    outside = relative_difference(old, old * factor) > ORDER_OF_SUMS
    assert (verdict.kind is VerdictKind.BROKEN) == outside


@given(ranks=st.integers(1, 4), first=st.integers(0, 60), reached=st.integers(0, 80), done=st.integers(0, 90))
def test_arithmetic_holds_for_any_replay(ranks: int, first: int, reached: int, done: int) -> None:
    verdict = judged(
        parent=replace(PARENT, step=first),
        world_size=ranks,
        reached_step=reached,
        resumes=[resume(number, first) for number in range(ranks)],
        reference=curve(max(first, 1), max(reached, first), ranks=ranks),
        replayed=curve(first + 1, first + done, generation=2, ranks=ranks),
    )
    assert verdict.steps_lost == max(0, reached - first)
    assert verdict.steps_compared == min(done, verdict.steps_lost)
    assert verdict.caught_up == (done > verdict.steps_lost)
    assert verdict.proven
