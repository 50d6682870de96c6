"""All agents' sockets of one web process: whom it heard goes into the database, and what nodes should run out of it.

It is the observer that silences are judged by, so that it says when it could not listen, and promises nothing (leases)
that it cannot write down. The agents' consumer adds and removes connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque

from agents.protocol.errors import CloseCode
from agents.protocol.messages import Order
from dashboard.consumers.connection import DATABASE_AWAY, SEND_WITHIN_S, Connection
from dashboard.database_threads import DatabaseThreads, in_database_thread
from dashboard.database_writer import writer
from recovery import orders, sessions, wakeup
from recovery.domain.silence import OBSERVER_GONE_AFTER_S
from recovery.ids import fresh_id
from recovery.store.situations import GRANT_S

log = logging.getLogger(__name__)

RECORD_EVERY_S = 1.0
"""Whom this process heard goes into the database together with its own beat; nodes are judged by that."""
LOOK_EVERY_S = 1.0
BLIND_AFTER_S = OBSERVER_GONE_AFTER_S
"""After so long without a record (this process was slow, or the database away) silences are counted anew."""
TICK_EVERY_S = 0.5
STOOD_STILL_S = 9.0
"""After so long without a turn of its loop this process begins anew: agents give up after 10 s of silence."""
TIDY_EVERY_S = 60.0
LAG_COUNTS_FOR_S = 10.0


class Lag:
    """By how much the loop or the database has been late, at its worst within the last seconds."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()

    def note(self, late_s: float) -> None:
        now = time.monotonic()
        self._late.append((now, max(0.0, late_s)))
        while self._late and now - self._late[0][0] > LAG_COUNTS_FOR_S:
            self._late.popleft()

    @property
    def worst_s(self) -> float:
        return max((late_s for _, late_s in self._late), default=0.0)


