"""How far a checkpoint may be trusted, on two axes: are its files whole, and is what they hold sane?

`lineage.choose_parent` asks it before a generation resumes, `retention` before anything may be removed. The rows keep
what was found (`recovery/checkpoints.py`); whatever follows from the generations is found here again each time, so that
a decision never waits for a row to be written.

Integrity rises: a checkpoint has a row once its manifest was written (before that it is only being written and does not
count), then its files are hashed again in the background, then a generation loads it on every rank with equal digests.
Health: `k` sane steps after the save make it clean, a generation that goes on from it for `k` steps proves it; one that
goes wrong within `k` steps of the load taints it, for ever.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from recovery.domain.generations import GenerationView
from recovery.domain.plan import CheckpointRef

RULE_VERSION = "trust-1"

SANE_STEPS = 10
"""The `k` of these rules. A replica that was restored wrongly gave NaN 3 steps after the load; ten leave a margin."""

SPIKE_BAND = 1.0
"""A sane loss is at most this far above those just before the save, as a share of their median (at least of 1): a
spike that doubles the loss is no proof that the checkpoint before it is good."""

REFERENCE_STEPS = 20
"""Steps up to the save whose median loss the steps after it are held against."""


class Integrity(StrEnum):
    """What is known of a checkpoint's files."""

    COMPLETE = "complete"
    """Its manifest is in place."""
    REHASHED = "rehashed"
    """Every file was read again after the save and is what the manifest says."""
    TEST_LOADED = "test_loaded"
    """Every rank of a generation has loaded it, with equal digests."""
    DAMAGED = "damaged"
    """Its files are not what the manifest says: never loaded."""


class Health(StrEnum):
    """What is known of the state that a checkpoint holds."""

    UNKNOWN = "unknown"
    CLEAN = "clean"
    """Training went on sanely after the save."""
    RESUMED_FROM = "resumed_from"
    """A generation went on from it sanely."""
    TAINTED = "tainted"
    """Training went wrong soon after it was loaded, or had gone wrong before it was saved: never loaded again."""


_RANK = (Integrity.COMPLETE, Integrity.REHASHED, Integrity.TEST_LOADED)
GOOD_HEALTH = frozenset({Health.CLEAN, Health.RESUMED_FROM})


@dataclass(frozen=True, kw_only=True)
class Trust:
    """One checkpoint on both axes, each with the sentence that says how it is known."""

    integrity: Integrity = Integrity.COMPLETE
    integrity_reason: str = ""
    health: Health = Health.UNKNOWN
    health_reason: str = ""
    absolved_through: int = 0
    """An operator's word: what generations up to this one did after loading it says nothing against it."""

    @property
    def usable(self) -> bool:
        """It may be resumed from."""
        return self.integrity is not Integrity.DAMAGED and self.health is not Health.TAINTED

    @property
    def good(self) -> bool:
        """It is usable, and its state is known to be sane."""
        return self.usable and self.health in GOOD_HEALTH


UNKNOWN = Trust()


def risen(integrity: Integrity, to: Integrity) -> Integrity:
    """Integrity only rises; damage ends it."""
    if Integrity.DAMAGED in (integrity, to):
        return Integrity.DAMAGED
    return max(integrity, to, key=_RANK.index)


def appraise(
    known: Mapping[CheckpointRef, Trust], generations: Sequence[GenerationView], *, sane_steps: int = SANE_STEPS
) -> dict[CheckpointRef, Trust]:
    """What is known of each checkpoint, with all that follows from what the generations did. Taint never goes away."""
    children: dict[CheckpointRef, list[GenerationView]] = {}
    for generation in generations:
        if generation.plan.parent is not None:
            children.setdefault(generation.plan.parent, []).append(generation)
    by_number = {generation.number: generation for generation in generations}
    return {
        ref: _appraised(ref, trust, by_number.get(ref.generation), children.get(ref, ()), sane_steps)
        for ref, trust in known.items()
    }


def _appraised(
    ref: CheckpointRef,
    known: Trust,
    writer: GenerationView | None,
    children: Sequence[GenerationView],
    sane_steps: int,
) -> Trust:
    loaded = next((child for child in children if child.loaded_whole), None)
    if loaded is not None and known.integrity in (Integrity.COMPLETE, Integrity.REHASHED):
        reason = f"every rank of generation {loaded.number} loaded it with equal digests"
        known = replace(known, integrity=Integrity.TEST_LOADED, integrity_reason=reason)
    if known.health is Health.TAINTED:
        return known
    taint = _taint(ref, writer, children, known.absolved_through, sane_steps)
    if taint:
        return replace(known, health=Health.TAINTED, health_reason=taint)
    if known.health is Health.RESUMED_FROM:
        return known
    gone_on = next((child for child in children if _went_on_sanely(child, ref, sane_steps)), None)
    if gone_on is None:
        return known
    reason = f"generation {gone_on.number} went on from it for {sane_steps} steps and more"
    return replace(known, health=Health.RESUMED_FROM, health_reason=reason)


