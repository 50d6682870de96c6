"""Desired state against real state: what an order asks for, minus what is so already, minus what must never be.

Pure: orders may come lost, late, repeated or shuffled, and the result depends only on what they say, never on when they
came. A generation goes prepare, run, stop and never back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agents.protocol.messages import Assignment, AssignmentPhase, SeenPhase
from agents.settings import is_safe_name
from agents.supervisor.highest import HighWater

Key = tuple[str, int]
"""(job, generation)"""

_ALIVE = (SeenPhase.RUNNING, SeenPhase.STOPPING)
_HOLDS_SLOTS = (SeenPhase.PREPARING, SeenPhase.PREPARED, *_ALIVE)


@dataclass(frozen=True, kw_only=True)
class Known:
    """One generation as it really stands on this node."""

    plan_id: str
    phase: SeenPhase
    ranks: int = 0


class Act(StrEnum):
    PREPARE = "prepare"
    START = "start"
    STOP = "stop"
    REFUSE = "refuse"
    FAIL = "fail"
    """Report that it cannot be prepared here."""


@dataclass(frozen=True, kw_only=True)
class Action:
    act: Act
    assignment: Assignment
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """What to do, in order, once `high` is on disk."""

    actions: tuple[Action, ...]
    high: dict[str, HighWater]


def reconcile(
    assignments: Sequence[Assignment], *, known: Mapping[Key, Known], high: Mapping[str, HighWater], slots: int
) -> Reconciled:
    """Return the actions that bring this node to what `assignments` want, and the record to keep first.

    Stops come before everything else; a stop is never refused. A generation that is not named is left alone.
    """
    new_high = dict(high)
    actions: list[Action] = []
    stops_first = sorted(assignments, key=lambda a: (a.phase is not AssignmentPhase.STOP, a.job, a.generation))
    for assignment in stops_first:
        if not (is_safe_name(assignment.job) and is_safe_name(assignment.plan_id)):
            actions.append(_refused(assignment, "policy", "The names of job and plan cannot become part of a path."))
            continue
        seen = known.get((assignment.job, assignment.generation))
        if assignment.phase is AssignmentPhase.STOP:
            new_high[assignment.job] = _after_stop(new_high.get(assignment.job), assignment)
            action = _stop(assignment, seen)
        else:
            refusal = _why_refused(assignment, new_high.get(assignment.job), seen)
            if refusal is None:
                new_high[assignment.job] = _after_order(new_high.get(assignment.job), assignment)
                action = _go_on(assignment, seen, known, slots)
            else:
                # What ended properly is not called refused afterwards because an old order came late.
                ended = seen is not None and seen.plan_id == assignment.plan_id and seen.phase not in _HOLDS_SLOTS
                action = None if ended else refusal
        if action is not None:
            actions.append(action)
    return Reconciled(actions=tuple(actions), high=new_high)


def _stop(assignment: Assignment, seen: Known | None) -> Action | None:
    if seen is not None and seen.phase is SeenPhase.STOPPING:
        return None
    if seen is not None and seen.phase is SeenPhase.STOPPED and seen.plan_id == assignment.plan_id:
        return None
    return Action(act=Act.STOP, assignment=assignment)


def _why_refused(assignment: Assignment, high: HighWater | None, seen: Known | None) -> Action | None:
    number = assignment.generation
    if seen is not None and seen.plan_id == assignment.plan_id and seen.phase in _HOLDS_SLOTS:
        return None  # taken over once already; an order about what runs is never refused
    if high is None:
        return None
    if number < high.generation:
        return _refused(
            assignment, "older_generation", f"Generation {number} is older than {high.generation}, which is known here."
        )
    if number == high.generation and assignment.plan_id != high.plan_id:
        return _refused(
            assignment,
            "older_generation",
            f"Generation {number} has plan {high.plan_id} here; plan {assignment.plan_id} needs a new number.",
        )
    if number <= high.stopped:
        return _refused(assignment, "older_generation", f"Generation {number} was stopped here and does not run again.")
    return None


def _go_on(assignment: Assignment, seen: Known | None, known: Mapping[Key, Known], slots: int) -> Action | None:
    if assignment.launch is None:
        return Action(act=Act.FAIL, assignment=assignment, reason="runner", detail="The order says nothing to launch.")
    if seen is None:
        wanted = assignment.launch.ranks_per_node
        # An older generation of the same job makes room before this one runs.
        taken = sum(
            other.ranks for (job, _), other in known.items() if job != assignment.job and other.phase in _HOLDS_SLOTS
        )
        if wanted + taken > slots:
            detail = f"{wanted} ranks were ordered, {taken} of {slots} slots are taken."
            return Action(act=Act.FAIL, assignment=assignment, reason="slots", detail=detail)
        return Action(act=Act.PREPARE, assignment=assignment)
    if assignment.phase is AssignmentPhase.RUN and seen.phase is SeenPhase.PREPARED:
        # Whatever the server believes: two generations of a job never run at once on this node.
        if any(
            job == assignment.job and number != assignment.generation and other.phase in _ALIVE
            for (job, number), other in known.items()
        ):
            return None
        return Action(act=Act.START, assignment=assignment)
    return None


def _after_order(high: HighWater | None, assignment: Assignment) -> HighWater:
    if high is not None and high.generation >= assignment.generation:
        return high
    stopped = high.stopped if high else 0
    return HighWater(generation=assignment.generation, plan_id=assignment.plan_id, stopped=stopped)


def _after_stop(high: HighWater | None, assignment: Assignment) -> HighWater:
    risen = _after_order(high, assignment)
    return replace(risen, stopped=max(risen.stopped, assignment.generation))


def _refused(assignment: Assignment, reason: str, detail: str) -> Action:
    return Action(act=Act.REFUSE, assignment=assignment, reason=reason, detail=detail)
