"""The Celery application: `celery -A dashboard.celery worker` and `... beat` start from here."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

app = Celery("everstep")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@worker_init.connect
def start_sweep_timer(**_: Any) -> None:
    """Sweep from inside each worker too, so that a stopped broker or beat stops nothing.

    Not when the worker is ready: it is not before it has reached the broker.
    """
    from recovery.sweep import SweepTimer

    SweepTimer().start()