def _taint(
    ref: CheckpointRef,
    writer: GenerationView | None,
    children: Sequence[GenerationView],
    absolved_through: int,
    sane_steps: int,
) -> str:
    if writer is not None and not writer.sound:
        return f"generation {writer.number}, which saved it, did not go on where its own checkpoint had left off"
    if writer is not None and writer.nonfinite_step is not None and ref.step >= writer.nonfinite_step:
        return f"the loss of generation {writer.number} was not finite from step {writer.nonfinite_step} on"
    for child in children:
        if child.number <= absolved_through:
            continue
        if not child.sound:
            return f"continuity broke in generation {child.number}, which had loaded it"
        if child.nonfinite_step is not None and child.nonfinite_step - ref.step <= sane_steps:
            return (
                f"the loss of generation {child.number}, which had loaded it, was not finite "
                f"{child.nonfinite_step - ref.step} steps later"
            )
    return ""


def _went_on_sanely(child: GenerationView, ref: CheckpointRef, sane_steps: int) -> bool:
    far = ref.step + sane_steps
    whole = len(child.ranks) == child.plan.world_size
    return (
        child.sound
        and whole
        and all((rank.last_step or 0) >= far for rank in child.ranks)
        and (child.nonfinite_step is None or child.nonfinite_step > far)
    )


# --- Sane steps after a save ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sanity:
    """Whether the steps after a save were sane: True, False, or None where not all of them were made yet."""

    sane: bool | None
    reason: str


def judge_sanity(
    step: int,
    *,
    losses: Mapping[tuple[int, int], float | None],
    world_size: int,
    sane_steps: int = SANE_STEPS,
) -> Sanity:
    """Judge the `sane_steps` steps after the save at `step`.

    `losses` maps (rank, step) to the loss of each step that was made, None where the rank reports none; it also holds
    the steps up to the save, as far as they are known.
    """
    after = [(rank, number) for number in range(step + 1, step + sane_steps + 1) for rank in range(world_size)]
    if any(key not in losses for key in after):
        return Sanity(sane=None, reason=f"fewer than {sane_steps} steps were made after it")
    told = [(rank, number, loss) for rank, number in after if (loss := losses[rank, number]) is not None]
    if not told:
        return Sanity(sane=False, reason="no rank reports its loss: whether it is sane is not known")
    before = [
        loss
        for (_, number), loss in losses.items()
        if loss is not None and step - REFERENCE_STEPS < number <= step and math.isfinite(loss)
    ]
    reference = statistics.median(before) if before else None
    for rank, number, loss in told:
        if not math.isfinite(loss):
            return Sanity(sane=False, reason=f"rank {rank} had loss {loss} at step {number}")
        if reference is not None and loss - reference > SPIKE_BAND * max(abs(reference), 1.0):
            return Sanity(
                sane=False, reason=f"rank {rank} had loss {loss:.6g} at step {number}; before it, {reference:.6g}"
            )
    return Sanity(sane=True, reason=f"{sane_steps} sane steps after it, on every rank")


# --- A loss that is not finite --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Nonfinite:
    """A rank's present run of losses that are not finite."""

    since: int | None = None
    count: int = 0


def fold_loss(found: Nonfinite, *, step: int, loss: float | None, enough: int) -> Nonfinite:
    """Take one step's loss. A run that was long enough stays: whatever the rank says after it comes too late."""
    if loss is None or found.count >= enough:
        return found
    if math.isfinite(loss):
        return Nonfinite()
    return Nonfinite(since=step if found.since is None else found.since, count=found.count + 1)


def came_again(
    generation: GenerationView, generations: Sequence[GenerationView], *, sane_steps: int = SANE_STEPS
) -> str:
    """Why another roll-back would not help: an earlier generation had lost its loss too, and this one came no further.

    Empty where it is the first time, or where training had got well past the step at which it happened before.
    """
    if generation.nonfinite_step is None:
        return ""
    before = [g for g in generations if g.number < generation.number and g.nonfinite_step is not None]
    last = max(before, key=lambda g: g.number, default=None)
    if last is None or last.nonfinite_step is None or generation.nonfinite_step > last.nonfinite_step + sane_steps:
        return ""
    return f"generation {last.number} had lost it at step {last.nonfinite_step} too"
