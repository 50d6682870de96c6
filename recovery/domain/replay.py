"""The replayed steps against the same steps before the fault: what differs, in sentences that name the culprit.

Continuity calls `compare_steps`. The sentences come with the most telling first: a step in the wrong place explains the
wrong loss, a wrong loss explains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from recovery.domain.step_records import Records, StepRecord

_PER_KIND = 4
"""Sentences of one kind that are worth telling."""
_BITWISE = {
    "model": "the weights are not those of before the fault",
    "optimizer": "the optimizer is not where it was before the fault",
    "scheduler": "the scheduler is not where it was before the fault",
}
"""Parts that a deterministic script decides alone. The others are left out: a library may draw from the random
generators for purposes of its own, a loader may count what it has fetched ahead (spans and indices tell what was
trained on), and parts of the script's own making may hold times."""


@dataclass(kw_only=True)
class _Sentences:
    """By kind; the order of the fields is the order of telling."""

    places: list[str] = field(default_factory=list)
    indices: list[str] = field(default_factory=list)
    rates: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def told(self) -> list[str]:
        kinds = (self.places, self.indices, self.rates, self.frozen, self.generators, self.states, self.losses)
        return [sentence for kind in kinds for sentence in kind[:_PER_KIND]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    compared: int
    """Steps that every rank has in both generations."""
    findings: tuple[str, ...]
    remarks: tuple[str, ...]
    """What is worth knowing and breaks nothing."""
    max_relative_difference: float


def compare_steps(
    *, first: int, last: int, world_size: int, band: float, reference: Records, replayed: Records
) -> Comparison:
    """Compare steps `first` to `last`. `band` is the relative band of the losses; 0 demands equal bits of all state."""
    compared, worst, sentences = 0, 0.0, _Sentences()
    old_losses, new_losses = set(), set()
    for step in range(first, last + 1):
        complete = True
        for rank in range(world_size):
            old, new = reference.get((rank, step)), replayed.get((rank, step))
            if old is None or new is None:
                complete = False
                continue
            _compare_place(old, new, reference, sentences)
            _compare_state(old, new, band, sentences)
            if old.loss is None or new.loss is None:
                complete = False
                continue
            old_losses.add(old.loss)
            new_losses.add(new.loss)
            worst = max(worst, _compare_loss(old, new, band, sentences))
        compared += complete
    sentences.frozen += _unmoved(first, reference, replayed)
    if compared >= 5 and len(new_losses) == 1 < len(old_losses):
        sentences.frozen.append(
            f"The loss did not change in {compared} replayed steps: the weights are not being trained."
        )
    # By itself it is no fault: a loader or a library may draw in passing. It explains a loss that is another one.
    remarks = [] if sentences.losses and band == 0.0 else sentences.generators
    if remarks:
        sentences.generators = []
    return Comparison(
        compared=compared,
        findings=tuple(sentences.told()),
        remarks=tuple(remarks[:1]),
        max_relative_difference=worst,
    )


def relative_difference(old: float, new: float) -> float:
    """|old - new| over |old|; 0 for equal values (two NaN of a replay are equal), infinity where only one is finite."""
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    if not (math.isfinite(old) and math.isfinite(new)):
        return math.inf
    return abs(old - new) / max(abs(old), 1e-30)


def _compare_place(old: StepRecord, new: StepRecord, reference: Records, sentences: _Sentences) -> None:
    """Samples and learning rate: which step this is, whatever number it was given."""
    where = f"Step {new.step}, rank {new.rank}"
    moved, rated = old.place != new.place, old.learning_rate != new.learning_rate
    twin = next((record for record in _steps_of(new.rank, reference) if record.place == new.place), None)
    if moved and rated and twin is not None and twin.learning_rate == new.learning_rate:
        off = new.step - twin.step
        sentences.places.append(
            f"{where}: has the samples and the learning rate of step {twin.step}: the rank is "
            f"{_steps(abs(off))} {'behind' if off > 0 else 'ahead'} of its step counter."
        )
        return
    if moved:
        began_anew = new.span_start == 0 != old.span_start
        sentences.places.append(
            f"{where}: trained on samples {new.samples}, before the fault on {old.samples}: the sampler was not "
            f"restored to its position{'; the loader began an epoch anew' if began_anew else ''}."
        )
    elif None not in (old.indices_digest, new.indices_digest) and old.indices_digest != new.indices_digest:
        sentences.indices.append(
            f"{where}: the batch held other samples than before the fault (checksum {new.indices_digest}, then "
            f"{old.indices_digest}), though its span is {new.samples} as it was: the loader skips or repeats samples "
            "that its counter does not know of."
        )
    if rated:
        sentences.rates.append(
            f"{where}: learning rate {new.learning_rate!r}, before the fault {old.learning_rate!r}: "
            "the scheduler was not restored."
        )


def _steps_of(rank: int, records: Records) -> Iterator[StepRecord]:
    return (record for (number, _), record in records.items() if number == rank and record.span_start is not None)


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


def _compare_state(old: StepRecord, new: StepRecord, band: float, sentences: _Sentences) -> None:
    if old.probe is None or new.probe is None:
        return
    where = f"Rank {new.rank}, after step {new.step}"
    before, after = old.probe.digests, new.probe.digests
    differing = {part for part in before.keys() & after.keys() if before[part] != after[part]}
    if "rng" in differing:
        sentences.generators.append(
            f"{where}: the random generators (rng) are not where they were before the fault: something seeds them, or "
            "draws from them, after the resume."
        )
    if band == 0.0:
        sentences.states += [f"{where}: {_BITWISE[part]}." for part in _BITWISE if part in differing]


def _unmoved(first: int, reference: Records, replayed: Records) -> list[str]:
    """Weights that a step no longer changes, or an optimizer that no longer steps, though both did before the fault."""
    findings = []
    for (rank, step), new in sorted(replayed.items()):
        if new.probe is None or step < first:
            continue
        twin = reference.get((rank, step))
        others = (record for (number, _), record in reference.items() if number == rank)
        looks = [record.probe for record in ([twin] if twin and twin.probe else others) if record.probe]
        still = {part for part in new.probe.unmoved if looks and all(part not in look.unmoved for look in looks)}
        if "model" in still:
            findings.append(
                f"Rank {rank}: step {step} did not change the weights, before the fault each step did: the weights are "
                "frozen. Does the optimizer hold the parameters of the model that is trained?"
            )
        elif "optimizer" in still:
            findings.append(
                f"Rank {rank}: step {step} did not move the tracked optimizer, before the fault each step did: the "
                "model is stepped by another optimizer, which was not restored."
            )
    return findings


def _compare_loss(old: StepRecord, new: StepRecord, band: float, sentences: _Sentences) -> float:
    assert old.loss is not None and new.loss is not None
    difference = relative_difference(old.loss, new.loss)
    where = f"Step {new.step}, rank {new.rank}: loss {new.loss!r}, before the fault {old.loss!r}"
    if band == 0.0 and difference != 0.0:
        sentences.losses.append(f"{where}; a bit-equal replay was promised.")
    elif difference > band:
        sentences.losses.append(f"{where}: {difference:.2e} apart, the band is {band:.0e}.")
    return difference
