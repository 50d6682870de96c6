"""Whether a job needs an incident: read from its state, so that a fault whose message came at a bad moment counts.

Ingest opens an incident with the fact that tells of the death; the sweep asks here again, since a death may be stored
while an older incident of the job ends, and since a runner may vanish without a word about its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.absences import missing_nodes, node_silent, unseen_for_s
from recovery.domain.diagnosis import diagnose
from recovery.domain.failures import loss_lost
from recovery.domain.generations import AssignmentPhase, GenerationView
from recovery.domain.instructions import JobState
from recovery.domain.situation import Situation
from recovery.domain.unproven_stops import unproven_stop

RULE_VERSION = "detection-3"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What an incident is opened for."""

    generation: int
    rank: int | None
    """None where a runner is gone and no rank's end is known."""
    at: float | None
    """The agent's time, corrected; None where nobody saw it happen."""
    sentence: str
    node: str | None = None
    """Set where a whole node is what broke."""
    lost: str = ""
    """What the generation has lost, where that is neither a rank, a runner nor a node."""


def find_fault(situation: Situation, now: float) -> Fault | None:
    """The fault of a job that has no open incident; None if it has none, or if its end was wanted."""
    job = situation.job
    if job.state is JobState.STOPPING:
        return _held_up_stop(situation, now)
    if job.stop_wanted or job.state not in (JobState.LAUNCHING, JobState.RUNNING, JobState.RECOVERING):
        return None
    newest = max(situation.generations, key=lambda generation: generation.number, default=None)
    if newest is None or newest.wanted is not AssignmentPhase.RUN or newest.ended_well:
        return None
    return (
        _death(newest)
        or _vanished_runner(newest, launching=job.state is JobState.LAUNCHING)
        or _missing_node(newest, situation, now)
        or _lost_loss(newest)
        or _unseen(newest, situation, now)
    )


def _held_up_stop(situation: Situation, now: float) -> Fault | None:
    """Nobody would ever hear of a stop that waits for a node which is gone."""
    stop = unproven_stop(situation, now)
    if stop is None:
        return None
    return Fault(
        generation=stop.generation,
        rank=None,
        at=now - stop.silent_s,
        sentence=stop.cause.sentence,
        node=stop.cause.node,
    )


def _death(generation: GenerationView) -> Fault | None:
    cause = diagnose(generation.ranks)
    if cause is None:
        return None
    dead = next((rank for rank in generation.ranks if rank.rank == cause.rank), None)
    return Fault(
        generation=generation.number,
        rank=cause.rank,
        at=dead.exited_at if dead else None,
        sentence=cause.sentence,
    )


def _vanished_runner(generation: GenerationView, *, launching: bool) -> Fault | None:
    """While a job is launched for the first time, a runner that cannot start is a failed launch and no fault."""
    if launching or not generation.failed_shares:
        return None
    share = generation.failed_shares[0]
    return Fault(
        generation=generation.number,
        rank=None,
        at=None,
        sentence=f"The runner of generation {generation.number} on {share.node} is gone.",
    )


def _lost_loss(generation: GenerationView) -> Fault | None:
    cause = loss_lost(generation)
    if cause is None:
        return None
    began = [rank.nonfinite_at for rank in generation.ranks if rank.nonfinite_at is not None]
    return Fault(
        generation=generation.number,
        rank=None,
        at=min(began, default=None),
        sentence=cause.sentence,
        lost="its loss: it is not finite any more",
    )


def _missing_node(generation: GenerationView, situation: Situation, now: float) -> Fault | None:
    missing = missing_nodes(generation, situation, now)
    if not missing:
        return None
    first = min(missing, key=lambda node: node.last_heard_at)
    return Fault(
        generation=generation.number, rank=None, at=first.last_heard_at, sentence=f"{first.sentence}.", node=first.name
    )


def _unseen(generation: GenerationView, situation: Situation, now: float) -> Fault | None:
    """Nothing of a job can be seen for long: a human should know, though nothing is stopped for it."""
    silent_s = unseen_for_s(generation, situation)
    if silent_s is None or silent_s < situation.policy.unseen_s:
        return None
    job = situation.job
    if job.state is JobState.LAUNCHING and now - job.state_since <= situation.policy.launching_s:
        return None  # its first launch has its own limit
    cause = node_silent(generation, silent_s)
    return Fault(generation=generation.number, rank=None, at=now - silent_s, sentence=cause.sentence, node=cause.node)
