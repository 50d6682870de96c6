"""Load, decide, save, perform: the thin shell around the pure machines. Celery tasks and the sweep call it.

Reads are not locked. What makes that safe: the save is conditional on the row's version, claims and phases are
conditional updates in the same transaction, and what a decision relies on (proofs, exits, generation numbers) only ever
grows. Whoever loses a race decides anew.
"""

from __future__ import annotations

import logging
import time

from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import F

from recovery import failpoints
from recovery.actuators import Conflict, perform
from recovery.domain.detection import Fault, find_fault
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import Instruction, MarkJob
from recovery.domain.lifecycle import step_job
from recovery.domain.machine import step
from recovery.domain.moves import Outcome, escalate_poisoned
from recovery.domain.situation import Situation
from recovery.incidents import open_or_join
from recovery.models import IncidentRow, Job
from recovery.store import from_json, to_json
from recovery.store.situations import load_situation
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change, ask_to_advance

log = logging.getLogger(__name__)

MAX_TRANSITIONS = 20
"""Per call; the next sweep goes on. More than the machine has states, so that only a bug meets it."""

MAX_CONFLICTS = 5
"""Decisions about a job that the rows refuse, one after the other, before a human is told."""

MAX_ADVANCE_ATTEMPTS = 5
"""Steps of one incident that may begin without being saved (their worker died of it) before a human is asked."""


def advance_incident(incident_id: str, *, fleet: FleetSnapshot | None = None) -> None:
    """Move an incident as far as it goes now. Safe to call any number of times, from anywhere, at once.

    `fleet` may be a moment old. It serves the first look alone: after that, we may have changed it.
    """
    for _ in range(MAX_TRANSITIONS):
        try:
            if not _advance_incident_once(incident_id, fleet):
                return
        except (Conflict, IntegrityError) as err:
            log.info("incident=%s decided anew: %s", incident_id, err)
        fleet = None


def _advance_incident_once(incident_id: str, fleet: FleetSnapshot | None) -> bool:
    row = IncidentRow.objects.select_related("job").filter(pk=incident_id, job__isnull=False).first()
    if row is None or row.job is None or row.ended or row.job.behind_since is not None:
        return False
    incident = from_json(row.body, Incident)
    now = time.time()
    try:
        situation = load_situation(row.job, incident=incident, command=row.command, now=now, fleet=fleet)
        outcome = _decide(row, incident, situation, now)
    except DatabaseError:
        raise
    except Exception:
        _count_attempt(row)  # a bug that no deadline would ever end; the sweep tries again until a human is asked
        raise
    if not row.command and outcome == Outcome(incident=incident):
        return False
    counted = _count_attempt(row)
    failpoints.hit(f"incident.{incident.state.value}.before_save")
    try:
        with transaction.atomic():
            _save(row, outcome, now)
            perform(outcome.instructions, job=row.job, now=now, incident_id=row.pk)
    except Conflict:
        if counted:
            _forgive_attempt(row)
        raise
    failpoints.hit(f"incident.{outcome.incident.state.value}.after_save")
    if outcome.incident.ended:
        advance_job(row.job.pk)
    return not outcome.incident.ended


def _decide(row: IncidentRow, incident: Incident, situation: Situation, now: float) -> Outcome:
    if row.advance_attempts >= MAX_ADVANCE_ATTEMPTS and incident.state is not IncidentState.ESCALATED:
        return escalate_poisoned(incident, situation, now, attempts=row.advance_attempts)
    return step(incident, situation, now)


def _count_attempt(row: IncidentRow) -> bool:
    """Count a step before it is saved. Workers that come at once count once, or a crowd would look deadly."""
    seen = IncidentRow.objects.filter(pk=row.pk, version=row.version, advance_attempts=row.advance_attempts)
    return bool(seen.update(advance_attempts=row.advance_attempts + 1))


def _forgive_attempt(row: IncidentRow) -> None:
    """The incident has changed meanwhile: that step was late, not deadly. One that the world forbids still counts."""
    changed = IncidentRow.objects.filter(pk=row.pk, advance_attempts__gt=0).exclude(version=row.version)
    changed.update(advance_attempts=F("advance_attempts") - 1)


def _save(row: IncidentRow, outcome: Outcome, now: float) -> None:
    """The conditional save; raises `Conflict` if somebody else was faster."""
    incident = outcome.incident
    saved = IncidentRow.objects.filter(pk=row.pk, version=row.version, ended=False).update(
        state=incident.state.value,
        ended=incident.ended,
        ended_at=now if incident.ended else None,
        deadline_at=incident.deadline_at,
        body=to_json(incident),
        command="",
        advance_attempts=0,
        version=row.version + 1,
    )
    if not saved:
        raise Conflict(f"{row.pk} was advanced by another worker")
    seq = append_entries(row.pk, outcome.entries)
    announce(f"incident:{row.pk}", seq)


def advance_job(job_id: str, *, fleet: FleetSnapshot | None = None) -> None:
    """Move a job along its faultless life, unless an incident has it in hand. `fleet` as for `advance_incident`."""
    conflicts = 0
    for _ in range(MAX_TRANSITIONS):
        try:
            if not _advance_job_once(job_id, fleet):
                return
        except (Conflict, IntegrityError) as err:
            log.info("job=%s decided anew: %s", job_id, err)
            conflicts += 1
            if conflicts == MAX_CONFLICTS:
                _cannot_go_on(job_id, err)
                return
        fleet = None


def _cannot_go_on(job_id: str, err: Exception) -> None:
    """So many races in a row are none: the rows forbid what was decided. A human is told, the sweep tries again."""
    reason = f"It cannot go on: what was decided for it is refused each time ({err})."[:1000]
    if Job.objects.filter(pk=job_id).exclude(reason=reason).update(reason=reason):
        log.error("page: job=%s %s", job_id, reason)
        announce_change(f"job:{job_id}")


def _advance_job_once(job_id: str, fleet: FleetSnapshot | None) -> bool:
    job = Job.objects.filter(pk=job_id).first()
    if job is None or job.behind_since is not None or IncidentRow.objects.filter(job=job, ended=False).exists():
        return False
    now = time.time()
    situation = load_situation(job, now=now, fleet=fleet)
    fault = find_fault(situation, now)
    if fault is not None:
        _open_incident(job, fault, now)
        return False
    outcome = step_job(situation, now)
    if all(_says_nothing_new(job, instruction) for instruction in outcome.instructions):
        return False
    state = job.state
    with transaction.atomic():
        saved = Job.objects.filter(pk=job.pk, version=job.version).update(
            version=F("version") + 1, launch_attempts=F("launch_attempts") + int(outcome.failed_launch)
        )
        if not saved:
            raise Conflict(f"{job.id} was advanced by another worker")
        perform(outcome.instructions, job=job, now=now)
    return job.state != state


def _open_incident(job: Job, fault: Fault, now: float) -> None:
    """A fault that ingest could not act on when its message came, for example while an older incident ended."""
    with transaction.atomic():
        if not Job.objects.filter(pk=job.pk, version=job.version).update(version=F("version") + 1):
            raise Conflict(f"{job.id} has changed since the fault was looked for")
        row = open_or_join(
            job,
            generation=fault.generation,
            rank=fault.rank,
            sentence=fault.sentence,
            fault_at=now if fault.at is None else fault.at,
            node=fault.node,
            lost=fault.lost,
        )
        if row is not None:
            ask_to_advance(incident=row.pk)


def _says_nothing_new(job: Job, instruction: Instruction) -> bool:
    return isinstance(instruction, MarkJob) and (instruction.state.value, instruction.reason) == (job.state, job.reason)
