"""Which checkpoint a generation resumes from: complete, on the lineage of the job, never one of a broken generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.domain.generations import GenerationView
from recovery.domain.plan import CheckpointRef

RULE_VERSION = "lineage-1"


@dataclass(frozen=True, kw_only=True)
class ParentChoice:
    """A checkpoint and why; None with `from_beginning` where nothing was ever trained."""

    parent: CheckpointRef | None
    reason: str


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
    reached_step: int | None,
    before_step: int | None = None,
) -> ParentChoice | NoCheckpoint:
    """The newest complete checkpoint on the lineage; `before_step` rolls back further than that step.

    Starting from step 0 without a checkpoint is chosen only where no step was ever completed.
    """
    limits = lineage_limits(generations)
    usable = [
        ref
        for ref in checkpoints
        if ref.generation in limits
        and _within(ref.step, limits[ref.generation])
        and (before_step is None or ref.step < before_step)
    ]
    if usable:
        parent = max(usable, key=lambda ref: (ref.step, ref.generation))
        what = "the newest complete checkpoint on the job's lineage"
        return ParentChoice(parent=parent, reason=what if before_step is None else f"{what} before step {before_step}")
    if not reached_step and before_step is None:
        return ParentChoice(parent=None, reason="no step was completed yet: from the beginning")
    return NoCheckpoint(reason=f"no complete checkpoint on the lineage, but step {reached_step} was reached")


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
