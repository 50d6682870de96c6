"""Which checkpoint a generation resumes from: complete, on the job's lineage, never a tainted or damaged one.

Without a doubt it is the newest. Once the loss was lost or continuity broke, the newest that is known to be good comes
before a newer one of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.domain.generations import GenerationView
from recovery.domain.plan import CheckpointRef
from recovery.domain.trust import UNKNOWN, Integrity, Trust

RULE_VERSION = "lineage-2"


@dataclass(frozen=True, kw_only=True)
class ParentChoice:
    """A checkpoint and why; None with `from_beginning` where nothing was ever trained."""

    parent: CheckpointRef | None
    reason: str
    in_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class NoCheckpoint:
    """Nothing that may be resumed from, and why."""

    reason: str


def lineage_limits(generations: Sequence[GenerationView]) -> dict[int, int | None]:
    """Map each generation on the job's lineage to the highest step that counts (None: any).

    The newest generation that trained is the tip; its parent's checkpoints count up to the step it resumed from, and so
    on. What an older generation saved beyond that is off the lineage, whoever wrote it and when.
    """
    by_number = {generation.number: generation for generation in generations}
    trained = [
        g
        for g in generations
        if any(r.resumed_step is not None or r.last_step is not None for r in g.ranks) and not _tainted(g, by_number)
    ]
    if not trained:
        return {}
    limits: dict[int, int | None] = {}
    tip = max(trained, key=lambda g: g.number)
    limits[tip.number] = None
    parent = tip.plan.parent
    while parent is not None and parent.generation not in limits:
        limits[parent.generation] = parent.step
        grand = by_number.get(parent.generation)
        parent = grand.plan.parent if grand else None
    return limits


def _tainted(generation: GenerationView, by_number: Mapping[int, GenerationView]) -> bool:
    """Its continuity is broken, or that of a generation that it descends from."""
    seen: set[int] = set()
    link: GenerationView | None = generation
    while link is not None and link.number not in seen:
        if not link.sound:
            return True
        seen.add(link.number)
        link = by_number.get(link.plan.parent.generation) if link.plan.parent else None
    return False


def choose_parent(
    *,
    generations: Sequence[GenerationView],
    checkpoints: Sequence[CheckpointRef],
    trust: Mapping[CheckpointRef, Trust],
    reached_step: int | None,
    before_step: int | None = None,
) -> ParentChoice | NoCheckpoint:
    """The newest checkpoint on the lineage that may be trusted; `before_step` rolls back further than that step.

    `trust` says what is known of each (`trust.appraise`). Starting from step 0 without a checkpoint is chosen only
    where no step was ever completed.
    """
    limits = lineage_limits(generations)
    whole = [
        ref
        for ref in checkpoints
        if ref.generation in limits
        and _within(ref.step, limits[ref.generation])
        and (before_step is None or ref.step < before_step)
    ]
    usable = sorted((ref for ref in whole if trust.get(ref, UNKNOWN).usable), key=_age)
    if usable:
        return _best(usable, whole, trust, doubt=_doubt(generations, limits, before_step), before_step=before_step)
    if not reached_step and before_step is None:
        return ParentChoice(parent=None, reason="no step was completed yet: from the beginning")
    if whole:
        newest = max(whole, key=_age)
        return NoCheckpoint(
            reason=f"none of {len(whole)} checkpoints on the lineage may be trusted (the newest, {newest}: "
            f"{_why_not(trust[newest])}), but step {reached_step} was reached"
        )
    return NoCheckpoint(reason=f"no complete checkpoint on the lineage, but step {reached_step} was reached")


def _best(
    usable: Sequence[CheckpointRef],
    whole: Sequence[CheckpointRef],
    trust: Mapping[CheckpointRef, Trust],
    *,
    doubt: str,
    before_step: int | None,
) -> ParentChoice:
    """`usable` is oldest first and not empty; `doubt` is why the newest is not simply taken, empty if there is none."""
    newest = usable[-1]
    good = [ref for ref in usable if trust.get(ref, UNKNOWN).good]
    parent = good[-1] if doubt and good else newest
    known = trust.get(parent, UNKNOWN)
    before = "" if before_step is None else f" before step {before_step}"
    notes = []
    if doubt and good:
        what = f"the newest {known.health.value.replace('_', ' ')} checkpoint on the job's lineage{before}"
        notes.append(f"{what} ({known.health_reason})")
        if parent != newest:
            notes.append(f"preferred to {newest}, of which nothing is known yet, since {doubt}")
    else:
        notes.append(f"the newest complete checkpoint on the job's lineage{before}")
        if doubt:
            notes.append(f"none is known to be clean, though {doubt}")
    passed = [ref for ref in whole if _age(ref) > _age(parent) and not trust.get(ref, UNKNOWN).usable]
    if passed:
        last = max(passed, key=_age)
        notes.append(f"passing over {last}: {_why_not(trust[last])}")
    return ParentChoice(parent=parent, reason="; ".join(notes))


def _why_not(trust: Trust) -> str:
    if trust.integrity is Integrity.DAMAGED:
        return f"damaged, {trust.integrity_reason}"
    return f"tainted, {trust.health_reason}"


def _doubt(generations: Sequence[GenerationView], limits: Mapping[int, int | None], before_step: int | None) -> str:
    """Why the newest checkpoint may hold what went wrong; empty if nothing speaks against it."""
    tip = next((generation for generation in generations if generation.number == max(limits, default=0)), None)
    if tip is not None and tip.nonfinite_step is not None:
        return f"the loss of generation {tip.number} was not finite from step {tip.nonfinite_step} on"
    if before_step is not None:
        return f"continuity broke after step {before_step} was loaded"
    return ""


def _age(ref: CheckpointRef) -> tuple[int, int]:
    return ref.step, ref.generation


def reached_step(generations: Sequence[GenerationView], *, before: int | None = None) -> int | None:
    """The highest step that any rank completed; `before` looks only at generations below that number."""
    steps = [
        generation.reached_step
        for generation in generations
        if generation.sound and generation.reached_step is not None and (before is None or generation.number < before)
    ]
    return max(steps, default=None)


def _within(step: int, limit: int | None) -> bool:
    return limit is None or step <= limit


def reference_generations(generations: Mapping[int, GenerationView], *, upto: int) -> tuple[int, ...]:
    """Generations whose step records a replay in generation `upto` is compared with, newest first."""
    return tuple(number for number in sorted(generations, reverse=True) if number < upto and generations[number].sound)
