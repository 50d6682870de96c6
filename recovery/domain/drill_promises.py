"""Whether a drill kept its promise: two judges, one for a recovered job and one for a job that should not notice.

Both are asked again and again by the sweep until they answer; no answer means that it is not decided yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from recovery.domain.continuity import VerdictKind
from recovery.domain.incident import IncidentState
from recovery.domain.timeline import join_names

INCIDENT_WITHIN_S = 30.0
"""A fault that breaks the job must have opened an incident by then: silence is called so after 10 s."""
UNDONE_WITHIN_S = 120.0
"""After its time a fault must be reported as undone by then: an agent's longest pause between tries is 30 s."""
SETTLE_S = 15.0
"""After the undoing this much has to go well before a job is called unharmed."""
SETTLED_WITHIN_S = 90.0
"""What was kept in outboxes meanwhile must have arrived by then."""

PROVEN = (VerdictKind.BIT_EQUAL.value, VerdictKind.STATE_EQUAL.value)


class DrillState(StrEnum):
    """How far a drill is: on its way to the fault, between the fault and a judgement, or at an end."""

    REQUESTED = "requested"
    ARMED = "armed"
    APPLIED = "applied"
    UNDONE = "undone"
    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclass(frozen=True, kw_only=True)
class DrillOutcome:
    """How a drill ended: its state, why it did not pass, and the numbers that show it."""

    state: str
    """passed, failed, refused or expired."""
    reasons: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.state == "passed"


