"""The Celery application: `celery -A dashboard.celery worker` and `... beat` start from here."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_process_init

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

app = Celery("everstep")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@worker_process_init.connect
def start_sweep_timer(**_: Any) -> None:
    """Sweep from inside each process of the pool too, so that a stopped broker or beat stops nothing.

    The pool is there before the worker has reached the broker. Never in the process that forks it: a child that is
    forked while the timer imports something waits for that import for ever.
    """
    from recovery.sweep import SweepTimer

    SweepTimer().start()
