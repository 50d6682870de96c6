"""The ledger against lines whose truth is known: whole ones, and ones with a fault planted at a random step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from domain_scenes import generation, plan
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.plan import CheckpointRef
from recovery.domain.sample_ledger import SamplePosition, StepSamples, audit_samples, line_to

BATCH = 12


def line(steps: int, *, size: int = 60, first: int = 1, number: int = 1, known: bool = True) -> list[StepSamples]:
    """Steps from `first` on of a run that skips and repeats nothing; an epoch may end with an incomplete batch."""
    per_epoch = -(-size // BATCH)
    records = []
    for step in range(first, first + steps):
        epoch, at = divmod(step - 1, per_epoch)
        records.append(
            StepSamples(
                generation=number,
                step=step,
                epoch=epoch,
                start=at * BATCH,
                stop=min(size, (at + 1) * BATCH),
                epoch_size=size if known else None,
                checked_ranks=2,
                digest=f"{step:016x}",
            )
        )
    return records


def moved(records: Sequence[StepSamples], by: int, *, after: int) -> list[StepSamples]:
    return [
        replace(one, start=(one.start or 0) + by, stop=(one.stop or 0) + by) if one.step > after else one
        for one in records
    ]


@given(steps=st.integers(1, 80), size=st.integers(12, 100), known=st.booleans())
def test_whole_line_skips_and_repeats_nothing(steps: int, size: int, known: bool) -> None:
    ledger = audit_samples(line(steps, size=size, known=known))
    assert ledger.proven and (ledger.skipped, ledger.repeated, ledger.replayed, ledger.findings) == (0, 0, 0, ())
    per_epoch = -(-size // BATCH)
    epochs, rest = divmod(steps, per_epoch)
    assert ledger.samples == epochs * size + rest * BATCH
    assert ledger.epochs == (epochs if known else (steps - 1) // per_epoch)
    assert (ledger.steps, ledger.checked_steps, ledger.first) == (steps, steps, SamplePosition(epoch=0, position=0))
    assert "none skipped and none repeated." in ledger.sentence


@given(at=st.integers(1, 18), by=st.integers(1, 30))
def test_samples_that_a_loader_jumps_over_are_counted(at: int, by: int) -> None:
    ledger = audit_samples(moved(line(20, size=10_000), by, after=at))
    assert (ledger.skipped, ledger.repeated, ledger.proven) == (by, 0, False)
    assert ledger.findings == (
        f"Before step {at + 1}: {by} sample{'s' * (by > 1)} skipped; it goes on at "
        f"[{at * BATCH + by}, {(at + 1) * BATCH + by}) of epoch 0.",
    )
    assert f"{by} skipped, 0 repeated" in ledger.sentence


@given(at=st.integers(1, 18), steps_back=st.integers(1, 18))
def test_samples_that_are_trained_on_twice_are_counted_once_each_time(at: int, steps_back: int) -> None:
    back = min(at, steps_back) * BATCH
    ledger = audit_samples(moved(line(20, size=10_000), -back, after=at))
    assert (ledger.skipped, ledger.repeated) == (0, min(back, (20 - at) * BATCH))
    assert ledger.samples + ledger.repeated == 20 * BATCH


def test_first_samples_that_were_never_trained_on_are_skipped() -> None:
    assert audit_samples(moved(line(5, size=1000), 1, after=0)).skipped == 1


def test_epoch_that_is_left_before_its_end_is_a_skip() -> None:
    whole = line(12, size=60)  # five steps each
    shortened = [replace(one, step=number) for number, one in enumerate([*whole[:3], *whole[5:]], start=1)]
    ledger = audit_samples(shortened)
    assert (ledger.skipped, ledger.repeated, ledger.epochs) == (24, 0, 2)


def test_loader_that_begins_an_epoch_anew_repeats_all_that_it_gives() -> None:
    whole = line(9, size=60)
    anew = [replace(one, step=one.step + 8) for one in whole[:6]]
    ledger = audit_samples([*whole[:8], *anew])
    assert (ledger.repeated, ledger.skipped, ledger.samples, ledger.proven) == (72, 0, 96, False)


def test_where_sizes_are_unknown_an_epoch_that_ends_elsewhere_than_others_is_told() -> None:
    whole = line(15, size=60, known=False)
    shortened = [replace(one, step=number) for number, one in enumerate([*whole[:8], *whole[10:]], start=1)]
    ledger = audit_samples(shortened)
    assert ledger.findings == ("Epochs ended at different positions: epoch 0 at 60, epoch 1 at 36.",)
    assert not ledger.proven and "but the batches do not bear that out" in ledger.sentence


@given(st.integers(1, 30), st.integers(1, 15), st.integers(0, 15))
def test_replayed_steps_are_counted_apart_and_are_no_repetition(done: int, lost: int, made_again: int) -> None:
    old = line(done + lost)
    new = line(made_again, first=done + 1, number=2)
    ledger = audit_samples([*old[:done], *new], lost=old[done:])
    again = min(lost, made_again)
    assert ledger.proven and ledger.replayed == sum((one.stop or 0) - (one.start or 0) for one in new[:again])
    assert ("trained on again since their steps were lost" in ledger.sentence) is bool(again)


def test_replay_on_other_samples_is_told_even_where_its_own_spans_follow_each_other() -> None:
    old = line(20, size=10_000)
    new = [replace(one, digest="f" * 16) if one.step == 13 else one for one in line(8, first=11, number=2, size=10_000)]
    ledger = audit_samples([*old[:10], *new], lost=old[10:])
    assert ledger.findings == (
        "Step 13: the batch of generation 2 held other samples than that of generation 1, though both name "
        "[144, 156) of epoch 0.",
    )
    wrong = audit_samples([*old[:10], *moved(new, 12, after=10)], lost=old[10:])
    assert any("generation 1 before it on [120, 132) of epoch 0" in finding for finding in wrong.findings)


def test_batches_that_are_not_what_their_span_says_are_told_though_every_span_is_right() -> None:
    """A loader that skips one sample while its counter goes on."""
    records = [replace(one, wrong_ranks=1) if one.step > 7 else one for one in line(10)]
    ledger = audit_samples(records)
    assert (ledger.skipped, ledger.repeated, ledger.proven, len(ledger.findings)) == (0, 0, False, 3)
    assert ledger.findings[0].startswith(
        "Step 8: 1 of 2 ranks had other samples in their batch than the order has at [24, 36) of epoch 1: "
    )
    assert "but the batches do not bear that out" in ledger.sentence


def test_ranks_that_name_different_samples_are_told() -> None:
    ledger = audit_samples([replace(one, agree=one.step != 4) for one in line(6)])
    assert ledger.findings == ("Step 4: the ranks named different samples.",)


@pytest.mark.parametrize("blind", [{"start": None, "stop": None}, None])
def test_steps_without_a_span_leave_open_what_lies_between(blind: dict[str, Any] | None) -> None:
    records = line(10)
    seen = [one for one in records if one.step not in (4, 5)]
    if blind is not None:
        seen = [replace(one, **blind) if one.step in (4, 5) else one for one in records]
    ledger = audit_samples(seen)
    assert (ledger.steps, ledger.unknown_steps, ledger.skipped, ledger.repeated) == (10, 2, 0, 0)
    assert not ledger.proven and "as far as is known: 2 steps named no samples" in ledger.sentence


def test_line_of_which_nothing_is_known_says_so() -> None:
    ledger = audit_samples([replace(one, start=None, stop=None) for one in line(3)])
    assert (ledger.steps, ledger.unknown_steps, ledger.first, ledger.proven) == (3, 3, None, False)
    assert ledger.sentence.startswith("No rank reported")
    assert not audit_samples([]).proven


def test_line_goes_from_parent_to_parent_and_cuts_each_where_the_next_began() -> None:
    chain = {1: None, 2: (1, 40), 3: (1, 40), 4: (3, 60)}
    generations = [
        generation(number, of=plan(number, parent=CheckpointRef(generation=p[0], step=p[1]) if p else None))
        for number, p in chain.items()
    ]
    found = [(part.generation, part.after_step, part.upto_step) for part in line_to(4, generations)]
    assert found == [(1, 0, 40), (3, 40, 60), (4, 60, None)]
    assert line_to(9, generations) == ()
    part = line_to(4, generations)[1]
    assert [part.holds(step) for step in (40, 41, 60, 61)] == [False, True, True, False]
