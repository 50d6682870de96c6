"""Celery tasks: each takes an id, calls one function, and may run twice. The row knows the state; a task is a hint."""

from __future__ import annotations

from celery import shared_task

from recovery import absence, engine
from recovery import sweep as sweeping


@shared_task
def advance_incident(incident_id: str) -> None:
    absence.note_presence()
    engine.advance_incident(incident_id)


@shared_task
def advance_job(job_id: str) -> None:
    absence.note_presence()
    engine.advance_job(job_id)


@shared_task
def sweep() -> None:
    sweeping.sweep_if_due()