class Fleet:
    """All sockets of this web process, and the tasks that keep rows and sockets in step."""

    def __init__(self) -> None:
        self.connections: set[Connection] = set()
        self.observer = fresh_id("obs")
        """Names this process, for as long as its loop turns."""
        self._tasks: list[asyncio.Task[None]] = []
        self._look = asyncio.Event()
        self._lag = Lag()
        # All on the monotonic clock:
        self._named_at = 0.0
        self._since = 0.0
        """It has listened, and written it down, without a break since then."""
        self._ticked_at = 0.0
        self._recorded_at = 0.0
        """When the newest record was taken that succeeded."""
        self._tidied_at = 0.0

    def add(self, connection: Connection) -> None:
        self.connections.add(connection)

    def listen(self) -> None:
        """Begin to observe, also without a connection: that nobody comes says something only if somebody listens."""
        if all(task.done() for task in self._tasks):
            self._look = asyncio.Event()
            self._begin_anew()
            self._tasks = [asyncio.create_task(work()) for work in (self._tick, self._beat, self._run, self._listen)]

    def remove(self, connection: Connection) -> None:
        self.connections.discard(connection)

    async def close(self) -> None:
        """End the tasks of this process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def grants_lease(self, connection: Connection) -> bool:
        """Whether what is heard now is sure to be written down: else a lease could outlive what the rows say."""
        return time.monotonic() - connection.recorded_at <= GRANT_S

    async def _tick(self) -> None:
        """Notice how late the loop is."""
        while True:
            await asyncio.sleep(TICK_EVERY_S)
            self._notice_standstill()

    def _notice_standstill(self) -> None:
        """Whichever task comes first after a standstill calls this before it concludes anything."""
        now = time.monotonic()
        stood_still_s = now - self._ticked_at
        self._lag.note(stood_still_s - TICK_EVERY_S)
        self._ticked_at = now
        if stood_still_s > STOOD_STILL_S:
            log.warning("agents' sockets: this process stood still for %.0f s and begins anew", stood_still_s)
            self._begin_anew()

    async def _beat(self) -> None:
        """Write down each second whom this process heard, whatever else it has to do."""
        while True:
            began = time.monotonic()
            try:
                with writer.going_first():
                    await self._record()
            except DATABASE_AWAY as err:
                log.warning("agents' sockets: whom they heard is not stored, no lease is granted: %s", err)
            except Exception:
                log.exception("agents' sockets: whom they heard is not stored; trying again in %.0f s", RECORD_EVERY_S)
            await asyncio.sleep(max(0.0, began + RECORD_EVERY_S - time.monotonic()))

    async def _run(self) -> None:
        """Bring sockets in step with the rows, once a second and whenever somebody says that orders changed."""
        while True:
            try:
                await self._compare()
            except DATABASE_AWAY as err:
                log.warning("agents' sockets: orders not compared, trying again in %.0f s: %s", LOOK_EVERY_S, err)
            except Exception:
                log.exception("agents' sockets: orders not compared, trying again in %.0f s", LOOK_EVERY_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_EVERY_S)
            self._look.clear()

    async def _listen(self) -> None:
        """Redis says when orders changed; without it the once-a-second look does."""
        told = False
        while True:
            try:
                client = wakeup.async_redis_client()
                async with client, client.pubsub() as channel:
                    await channel.subscribe(wakeup.ORDERS_CHANNEL)
                    told = False
                    while True:
                        message = await channel.get_message(ignore_subscribe_messages=True, timeout=5.0)
                        if message is not None:
                            self._look.set()
            except Exception as err:
                if not told:
                    log.warning("orders: no hints from the broker (%s); looking once a second", err)
                told = True
                await asyncio.sleep(1.0)

    async def _record(self) -> None:
        self._notice_standstill()
        taken_at, at = time.monotonic(), time.time()
        if taken_at - self._recorded_at > BLIND_AFTER_S:
            self._since = self._recorded_at = taken_at
        # Who was heard under another name only may have left since: its silence is counted from its return.
        heard = [c for c in self.connections if c.heard_at is not None and c.heard_at >= self._named_at]
        name = self.observer
        held = await _beat_thread.run(
            sessions.record_heard,
            [
                sessions.Heard(
                    node_id=c.node_id,
                    session=c.session,
                    at=at - (taken_at - (c.heard_at or taken_at)),
                    offset_s=c.offset_s,
                    seen_revision=c.seen_revision,
                )
                for c in heard
            ],
            observer=name,
            since=at - (taken_at - self._since),
            at=at,
            lag_s=self._lag.worst_s,
        )
        if name == self.observer:
            self._recorded_at = taken_at
            for connection in heard:
                if connection.node_id in held:
                    connection.recorded_at = taken_at
        self._lag.note(time.monotonic() - taken_at)
        if taken_at - self._tidied_at > TIDY_EVERY_S:
            self._tidied_at = taken_at
            await _beat_thread.run(sessions.forget_observers, now=at)

    def _begin_anew(self) -> None:
        """Listen under a new name: agents that gave this process up need time to come back, like after a start.

        No lease is granted before the connection has been recorded under that name.
        """
        self.observer = fresh_id("obs")
        self._named_at = self._since = self._ticked_at = self._recorded_at = time.monotonic()
        for connection in self.connections:
            connection.recorded_at = -math.inf

    async def _compare(self) -> None:
        """Push what changed; close what was superseded or revoked."""
        ready = [c for c in self.connections if c.protocol.hello is not None and c.pushed_revision >= 0]
        if not ready:
            return
        wanted = await in_database_thread(sessions.wanted_states, [c.node_id for c in ready])
        await asyncio.gather(*(_bring_in_step(c, wanted.get(c.node_id)) for c in ready))


_beat_thread = DatabaseThreads(1, name="beat-database")
"""Of its own: while other work waits for a database that hangs, nodes must not look silent."""
fleet = Fleet()


async def _bring_in_step(connection: Connection, state: sessions.WantedState | None) -> None:
    if state is None or state.revoked:
        connection.close(CloseCode.REVOKED, "This node's credential was revoked. Join again with a new token.")
        return
    if state.session != connection.session:
        connection.close(CloseCode.SUPERSEDED, "A newer connection of this node has taken over.")
        return
    connection.wanted_revision = state.revision
    if state.revision == connection.pushed_revision and not connection.is_behind:
        return
    try:
        await push(connection)
    except Exception:  # one node's trouble must not keep orders from the others
        log.exception("node=%s order not pushed; trying again in %.0f s", connection.node, LOOK_EVERY_S)


async def push(connection: Connection) -> None:
    """Send the node everything that it should run."""
    order: Order = await in_database_thread(orders.order_for, connection.node_id)
    connection.pushed_revision = order.revision
    connection.pushed_at = time.monotonic()
    connection.wanted_revision = max(connection.wanted_revision, order.revision)
    try:
        async with asyncio.timeout(SEND_WITHIN_S):
            await connection.say(order)
    except TimeoutError:
        connection.close(CloseCode.SERVER_ERROR, "This connection takes nothing any more. Reconnect.")
    except Exception as err:  # the socket's own task sees the close; until then the order is pushed again
        log.warning("node=%s order not sent: %s", connection.node, err)
