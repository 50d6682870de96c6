"""In which states an incident waits for a person: read by the queries of incidents and of jobs."""

from __future__ import annotations

from recovery.domain.breaker import BreakerState
from recovery.domain.incident import IncidentState

NEEDS_HUMAN: frozenset[str] = frozenset(
    {
        IncidentState.ESCALATED.value,
        IncidentState.AWAITING_APPROVAL.value,
        IncidentState.PAUSED.value,
        IncidentState.WAITING_FOR_FENCE.value,
        BreakerState.OPEN.value,
        BreakerState.CONTACT_RESTORED.value,
    }
)
