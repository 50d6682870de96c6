"""The one-look summary: what needs a human, how jobs and nodes stand, and whether the control plane itself works."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from django.db import connection
from django.db.models import Count

from recovery.domain.silence import OBSERVER_GONE_AFTER_S, Contact
from recovery.models import Claim, Job
from recovery.queries.drills import DrillView, list_drills
from recovery.queries.incidents import IncidentSummary, list_incidents
from recovery.queries.moment import moment
from recovery.queries.nodes import NodeState, list_nodes
from recovery.store.situations import CONTROL_PLANE, load_observers

SWEEP_LATE_S = 60.0
"""The sweep runs every 2 s; silent for longer than this, nothing drives recovery any more."""


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    database_latency_s: float
    """Time of one trivial query."""
    last_sweep_age_s: float | None
    """None if no sweep was ever done."""
    sweep_late: bool
    agents_connected: int
    agents_known: int
    observers: int
    """Web processes that listen to agents now."""
    observer_lag_s: float
    """By how much the slowest of them was held up lately; silences are judged shorter by it."""
    breaker: str | None
    """The open control-plane incident: while there is one, no node's silence is believed."""

    @property
    def ok(self) -> bool:
        return not self.sweep_late and self.breaker is None


@dataclass(frozen=True, kw_only=True)
class Overview:
    at: float
    open_incidents: tuple[IncidentSummary, ...]
    incidents_needing_human: int
    jobs_by_state: dict[str, int]
    nodes_by_state: dict[str, int]
    """Every state, also those of no node."""
    nodes_by_contact: dict[str, int]
    """seen, suspect, lost, unobserved."""
    lost_nodes: tuple[str, ...]
    spare_nodes: tuple[str, ...]
    control_plane: ControlPlane
    last_drill: DrillView | None
    last_incident: IncidentSummary | None


def overview(*, now: float | None = None) -> Overview:
    """All of the overview page, in a fixed number of queries."""
    now = moment(now)
    open_incidents = list_incidents(ended=False, now=now)
    nodes = list_nodes(now=now)
    states = Counter(node.state for node in nodes)
    contacts = Counter(node.contact for node in nodes)
    jobs = Job.objects.order_by().values_list("state").annotate(count=Count("pk"))
    last_incident = next(iter(list_incidents(limit=1, now=now)), None)
    return Overview(
        at=now,
        open_incidents=open_incidents,
        incidents_needing_human=sum(incident.needs_human for incident in open_incidents),
        jobs_by_state=dict(jobs),
        nodes_by_state={state.value: states[state] for state in NodeState},
        nodes_by_contact={contact.value: contacts[contact] for contact in Contact},
        lost_nodes=tuple(node.name for node in nodes if node.contact is Contact.LOST),
        spare_nodes=tuple(node.name for node in nodes if node.spare),
        control_plane=_control_plane(
            now=now,
            agents_connected=sum(node.connected for node in nodes),
            agents_known=len(nodes),
            breaker=next((one.id for one in open_incidents if one.kind == CONTROL_PLANE), None),
        ),
        last_drill=next(iter(list_drills(limit=1)), None),
        last_incident=last_incident,
    )


def _control_plane(*, now: float, agents_connected: int, agents_known: int, breaker: str | None) -> ControlPlane:
    started = time.perf_counter()
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    latency_s = time.perf_counter() - started
    swept_at = Claim.objects.filter(name="sweep").values_list("last_done_at", flat=True).first()
    age_s = None if swept_at is None else max(0.0, now - swept_at)
    listening = [seen for seen in load_observers() if now - seen.beat_at <= OBSERVER_GONE_AFTER_S]
    return ControlPlane(
        database_latency_s=latency_s,
        last_sweep_age_s=age_s,
        sweep_late=age_s is None or age_s > SWEEP_LATE_S,
        agents_connected=agents_connected,
        agents_known=agents_known,
        observers=len(listening),
        observer_lag_s=max((seen.lag_s for seen in listening), default=0.0),
        breaker=breaker,
    )
