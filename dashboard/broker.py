"""Is the broker there? Asked by the overview page."""

from __future__ import annotations

import time

from redis.exceptions import RedisError

from recovery.wakeup import redis_client


def broker_latency() -> float | None:
    """Seconds of one PING; None if the broker does not answer."""
    started = time.perf_counter()
    client = redis_client()
    try:
        client.ping()
    except (RedisError, OSError):
        return None
    finally:
        client.close()
    return time.perf_counter() - started
