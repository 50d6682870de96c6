"""The live feed: one tail of the Redis stream per web process, fanned out to this process's browser sockets.

`dashboard.consumers.browsers` subscribes. Each subscription keeps only the newest seq per topic, so that a slow browser
skips what it missed instead of queueing it. While Redis is away the rows are polled; and every few seconds they are
compared anyway, so that a lost announcement costs seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from django.db import Error as DatabaseError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from dashboard.database_threads import in_database_thread
from recovery.queries.positions import TopicPosition, topic_positions
from recovery.wakeup import LIVE_STREAM, async_redis_client

log = logging.getLogger(__name__)

BLOCK_MS = 500
ANSWER_S = 2.0
"""A Redis that is up but says nothing for longer (stopped, swapping) counts as away."""
BATCH = 500
POLL_S = 1.0
RETRY_REDIS_S = 3.0
COMPARE_S = 10.0
"""How often the rows are read even though the stream works."""

Positions = Callable[[Iterable[str]], Awaitable[dict[str, TopicPosition]]]
Connect = Callable[[], "Redis"]


class FeedMode(StrEnum):
    LIVE = "live"
    POLLING = "polling"
    OFFLINE = "offline"
    """Neither Redis nor the database answers."""


class Subscription:
    """What one socket has still to be told: the newest seq of each topic that changed."""

    def __init__(self, topics: Iterable[str]) -> None:
        self.topics = frozenset(topics)
        self._changed: dict[str, int] = {}
        self._wake = asyncio.Event()

    def offer(self, topic: str, seq: int) -> None:
        """Take note of a change, if this socket asked for the topic or for all of its kind."""
        for own in (topic, f"{topic.partition(':')[0]}:*"):
            if own in self.topics:
                self._changed[own] = max(seq, self._changed.get(own, 0))
                self._wake.set()

    def wake(self) -> None:
        """Have the socket say how the feed stands, without a change of a topic."""
        self._wake.set()

    async def take(self) -> dict[str, int]:
        """Wait for news; return it and start with an empty slate."""
        await self._wake.wait()
        self._wake.clear()
        changed, self._changed = self._changed, {}
        return changed


async def read_positions(topics: Iterable[str]) -> dict[str, TopicPosition]:
    return await in_database_thread(topic_positions, frozenset(topics))


class LiveFeed:
    """Runs only while somebody listens."""

    def __init__(self, *, connect: Connect = async_redis_client, positions: Positions = read_positions) -> None:
        self.mode = FeedMode.LIVE
        self.as_of = 0.0
        """Until when (Unix seconds) everything that changed has been offered."""
        self._connect = connect
        self._positions = positions
        self._subscriptions: set[Subscription] = set()
        self._known: dict[str, TopicPosition] = {}
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def subscribe(self, topics: Iterable[str]) -> AsyncIterator[Subscription]:
        """Subscribe first, then read where the topics stand: whatever happens in between is told, at worst twice."""
        subscription = Subscription(topics)
        self._subscriptions.add(subscription)
        if self._task is None or self._task.done():
            self._ready.clear()
            self._task = asyncio.create_task(self._run(), name="live-feed")
        try:
            await self._ready.wait()
            with contextlib.suppress(DatabaseError):
                for topic, position in (await self._positions(subscription.topics)).items():
                    subscription.offer(topic, position.seq)
            subscription.wake()
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            if not self._subscriptions and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            try:
                await self._follow_stream()
            except (RedisError, OSError, TimeoutError) as error:
                if self.mode is FeedMode.LIVE:
                    log.warning("The live feed lost Redis (%r); it polls the database until Redis is back.", error)
            except Exception:
                # Anything else is a bug; the sockets that depend on this task get their news all the same.
                log.exception("The live feed failed while following Redis; it polls the database and tries again.")
            await self._poll(until=_now() + RETRY_REDIS_S)

    async def _follow_stream(self) -> None:
        client = self._connect()
        try:
            async with asyncio.timeout(ANSWER_S):
                last = await _newest_id(client)
            await self._compare()
            self._set_mode(FeedMode.LIVE)
            compared_at = _now()
            while True:
                asked_at = time.time()
                async with asyncio.timeout(BLOCK_MS / 1000 + ANSWER_S):
                    answer = await client.xread({LIVE_STREAM: last}, count=BATCH, block=BLOCK_MS)
                for entry, fields in _entries(answer):
                    last = entry
                    self._offer(_text(fields.get("topic", "")), _number(fields.get("seq")))
                self.as_of = max(self.as_of, asked_at)
                if _now() - compared_at > COMPARE_S:
                    await self._compare()
                    compared_at = _now()
        finally:
            await client.aclose()

    async def _poll(self, *, until: float) -> None:
        while True:
            self._set_mode(FeedMode.POLLING if await self._compare() else FeedMode.OFFLINE)
            if _now() >= until:
                return
            await asyncio.sleep(POLL_S)

    async def _compare(self) -> bool:
        """Offer every topic whose rows changed since the last look; False if the database does not answer."""
        topics = frozenset[str]().union(*(subscription.topics for subscription in self._subscriptions))
        asked_at = time.time()
        try:
            found = await self._positions(topics)
        except DatabaseError as error:
            log.warning("The live feed could not read the rows: %s", error)
            return False
        for topic, position in found.items():
            if self._known.get(topic) != position:
                self._offer(topic, position.seq)
        self._known = found
        self.as_of = asked_at
        return True

    def _offer(self, topic: str, seq: int) -> None:
        for subscription in self._subscriptions:
            subscription.offer(topic, seq)

    def _set_mode(self, mode: FeedMode) -> None:
        self._ready.set()
        if mode is self.mode:
            return
        if mode is FeedMode.LIVE:
            log.info("The live feed follows Redis again.")
        self.mode = mode
        for subscription in self._subscriptions:
            subscription.wake()


async def _newest_id(client: Redis) -> str:
    newest = await client.xrevrange(LIVE_STREAM, count=1)
    return _text(newest[0][0]) if newest else "0-0"


def _entries(answer: Any) -> list[tuple[str, dict[str, Any]]]:
    """XREAD's answer as (id, fields): a mapping by stream under RESP3, a list of pairs under RESP2, or nothing."""
    if not answer:
        return []
    streams = answer.values() if isinstance(answer, Mapping) else [found for _, found in answer]
    made: list[tuple[str, dict[str, Any]]] = []
    for found in streams:
        # RESP3 wraps the entries of each stream once more.
        nested = found and isinstance(found[0], list) and found[0] and isinstance(found[0][0], (list, tuple))
        for entry, fields in found[0] if nested else found:
            made.append((_text(entry), {_text(name): value for name, value in fields.items()}))
    return made


def _now() -> float:
    """The event loop's clock: durations here are waits of the loop."""
    return asyncio.get_running_loop().time()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(value: Any) -> int:
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return 0


_feeds: dict[int, LiveFeed] = {}


def live_feed() -> LiveFeed:
    """The feed of the running event loop: one per web process."""
    return _feeds.setdefault(id(asyncio.get_running_loop()), LiveFeed())
