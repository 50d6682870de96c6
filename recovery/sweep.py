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

from django.db import close_old_connections
from django.db.models import Q

from recovery import absence, engine
from recovery.breaker import advance_breaker
from recovery.domain.instructions import JOB_ENDS
from recovery.drill_outcomes import settle_drill
from recovery.fencing import look_after_fences, redrive
from recovery.models import Claim, Drill, FenceAction, IncidentRow, Job
from recovery.probes import ask_for_probes
from recovery.strays import settle_strays

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
CLAIM_S = 6.0
"""A sweep whose process died is taken over after this long; two sweeps at once would do no harm."""


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
        absence.note_presence()
        sweep()
    finally:
        Claim.objects.filter(name="sweep", holder=holder).update(until=0.0, last_done_at=time.time())
    return True


def sweep() -> None:
    """Advance every open incident, job and drill; one that fails is logged and does not hold up the others."""
    ends = [state.value for state in JOB_ENDS]
    _guarded("breaker", "")  # before anything is concluded from a node's silence
    _guarded("probes", "")
    _guarded("fences", "")
    for action_id in FenceAction.objects.filter(state__in=("requested", "running")).values_list("pk", flat=True):
        _guarded("fence", action_id)
    for job_id in Job.objects.filter(behind_since__isnull=False).values_list("pk", flat=True):
        _guarded("stray", job_id)
    for incident_id in IncidentRow.objects.filter(ended=False, job__isnull=False).values_list("pk", flat=True):
        _guarded("incident", incident_id)
    unsettled = ~Q(state__in=ends) | Q(claimed_nodes__isnull=False) | Q(generations__wanted__in=("prepare", "run"))
    for job_id in Job.objects.filter(unsettled).distinct().values_list("pk", flat=True):
        _guarded("job", job_id)
    for drill_id in Drill.objects.filter(ended=False).values_list("pk", flat=True):
        _guarded("drill", drill_id)


_ADVANCE: dict[str, Callable[[str], object]] = {
    "breaker": lambda _: advance_breaker(),
    "probes": lambda _: ask_for_probes(),
    "fences": lambda _: look_after_fences(),
    "fence": redrive,
    "stray": settle_strays,
    "incident": engine.advance_incident,
    "job": engine.advance_job,
    "drill": settle_drill,
}


def _guarded(kind: str, identifier: str) -> None:
    try:
        _ADVANCE[kind](identifier)
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
