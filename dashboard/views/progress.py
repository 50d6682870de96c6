"""The progress line of an incident: the main line of states with the time spent in each."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.incident import MAIN_LINE, IncidentState
from recovery.queries import IncidentSummary


@dataclass(frozen=True, kw_only=True)
class ProgressStep:
    state: str
    standing: str
    """done, now, held (the incident stands beside the line here), ahead; of an incident that ended unrecovered, ended
    where it left the line and skipped for what would have come."""
    seconds: float | None
    """Spent in it in all; None if it was never entered."""
    started_at: float | None
    """Of the phase that is open now; None otherwise."""
    times: int
    """How often it was entered: more than once after a failed attempt."""
    limit_s: float | None
    over_limit: bool


def progress_of(incident: IncidentSummary) -> tuple[ProgressStep, ...]:
    """One step per state of the main line, the end included."""
    order = [state.value for state in MAIN_LINE]
    reached = _reached(incident, order)
    return tuple(_step(incident, state, index=index, reached=reached) for index, state in enumerate(order))


def _reached(incident: IncidentSummary, order: list[str]) -> int:
    """Index of the step that the incident stands at; beside the line, the last one that it was in."""
    if incident.state in order:
        return order.index(incident.state)
    return max((order.index(phase.state) for phase in incident.phases[-2:] if phase.state in order), default=0)


def _step(incident: IncidentSummary, state: str, *, index: int, reached: int) -> ProgressStep:
    phases = [phase for phase in incident.phases if phase.state == state]
    open_now = next((phase for phase in phases if phase.ended_at is None and not incident.ended), None)
    if index < reached or incident.state == IncidentState.RECOVERED:
        standing = "done"
    elif index > reached:
        standing = "skipped" if incident.ended else "ahead"
    elif incident.ended:
        standing = "ended"
    else:
        standing = "now" if incident.state == state else "held"
    return ProgressStep(
        state=state,
        standing=standing,
        seconds=sum(phase.seconds for phase in phases) if phases else None,
        started_at=open_now.started_at if open_now else None,
        times=len(phases),
        limit_s=phases[-1].limit_s if phases else None,
        over_limit=any(phase.over_limit for phase in phases),
    )
