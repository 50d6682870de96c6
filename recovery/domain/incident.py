"""An incident as a value, and the one table of states it may move through."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from recovery.domain.plan import RecoveryPlan


class IncidentState(StrEnum):
    """The first condition that is not met yet, or a way to stand beside the line, or an end."""

    DETECTED = "detected"
    STOPPING = "stopping"
    PLACING = "placing"
    LAUNCHING = "launching"
    VERIFYING = "verifying"
    AWAITING_APPROVAL = "awaiting_approval"
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    WAITING_FOR_CHECKPOINT = "waiting_for_checkpoint"
    WAITING_FOR_FENCE = "waiting_for_fence"
    """A node cannot be seen, and nothing proves that it is empty: a human was paged, nothing is relaunched."""
    PAUSED = "paused"
    ESCALATED = "escalated"
    RECOVERED = "recovered"
    CANCELLED = "cancelled"
    FALSE_ALARM = "false_alarm"
    CLOSED_BY_OPERATOR = "closed_by_operator"


S = IncidentState

MAIN_LINE = (S.DETECTED, S.STOPPING, S.PLACING, S.LAUNCHING, S.VERIFYING, S.RECOVERED)
ENDS = frozenset({S.RECOVERED, S.CANCELLED, S.FALSE_ALARM, S.CLOSED_BY_OPERATOR})

_ASIDE = frozenset({S.PAUSED, S.ESCALATED, S.WAITING_FOR_FENCE, S.CANCELLED, S.CLOSED_BY_OPERATOR})
"""From wherever: a job that is to be stopped waits for a fence whatever its incident had come to."""

TRANSITIONS: dict[IncidentState, frozenset[IncidentState]] = {
    S.DETECTED: frozenset({S.STOPPING, S.AWAITING_APPROVAL, S.FALSE_ALARM}) | _ASIDE,
    S.STOPPING: frozenset({S.PLACING, S.FALSE_ALARM}) | _ASIDE,
    S.PLACING: frozenset({S.STOPPING, S.LAUNCHING, S.WAITING_FOR_CAPACITY, S.WAITING_FOR_CHECKPOINT}) | _ASIDE,
    S.LAUNCHING: frozenset({S.STOPPING, S.VERIFYING}) | _ASIDE,
    S.VERIFYING: frozenset({S.STOPPING, S.RECOVERED}) | _ASIDE,
    S.AWAITING_APPROVAL: frozenset({S.STOPPING, S.FALSE_ALARM}) | _ASIDE,
    S.WAITING_FOR_CAPACITY: frozenset({S.PLACING}) | _ASIDE,
    S.WAITING_FOR_CHECKPOINT: frozenset({S.PLACING}) | _ASIDE,
    S.WAITING_FOR_FENCE: (frozenset({S.STOPPING, S.FALSE_ALARM}) | _ASIDE) - {S.WAITING_FOR_FENCE},
    S.PAUSED: (frozenset({S.DETECTED, S.STOPPING}) | _ASIDE) - {S.PAUSED},
    S.ESCALATED: (frozenset({S.STOPPING, S.RECOVERED}) | _ASIDE) - {S.ESCALATED, S.PAUSED},
    S.RECOVERED: frozenset(),
    S.CANCELLED: frozenset(),
    S.FALSE_ALARM: frozenset(),
    S.CLOSED_BY_OPERATOR: frozenset(),
}


class CauseKind(StrEnum):
    """What broke, by class of evidence."""

    RANK_KILLED = "rank_killed"
    """A rank was ended by a signal."""
    RANK_FAILED = "rank_failed"
    """A rank exited with an error of its own."""
    EARLY_EXIT = "early_exit"
    """A rank exited with code 0 before its last step."""
    LAUNCH_FAILED = "launch_failed"
    """A generation could not be started."""
    RUNNER_LOST = "runner_lost"
    """A node's runner ended, and no end of a rank is known."""
    NODE_LOST = "node_lost"
    """A node is silent, and a second witness misses it too."""
    LOSS_NOT_FINITE = "loss_not_finite"
    """Nothing died, but a rank's loss has been NaN or infinite for several steps."""
    NODE_SILENT = "node_silent"
    """None of the job's nodes can be seen: whether it trains is not known."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What broke, in a sentence, and what only died of it."""

    kind: CauseKind
    rank: int | None
    node: str | None
    sentence: str
    tied_with: tuple[int, ...] = ()
    """Other ranks whose evidence is as good and as early; a tie is called a tie."""
    cascade: tuple[int, ...] = ()
    """Ranks that died of it."""
    witnesses: tuple[tuple[str, str], ...] = ()
    """Of a node that is gone: kind and sentence of each witness that misses it."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One story from fault to receipt. Times are Unix seconds on the server's clock."""

    id: str
    job: str
    broken_generation: int
    state: IncidentState
    opened_at: float
    fault_at: float
    """When the fault happened: the agent's time, corrected for its clock's offset."""
    state_since: float
    deadline_at: float | None
    cause: Cause | None = None
    drill: str | None = None
    reached_step: int | None = None
    """Highest step that any rank had completed before the fault."""
    fenced_at: float | None = None
    plan: RecoveryPlan | None = None
    run_ordered_at: float | None = None
    first_step_at: float | None = None
    attempt: int = 0
    """Relaunches that cost a rung; a busy port costs none."""
    plans_made: int = 0
    rollbacks: int = 0
    roll_back_before: int | None = None
    """Set after a broken verdict: only checkpoints before this step are considered."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes that could not prepare a generation of this incident; taken again only as the last resort."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes on which a relaunch died; taken again only if there is no other."""
    escalation: str = ""
    stop_ordered: bool = False
    """The broken generation is wanted gone; False while it may be healthy and only cannot be seen."""
    version: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ENDS