@dataclass(frozen=True, kw_only=True)
class FaultProgress:
    """How far a drill's fault has come. Times are Unix seconds on the server's clock."""

    not_after: float
    """The agent does not apply it later."""
    duration_s: float
    is_undone: bool
    """Whether its end is reported."""
    applied_at: float | None = None
    undone_at: float | None = None
    away_s: float = 0.0
    """Time in which nobody looked: no limit counts it."""
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class RecoveryEnd:
    """The incident that a drill caused, as far as it has come."""

    state: str
    ended: bool
    within_s: float
    """The promise."""
    total_s: float | None = None
    continuity: str = ""
    steps_lost: int | None = None
    fences: Mapping[str, str] = field(default_factory=dict)
    """Node -> kind of proof that nothing of the old generation can act there."""
    fence_s: float | None = None
    """From the fault to the last of them."""
    rolled_back: tuple[int, ...] = ()
    """Generations that resumed with broken continuity on the way."""
    lasted_s: float | None = None
    """From the fault to the incident's end, whatever the end was."""
    escalation: str = ""
    """What a person was asked for on the way."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What the server holds of one rank since just before the drill."""

    rank: int
    last_step: int | None
    last_at: float | None
    steps: int
    missing: int
    """Steps between the first and the last that nobody told of."""
    longest_gap_s: float
    finished: bool = False


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What became of a job that should not notice a drill."""

    generation_before: int
    generation: int
    ended: bool
    """The job has ended meanwhile."""
    ranks: tuple[RankRecord, ...]
    incidents: tuple[str, ...] = ()
    """States of those opened against the job since the drill was asked for."""
    open_incident: bool = False
    steps_lost: int = 0
    gaps: Mapping[str, int] = field(default_factory=dict)
    """Node -> how often its agent had to tell of lost messages since."""
    renewed_outboxes: tuple[str, ...] = ()
    """Nodes whose agents lost what they had kept for the server."""
    stall_limit_s: float = 15.0
    """A rank without a step for longer stood still."""
    silent_s: float = 0.0
    may_wait: bool = False
    """The asker knew that nobody might see the job for a while: a false alarm breaks no promise."""


def too_late(fault: FaultProgress, *, now: float, needs_incident: bool, has_incident: bool) -> DrillOutcome | None:
    """The end of a drill whose fault never came, caused nothing, or was never undone."""
    at = now - fault.away_s
    if fault.applied_at is None:
        if has_incident or at <= fault.not_after + INCIDENT_WITHIN_S:
            return None
        return DrillOutcome(state="expired", reasons=("The fault was not applied in time.",))
    if needs_incident and not has_incident and at > fault.applied_at + INCIDENT_WITHIN_S:
        return DrillOutcome(state="failed", reasons=("The fault was applied, but no incident was opened.",))
    overdue = at > fault.applied_at + fault.duration_s + UNDONE_WITHIN_S
    if fault.is_undone and fault.undone_at is None and overdue:
        words = (
            f"Nobody has reported within {UNDONE_WITHIN_S:.0f} s after its time that the fault was undone: "
            "look at the node."
        )
        return DrillOutcome(state="failed", reasons=(words,))
    return None


CANCELLED = "Its incident was cancelled before it had recovered."
"""Where it is the only reason, nothing is known against the promise."""


def judge_recovery(end: RecoveryEnd, fault: FaultProgress) -> DrillOutcome | None:
    """Judge a drill that promised recovery, once its incident has ended and its fault is undone."""
    escalated = end.state == IncidentState.ESCALATED.value
    if not (end.ended or escalated) or (fault.is_undone and fault.undone_at is None):
        return None
    reasons = []
    cancelled = end.state == IncidentState.CANCELLED.value
    if cancelled:
        reasons.append(CANCELLED)
        if end.lasted_s is not None and end.lasted_s > end.within_s:
            reasons.append(f"It was under way for {end.lasted_s:.0f} s; promised were {end.within_s:.0f} s.")
        if end.escalation:
            reasons.append(f"It had asked for a person before: {end.escalation}")
    elif end.state != IncidentState.RECOVERED.value:
        reasons.append(f"The incident ended as {end.state}, not recovered.")
    elif end.total_s is None or end.total_s > end.within_s:
        reasons.append(f"Recovery took {end.total_s} s; promised were {end.within_s:.0f} s.")
    if end.continuity not in PROVEN and (end.continuity or not cancelled):
        reasons.append(f"Continuity was not proven ({end.continuity or 'no verdict'}).")
    for number in end.rolled_back:
        reasons.append(f"Generation {number} resumed with broken continuity; recovery had to roll back.")
    numbers = {
        "steps_lost": end.steps_lost,
        "recovered_s": end.total_s,
        "continuity": end.continuity,
        "fence": dict(end.fences),
        "fence_s": end.fence_s,
    }
    return DrillOutcome(state="failed" if reasons else "passed", reasons=tuple(reasons), numbers=numbers)


def judge_unharmed(job: JobRecord, fault: FaultProgress, *, now: float) -> DrillOutcome | None:
    """Judge a drill that promised no harm, a while after its fault was undone.

    What may still arrive (late steps) is waited for; what cannot be mended ends it.
    """
    if fault.undone_at is None or now - fault.undone_at < SETTLE_S:
        return None
    patience = now - fault.away_s - fault.undone_at < SETTLED_WITHIN_S
    still_to_come = _still_to_come(job, fault.undone_at)
    if (still_to_come or job.open_incident) and patience:
        return None
    reasons = [*_harm(job), *still_to_come]
    return DrillOutcome(state="failed" if reasons else "passed", reasons=tuple(reasons), numbers=_numbers(job))


def _still_to_come(job: JobRecord, undone_at: float) -> list[str]:
    words = [
        f"Of rank {rank.rank}, {rank.missing} steps before step {rank.last_step} never arrived."
        for rank in job.ranks
        if rank.missing
    ]
    late = [rank for rank in job.ranks if not rank.finished and (rank.last_at is None or rank.last_at <= undone_at)]
    if late and job.generation == job.generation_before:
        names = join_names([f"rank {rank.rank}" for rank in late])
        words.append(f"After the fault was undone, nothing was heard of a step of {names}.")
    return words


def _harm(job: JobRecord) -> list[str]:
    words = []
    if job.generation != job.generation_before:
        words.append(f"The job was relaunched: generation {job.generation} after {job.generation_before}.")
    if job.ended and not all(rank.finished for rank in job.ranks):
        words.append("The job ended meanwhile.")
    counted = [state for state in job.incidents if not (job.may_wait and state == IncidentState.FALSE_ALARM.value)]
    if counted:
        words.append(f"An incident was opened against the job: {join_names(counted)}.")
    for rank in job.ranks:
        if rank.longest_gap_s > job.stall_limit_s:
            words.append(f"Rank {rank.rank} stood still for {rank.longest_gap_s:.1f} s.")
    for node, count in sorted(job.gaps.items()):
        if count:
            words.append(f"The agent of {node} had to drop messages {count} time{'s' if count > 1 else ''}.")
    for node in job.renewed_outboxes:
        words.append(f"The agent of {node} lost what it had kept for the server.")
    return words


def _numbers(job: JobRecord) -> dict[str, Any]:
    lost = sum(rank.missing for rank in job.ranks) + sum(job.gaps.values()) + len(job.renewed_outboxes)
    return {
        "steps_lost": job.steps_lost,
        "events_lost": lost,
        "incidents": len(job.incidents),
        "steps_made": min((rank.steps for rank in job.ranks), default=0),
        "largest_step_gap_s": round(max((rank.longest_gap_s for rank in job.ranks), default=0.0), 3),
        "silent_s": round(job.silent_s, 3),
    }
