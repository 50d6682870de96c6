"""The truth of the pipeline: every two seconds, look at everything that is open. Messages only make it faster.

It runs as a beat entry and from a timer in each worker that needs no broker; a claim in the database picks one.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from django.db import InterfaceError, OperationalError, close_old_connections
from django.db.models import Q

from recovery import absence, engine
from recovery.breaker import advance_breaker
from recovery.checkpoints import look_after_checkpoints
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.instructions import JOB_ENDS
from recovery.drill_outcomes import settle_drill
from recovery.fencing import look_after_fences, redrive
from recovery.models import Claim, Drill, FenceAction, IncidentRow, Job
from recovery.probes import ask_for_probes
from recovery.store.situations import load_fleet
from recovery.strays import settle_strays

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
CLAIM_S = 6.0
"""A sweep whose process died is taken over after this long; two sweeps at once would do no harm."""
FLEET_COUNTS_FOR_S = 1.0
"""One look at the fleet serves all jobs for so long: a thousand nodes cost a tenth of a second."""
AWAY_AFTER_FAILURES = 3


def sweep_if_due() -> bool:
    """Sweep, unless somebody did within the interval or is at it. Returns whether it swept."""
    now = time.time()
    holder = f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"
    Claim.objects.get_or_create(name="sweep", defaults={"holder": "", "until": 0.0})
    due = Q(last_done_at=None) | Q(last_done_at__lt=now - INTERVAL_S * 0.75) | Q(last_done_at__gt=now)
    taken = Claim.objects.filter(due, name="sweep", until__lt=now).update(holder=holder, until=now + CLAIM_S)
    if not taken:
        return False
    try:
        if absence.somebody_listens():
            absence.note_presence()
            sweep()
        else:
            log.warning("sweep: no web process hears agents; nothing is decided before one does")
    finally:
        Claim.objects.filter(name="sweep", holder=holder).update(until=0.0, last_done_at=time.time())
    return True


def sweep() -> None:
    """Advance every open incident, job and drill; one that fails is logged and does not hold up the others."""
    look = _Look()
    ends = [state.value for state in JOB_ENDS]
    look.at("breaker", "", advance_breaker)  # before anything is concluded from a node's silence
    look.at("probes", "", ask_for_probes)
    look.at("fences", "", look_after_fences)
    for action_id in FenceAction.objects.filter(state__in=("requested", "running")).values_list("pk", flat=True):
        look.at("fence", action_id, partial(redrive, action_id))
    for job_id in Job.objects.filter(behind_since__isnull=False).values_list("pk", flat=True):
        look.at("stray", job_id, partial(settle_strays, job_id))
    for incident_id in IncidentRow.objects.filter(ended=False, job__isnull=False).values_list("pk", flat=True):
        look.at("incident", incident_id, partial(look.advance, engine.advance_incident, incident_id))
    unsettled = ~Q(state__in=ends) | Q(claimed_nodes__isnull=False) | Q(generations__wanted__in=("prepare", "run"))
    for job_id in Job.objects.filter(unsettled).distinct().values_list("pk", flat=True):
        look.at("job", job_id, partial(look.advance, engine.advance_job, job_id))
    for job_id in Job.objects.exclude(state__in=ends).values_list("pk", flat=True):
        look.at("checkpoints", job_id, partial(look_after_checkpoints, job_id))
    for drill_id in Drill.objects.filter(ended=False).values_list("pk", flat=True):
        look.at("drill", drill_id, partial(settle_drill, drill_id))


class _Advance(Protocol):
    def __call__(self, identifier: str, /, *, fleet: FleetSnapshot | None) -> None: ...


class _Look:
    """One sweep: the fleet is read once for many jobs, and a database that is away ends it early."""

    def __init__(self) -> None:
        self._fleet: FleetSnapshot | None = None
        self._read_at = 0.0
        self._failures = 0
        """Of the database, one after the other."""

    def advance(self, advance: _Advance, identifier: str) -> None:
        """Let the engine look at one incident or job."""
        if self._fleet is None or time.monotonic() - self._read_at > FLEET_COUNTS_FOR_S:
            self._fleet, self._read_at = load_fleet(time.time()), time.monotonic()
        advance(identifier, fleet=self._fleet)

    def at(self, kind: str, identifier: str, work: Callable[[], object]) -> None:
        try:
            work()
            self._failures = 0
        except (OperationalError, InterfaceError):
            self._failures += 1
            if self._failures >= AWAY_AFTER_FAILURES:
                raise  # each further try could wait for the database as long as this one did
            log.warning("sweep: %s=%s: the database did not answer", kind, identifier, exc_info=True)
        except Exception:
            log.exception("sweep: %s=%s could not be advanced; trying again in %.0f s", kind, identifier, INTERVAL_S)


class SweepTimer(threading.Thread):
    """Calls `sweep_if_due` for as long as the worker lives."""

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__(name="sweep-timer", daemon=True)
        self._interval_s = interval_s

    def run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            close_old_connections()
            try:
                sweep_if_due()
            except Exception:
                log.exception("sweep timer: trying again in %.0f s", self._interval_s)
