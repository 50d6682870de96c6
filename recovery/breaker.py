"""The breaker as rows: opened by the sweep before anything is concluded from silence, re-armed by a person."""

from __future__ import annotations

import logging
import time

from django.db import IntegrityError, transaction
from django.db.models import F

from recovery.domain.breaker import BreakerOutcome, ControlPlaneIncident, rearm, step_breaker
from recovery.errors import CommandRefused, NotFound
from recovery.ids import fresh_id
from recovery.models import IncidentRow
from recovery.store import from_json, to_json
from recovery.store.situations import CONTROL_PLANE, load_fleet
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change

log = logging.getLogger(__name__)


def advance_breaker() -> None:
    """Look at the whole fleet once. Safe to call from anywhere, at any time."""
    now = time.time()
    row = IncidentRow.objects.filter(kind=CONTROL_PLANE, ended=False).first()
    current = None if row is None else from_json(row.body, ControlPlaneIncident)
    outcome = step_breaker(current, load_fleet(now), fresh_id=fresh_id("inc"), now=now)
    if outcome.incident is None or outcome.incident == current:
        return
    try:
        with transaction.atomic():
            _save(row, outcome, now)
    except IntegrityError:
        log.info("the breaker was opened by another worker")
        return
    if outcome.page:
        log.error("page: incident=%s %s", outcome.incident.id, outcome.page)


def rearm_breaker(incident_id: str, *, by: str) -> IncidentRow:
    """Believe in absence again. Raises `NotFound`, or `CommandRefused` if it is re-armed already or is a job's."""
    with transaction.atomic():
        IncidentRow.objects.filter(pk=incident_id).update(version=F("version"))  # taken before it is read
        row = IncidentRow.objects.filter(pk=incident_id).first()
        if row is None:
            raise NotFound(f"There is no incident {incident_id}.")
        if row.kind != CONTROL_PLANE:
            raise CommandRefused(f"Incident {incident_id} is a job's: only one of the control plane is re-armed.")
        if row.ended:
            raise CommandRefused(f"Incident {incident_id} has ended: the breaker is re-armed already.")
        now = time.time()
        _save(row, rearm(from_json(row.body, ControlPlaneIncident), by=by, now=now), now)
    row.refresh_from_db()
    return row


def _save(row: IncidentRow | None, outcome: BreakerOutcome, now: float) -> None:
    incident = outcome.incident
    assert incident is not None
    if row is None:
        IncidentRow.objects.create(
            id=incident.id,
            kind=CONTROL_PLANE,
            state=incident.state.value,
            opened_at=incident.opened_at,
            body=to_json(incident),
        )
    else:
        saved = IncidentRow.objects.filter(pk=row.pk, version=row.version, ended=False).update(
            state=incident.state.value,
            ended=incident.ended,
            ended_at=now if incident.ended else None,
            body=to_json(incident),
            version=F("version") + 1,
        )
        if not saved:
            return
    announce(f"incident:{incident.id}", append_entries(incident.id, outcome.entries))
    announce_change("fleet")
