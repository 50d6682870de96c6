"""Limits and budgets as one value, so that a decision can be replayed with the numbers it was made by."""

from __future__ import annotations

from dataclasses import dataclass, field

from recovery.domain.incident import IncidentState
from recovery.domain.trust import SANE_STEPS


def _default_deadlines() -> dict[IncidentState, float]:
    return {
        IncidentState.DETECTED: 30.0,
        IncidentState.STOPPING: 60.0,
        IncidentState.PLACING: 90.0,
        IncidentState.LAUNCHING: 180.0,
        IncidentState.VERIFYING: 900.0,
        IncidentState.AWAITING_APPROVAL: 3600.0,
        IncidentState.WAITING_FOR_CAPACITY: 3600.0,
        IncidentState.WAITING_FOR_CHECKPOINT: 900.0,
        IncidentState.WAITING_FOR_FENCE: 3600.0,
        IncidentState.PAUSED: 86400.0,
    }


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Seconds and counts. Every state that is no end has a deadline, except `escalated`, which pages."""

    deadlines_s: dict[IncidentState, float] = field(default_factory=_default_deadlines)
    max_attempts: int = 3
    """Relaunches of one incident that may fail before a human is paged."""
    max_plans: int = 12
    """Plans of one incident in all, also those that cost no rung (a busy port)."""
    max_rollbacks: int = 1
    sane_steps: int = SANE_STEPS
    """Steps that must go well after a save, or after a load, before its checkpoint is believed."""
    placing_s: float = 90.0
    launching_s: float = 180.0
    """Limits of a job's first launch."""
    unseen_s: float = 30.0
    """Silence of all of a job's nodes after which a human is asked; nothing is stopped for it."""

    def deadline(self, state: IncidentState, *, now: float) -> float | None:
        limit = self.deadlines_s.get(state)
        return None if limit is None else now + limit
