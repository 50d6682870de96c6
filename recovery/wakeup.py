"""Hints over Redis: "look again". Everything works without them, only later; so failures are logged, never raised."""

from __future__ import annotations

import logging
import time
from typing import Any

import redis
import redis.asyncio
from celery import current_app
from django.conf import settings
from django.db import transaction

log = logging.getLogger(__name__)

LIVE_STREAM = "everstep:live"
ORDERS_CHANNEL = "everstep:orders"
_TIMEOUT_S = 1.0
_AWAY_S = 1.0
_away_until = 0.0
"""A broker that hangs costs each hint a second; so after one that failed, none is tried for a while."""
_last_complaint = 0.0


def redis_client() -> redis.Redis:
    """A client with short timeouts, for hints."""
    return redis.Redis.from_url(
        settings.EVERSTEP_REDIS_URL,
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        retry=None,
        decode_responses=True,
    )


def async_redis_client() -> redis.asyncio.Redis:
    """An asyncio client; reads may block longer than hints may, so that the caller sets its own limits."""
    return redis.asyncio.Redis.from_url(
        settings.EVERSTEP_REDIS_URL, socket_connect_timeout=_TIMEOUT_S, decode_responses=True
    )


_client: redis.Redis | None = None


def _shared_client() -> redis.Redis:
    global _client
    if _client is None:
        _client = redis_client()
    return _client


def announce(topic: str, seq: int) -> None:
    """Tell browsers, after commit, that a topic has reached a sequence number."""
    transaction.on_commit(lambda: _quietly(_announce_now, topic, seq), robust=True)


def announce_change(topic: str) -> None:
    """Like `announce` for topics without a count of their own: milliseconds rise well enough."""
    announce(topic, time.time_ns() // 1_000_000)


def _announce_now(topic: str, seq: int) -> None:
    _shared_client().xadd(LIVE_STREAM, {"topic": topic, "seq": seq}, maxlen=1000, approximate=True)


def push_orders() -> None:
    """Tell the web processes, after commit, that some node's orders changed."""
    transaction.on_commit(lambda: _quietly(lambda: _shared_client().publish(ORDERS_CHANNEL, "changed")), robust=True)


def ask_to_advance(*, incident: str | None = None, job: str | None = None) -> None:
    """Ask Celery, after commit, to look at an incident or a job at once; if it cannot, the sweep will."""
    transaction.on_commit(lambda: _quietly(_enqueue, incident, job), robust=True)


def ask_to_fence(action: str) -> None:
    """Ask Celery, after commit, to have a node switched off; if it cannot, the sweep will."""
    transaction.on_commit(lambda: _quietly(_send, "fence_node", action), robust=True)


def _enqueue(incident: str | None, job: str | None) -> None:
    _send(*("advance_incident", incident) if incident else ("advance_job", job))


def _send(name: str, argument: str | None) -> None:
    # Kombu tries for six seconds to reach a broker that is away; a ping fails at once.
    _shared_client().ping()
    # By name: tasks import the engine, and everything that asks it to look again stands below it.
    current_app.send_task(f"recovery.tasks.{name}", (argument,), retry=False, expires=30, ignore_result=True)


def _quietly(function: Any, *arguments: Any) -> None:
    global _away_until, _last_complaint
    if time.monotonic() < _away_until:
        return
    try:
        function(*arguments)
    except Exception as err:
        _away_until = time.monotonic() + _AWAY_S
        if time.monotonic() - _last_complaint > 60:
            _last_complaint = time.monotonic()
            log.warning("broker not reached, going on by the sweep: %s", err)
