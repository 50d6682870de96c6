"""The sweep's timer runs in each process of the pool, never in the one that forks them."""

from __future__ import annotations

import pytest
from celery.signals import worker_init, worker_process_init, worker_ready

import dashboard.celery
from recovery import sweep


def test_timer_starts_in_the_processes_of_the_pool_and_not_where_they_are_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(sweep.SweepTimer, "start", lambda self: started.append(self.name))
    for signal in (worker_init, worker_ready):
        signal.send(sender=dashboard.celery.app)
    assert started == []
    worker_process_init.send(sender=None)
    assert started == ["sweep-timer"]
