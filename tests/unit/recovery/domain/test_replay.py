"""What differs between a step and its replay is said in words that name the culprit, the most telling first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from domain_scenes import curve

from recovery.domain.replay import Comparison, compare_steps
from recovery.domain.step_records import StateProbe, StepRecord

BAND = 0.1
Records = dict[tuple[int, int], StepRecord]


def probed(records: Records, *, steps: tuple[int, ...] = (41, 42), **changes: Any) -> Records:
    """The records with a probe after each of some steps: everything moves, unless changes say otherwise."""
    return {
        key: replace(
            found,
            probe=StateProbe(
                digests={part: f"{part} at {found.step}" for part in ("model", "optimizer", "sampler", "rng")}
                | changes.get("digests", {}),
                unmoved=changes.get("unmoved", ()),
            ),
        )
        if found.step in steps
        else found
        for key, found in records.items()
    }


def compared(reference: Records, replayed: Records, *, band: float = 0.0) -> Comparison:
    return compare_steps(first=41, last=50, world_size=2, band=band, reference=reference, replayed=replayed)


def bent(change: Callable[[StepRecord], StepRecord], *, rank: int | None = None) -> Records:
    again = curve(41, 51, generation=2)
    return {key: change(found) if rank in (None, found.rank) else found for key, found in again.items()}


def first(comparison: Comparison) -> str:
    return comparison.findings[0] if comparison.findings else ""


# --- Samples ---


def with_indices(records: Records, offset: int = 0) -> Records:
    return {key: replace(found, indices_digest=f"{found.step + offset:x}") for key, found in records.items()}


@pytest.mark.parametrize("band", [0.0, BAND])
def test_other_samples_under_the_same_span_name_the_loader(band: float) -> None:
    comparison = compared(with_indices(curve(1, 50)), with_indices(curve(41, 51), 1), band=band)
    assert "the loader skips or repeats samples that its counter does not know of" in first(comparison)
    assert len(comparison.findings) == 4, "a few of the twenty steps are enough"


def test_other_samples_are_named_before_the_losses_that_they_cause() -> None:
    replayed = with_indices(bent(lambda found: replace(found, loss=9.0)), 1)
    comparison = compared(with_indices(curve(1, 50)), replayed)
    assert "the loader skips" in first(comparison) and "loss 9.0" in comparison.findings[-1]


def test_ranks_that_say_nothing_of_their_samples_are_not_blamed() -> None:
    assert compared(with_indices(curve(1, 50)), curve(41, 51)).findings == ()
    assert compared(with_indices(curve(1, 50)), with_indices(curve(41, 51))).findings == ()


def test_loader_that_began_an_epoch_anew_is_named() -> None:
    replayed = bent(lambda r: replace(r, span_start=8 * (r.step - 41), span_stop=8 * (r.step - 40)))
    told = first(compared(curve(41, 50), replayed, band=BAND))
    assert "the sampler was not restored to its position; the loader began an epoch anew" in told


# --- Which step it is ---


def as_step(record: StepRecord, off: int) -> StepRecord:
    return replace(curve(record.step + off, record.step + off)[record.rank, record.step + off], step=record.step)


@pytest.mark.parametrize("band", [0.0, BAND])
@pytest.mark.parametrize(("off", "words"), [(1, "one step ahead"), (-1, "one step behind"), (-10, "10 steps behind")])
def test_state_of_another_step_is_told_from_samples_and_learning_rate(off: int, words: str, band: float) -> None:
    told = first(compared(curve(1, 50), bent(lambda r: as_step(r, off)), band=band))
    assert f"the samples and the learning rate of step {41 + off}: the rank is {words} of its step counter" in told


def test_one_rank_at_another_step_is_the_one_that_is_named() -> None:
    comparison = compared(curve(1, 50), bent(lambda r: as_step(r, -10), rank=1), band=BAND)
    assert all("rank 1" in finding for finding in comparison.findings)
    assert "the rank is 10 steps behind" in first(comparison)


# --- Weights do change ---


@pytest.mark.parametrize("band", [0.0, BAND])
def test_weights_that_a_step_no_longer_changes_are_frozen(band: float) -> None:
    replayed = probed(curve(41, 41), unmoved=("model", "optimizer"))
    told = first(compared(probed(curve(1, 50)), replayed, band=band))
    assert "Rank 0: step 41 did not change the weights, before the fault each step did: the weights are frozen" in told


@pytest.mark.parametrize("band", [0.0, BAND])
def test_tracked_optimizer_that_no_longer_moves_was_not_the_one_that_steps(band: float) -> None:
    told = first(compared(probed(curve(1, 50)), probed(curve(41, 41), unmoved=("optimizer",)), band=band))
    assert "the model is stepped by another optimizer, which was not restored" in told


def test_weights_that_stood_still_before_the_fault_may_stand_still() -> None:
    still = {"unmoved": ("model", "optimizer")}
    assert compared(probed(curve(1, 50), **still), probed(curve(41, 51), **still)).findings == ()


def test_frozen_weights_are_found_by_other_looks_where_the_same_step_has_none() -> None:
    replayed = probed(curve(41, 41), unmoved=("model",))
    assert "frozen" in first(compared(probed(curve(1, 50), steps=(11, 12)), replayed, band=BAND))
    assert compared(curve(1, 50), replayed, band=BAND).findings == ()


# --- State after the step ---


@pytest.mark.parametrize(("part", "words"), [("model", "the weights are not those"), ("optimizer", "the optimizer is")])
def test_other_state_after_a_step_is_broken_where_bits_were_promised(part: str, words: str) -> None:
    replayed = probed(curve(41, 51), digests={part: "other"})
    assert words in first(compared(probed(curve(1, 50)), replayed))
    assert compared(probed(curve(1, 50)), replayed, band=BAND).findings == ()


def test_generators_elsewhere_explain_other_losses() -> None:
    replayed = probed(bent(lambda found: replace(found, loss=9.0 / found.step)), digests={"rng": "other"})
    told = first(compared(probed(curve(1, 50)), replayed))
    assert "the random generators (rng) are not where they were before the fault" in told


@pytest.mark.parametrize("band", [0.0, BAND])
def test_generators_elsewhere_are_a_remark_where_the_losses_are_as_they_were(band: float) -> None:
    comparison = compared(probed(curve(1, 50)), probed(curve(41, 51), digests={"rng": "other"}), band=band)
    assert comparison.findings == ()
    assert "random generators" in comparison.remarks[0]


def test_sound_replay_says_nothing() -> None:
    comparison = compared(probed(with_indices(curve(1, 50))), probed(with_indices(curve(41, 51))))
    assert (comparison.findings, comparison.remarks, comparison.compared) == ((), (), 10)
