"""How an incident moves: the outcome of a step, the guarded transition, the page. The whole machine uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recovery.domain.generations import AssignmentPhase, GenerationView
from recovery.domain.incident import TRANSITIONS, Incident, IncidentState
from recovery.domain.instructions import (
    Instruction,
    PageOperator,
    StopGeneration,
)
from recovery.domain.situation import Situation
from recovery.domain.timeline import Entry, EntryKind

S = IncidentState


class ForbiddenTransition(Exception):
    """A handler asked for a move that TRANSITIONS does not hold: a bug in this file."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The next incident, what to do, and the sentences that tell it."""

    incident: Incident
    instructions: tuple[Instruction, ...] = ()
    entries: tuple[Entry, ...] = ()


def move(
    incident: Incident,
    state: IncidentState,
    situation: Situation,
    now: float,
    text: str,
    *,
    instructions: tuple[Instruction, ...] = (),
) -> Outcome:
    """Go to another state, with a new deadline and the sentence that tells it. Raises `ForbiddenTransition`."""
    if state not in TRANSITIONS[incident.state]:
        raise ForbiddenTransition(f"{incident.id}: {incident.state.value} -> {state.value} is not in TRANSITIONS")
    moved = replace(
        incident,
        state=state,
        state_since=now,
        deadline_at=situation.policy.deadline(state, now=now),
        stop_ordered=incident.stop_ordered or state is S.STOPPING,
    )
    entry = Entry(kind=EntryKind.STATE, at=now, text=text, data={"from": incident.state.value, "to": state.value})
    return Outcome(incident=moved, instructions=instructions, entries=(entry,))


def escalate(incident: Incident, situation: Situation, now: float, why: str) -> Outcome:
    """Page a human and wait; retrying, closing and stopping the job are what they can ask for."""
    moved = move(
        replace(incident, escalation=why),
        S.ESCALATED,
        situation,
        now,
        f"This needs a human: {why}",
        instructions=(PageOperator(reason=why),),
    )
    page = Entry(kind=EntryKind.PAGE, at=now, text=f"Paged the operators: {why}")
    return replace(moved, entries=(*moved.entries, page))


def wait_for_fence(incident: Incident, situation: Situation, now: float, why: str) -> Outcome:
    """Page a human and wait for a proof: of a node that cannot be seen, or whose processes do not die."""
    reason = f"{why} A proof is needed: the node's return, its reboot, a fence provider or an operator's attestation."
    moved = move(
        replace(incident, escalation=why),
        S.WAITING_FOR_FENCE,
        situation,
        now,
        f"Waiting for a fence: {why} Nothing is relaunched until it is proven that the old ranks cannot act.",
        instructions=(PageOperator(reason=reason),),
    )
    page = Entry(kind=EntryKind.PAGE, at=now, text=f"Paged the operators: {reason}")
    return replace(moved, entries=(*moved.entries, page))


def escalate_poisoned(incident: Incident, situation: Situation, now: float, *, attempts: int) -> Outcome:
    """Ask a human: every worker that tried the next step died of it."""
    return escalate(
        incident, situation, now, f"The step after {incident.state.value} killed its worker {attempts} times."
    )


def live_generation(incident: Incident, situation: Situation) -> GenerationView | None:
    """The plan's generation, if it exists and is not being stopped."""
    generation = situation.generation(incident.plan.generation) if incident.plan else None
    return None if generation is None or generation.wanted is AssignmentPhase.STOP else generation


def stop_all(situation: Situation, *, except_generation: int | None) -> tuple[Instruction, ...]:
    """Want every generation gone that is still wanted, except one."""
    return tuple(
        StopGeneration(job=generation.plan.job, generation=generation.number)
        for generation in situation.generations
        if generation.wanted is not AssignmentPhase.STOP and generation.number != except_generation
    )
