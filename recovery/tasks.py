"""Celery tasks: each takes an id, calls one function, and may run twice. The row knows the state; a task is a hint."""

from __future__ import annotations

from celery import shared_task

from recovery import absence, engine, fencing
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


@shared_task(soft_time_limit=fencing.TASK_LIMIT_S, time_limit=fencing.TASK_LIMIT_S + 10)
def fence_node(action_id: str) -> None:
    fencing.drive_fence_action(action_id)
