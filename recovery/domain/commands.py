"""What people ask of an open incident: to stop its job, to pause, resume, try again, or close it."""

from __future__ import annotations

from dataclasses import replace

from recovery.domain.continuity import VerdictKind
from recovery.domain.failures import diagnosed, failure_of
from recovery.domain.fences import lease_proofs
from recovery.domain.incident import CauseKind, Incident, IncidentState
from recovery.domain.instructions import (
    Instruction,
    JobState,
    MarkContinuityBroken,
    MarkJob,
    ReleaseNodes,
)
from recovery.domain.moves import Outcome, live_generation, move, stop_all, wait_for_fence
from recovery.domain.setbacks import past_deadline
from recovery.domain.situation import Command, Situation
from recovery.domain.timeline import Entry, EntryKind
from recovery.domain.unproven_stops import UnprovenStop, unproven_stop

S = IncidentState


def cancel(incident: Incident, situation: Situation, now: float) -> Outcome:
    """The job's owner wants it stopped: that ends the incident as soon as nothing runs any more."""
    told: tuple[Entry, ...] = ()
    if situation.job.state is not JobState.STOPPING:  # else ranks may have died of our own stop
        incident, told = diagnosed(incident, situation, now)
    stops = stop_all(situation, except_generation=None)
    proofs = lease_proofs(situation, now)
    if proofs:
        return Outcome(incident=incident, instructions=proofs)
    if stops or told or situation.job.state is not JobState.STOPPING:
        mark = MarkJob(job=incident.job, state=JobState.STOPPING)
        return Outcome(incident=incident, instructions=(*stops, mark), entries=told)
    if all(generation.fenced for generation in situation.generations):
        return move(
            incident,
            S.CANCELLED,
            situation,
            now,
            "The job was stopped on request; nothing is relaunched.",
            instructions=(
                MarkJob(
                    job=incident.job,
                    state=JobState.STOPPED,
                    reason=f"Stopped on request during recovery: {incident.cause.sentence}" if incident.cause else "",
                ),
                ReleaseNodes(job=incident.job),
            ),
        )
    silent = unproven_stop(situation, now)
    if silent is not None and incident.state is not S.WAITING_FOR_FENCE:
        return _wait_for_silent(incident, situation, silent, now)
    if incident.deadline_at is not None and now >= incident.deadline_at and incident.state is not S.ESCALATED:
        return past_deadline(incident, situation, now)
    return Outcome(incident=incident)


def _wait_for_silent(incident: Incident, situation: Situation, stop: UnprovenStop, now: float) -> Outcome:
    """Tell a human that the stop cannot be proven; where the incident was opened for that, it is its cause."""
    cause = stop.cause
    fault = Entry(
        kind=EntryKind.FAULT,
        at=incident.fault_at,
        text=cause.sentence,
        data={"rank": None, "node": cause.node, "kind": cause.kind.value, "cascade": []},
    )
    known = replace(incident, cause=incident.cause or cause, stop_ordered=True)
    waiting = wait_for_fence(known, situation, now, cause.sentence)
    return replace(waiting, entries=(*(() if incident.cause else (fault,)), *waiting.entries))


def obey(incident: Incident, situation: Situation, command: Command, now: float) -> Outcome:
    """Do what an operator asked. What broke is told first, where the incident was too young to have told it."""
    known, told = diagnosed(incident, situation, now)
    outcome = _obeyed(known, situation, command, now)
    return replace(outcome, entries=(*told, *outcome.entries))


def _obeyed(incident: Incident, situation: Situation, command: Command, now: float) -> Outcome:
    match command:
        case Command.PAUSE if incident.state not in (S.PAUSED, S.ESCALATED):
            return move(incident, S.PAUSED, situation, now, "Paused by an operator; nothing more is ordered.")
        case Command.RESUME if incident.state is S.PAUSED and _nothing_certain(incident):
            # To stop what may be healthy is nothing that a pause has decided.
            afresh = replace(incident, cause=None)
            return move(afresh, S.DETECTED, situation, now, "Resumed by an operator: looking afresh.")
        case Command.RESUME if incident.state is S.PAUSED:
            return move(incident, S.STOPPING, situation, now, "Resumed by an operator.")
        case Command.RETRY if incident.state in (S.PAUSED, S.ESCALATED):
            fresh = replace(
                incident, plan=None, attempt=0, plans_made=0, run_ordered_at=None, first_step_at=None, escalation="",
                excluded_nodes=(), avoided_nodes=(),
            )  # fmt: skip
            return move(
                fresh,
                S.STOPPING,
                situation,
                now,
                "Tried again by an operator.",
                instructions=(*_taint(incident, situation), *stop_all(situation, except_generation=None)),
            )
        case Command.CLOSE:
            return _close(incident, situation, now)
    return Outcome(incident=incident)


def _nothing_certain(incident: Incident) -> bool:
    """Nothing was stopped yet, and what it was opened for is an absence, which may be over, or nothing at all."""
    absent = incident.cause is None or incident.cause.kind in (CauseKind.NODE_LOST, CauseKind.NODE_SILENT)
    return absent and not incident.stop_ordered and incident.plan is None


def _close(incident: Incident, situation: Situation, now: float) -> Outcome:
    generation = live_generation(incident, situation)
    taint = _taint(incident, situation)
    trains = generation is not None and generation.stepping and not failure_of(generation) and not taint
    if trains and generation is not None:
        ends: tuple[Instruction, ...] = (
            MarkJob(job=incident.job, state=JobState.RUNNING),
            ReleaseNodes(job=incident.job, keep=generation.plan.nodes),
        )
    else:
        ends = (
            *taint,
            *stop_all(situation, except_generation=None),
            MarkJob(job=incident.job, state=JobState.STOPPING, reason="its incident was closed by an operator"),
        )
    return move(incident, S.CLOSED_BY_OPERATOR, situation, now, "Closed by an operator.", instructions=ends)


def _taint(incident: Incident, situation: Situation) -> tuple[Instruction, ...]:
    """Mark a generation that is proven broken, though an operator's word came before the machine's."""
    verdict = situation.verdict
    if incident.plan is None or verdict is None or verdict.kind is not VerdictKind.BROKEN:
        return ()
    return (MarkContinuityBroken(job=incident.job, generation=incident.plan.generation),)
