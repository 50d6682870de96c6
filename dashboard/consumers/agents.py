"""The agents' socket: decodes frames, hands facts to `recovery.ingest`, answers heartbeats, pushes orders.

It has its own receive loop, since the stock consumer hops to one shared thread before every message: five times the
cost, and one slow socket would hold up all others. Database work runs in a small pool of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db import InterfaceError, OperationalError
from django.db import connection as database

from agents.protocol.codec import encode_frame
from agents.protocol.errors import CloseCode, ProtocolError
from agents.protocol.messages import (
    Ack,
    FromAgent,
    Goodbye,
    GpuSample,
    GpuSamples,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    Order,
    Welcome,
)
from agents.protocol.session import ServerSession
from agents.protocol.version import PROTOCOL_VERSION
from dashboard.database_threads import DatabaseThreads, in_database_thread
from recovery import access, ingest, orders, sessions, wakeup
from recovery.domain.silence import OBSERVER_GONE_AFTER_S
from recovery.ids import fresh_id
from recovery.store.situations import GRANT_S

log = logging.getLogger(__name__)

SERVER_VERSION = "0.1.0"
HEARTBEAT_INTERVAL_S = 1.0
HELLO_WITHIN_S = 10.0
RECORD_EVERY_S = 1.0
"""Whom this process heard goes into the database together with its own beat; nodes are judged by that."""
LOOK_EVERY_S = 1.0
PUSH_AGAIN_AFTER_S = 5.0
"""An order that the agent has not taken over by then is sent once more: its disk may have been full."""
YIELD_S = 5.0
LONGEST_PAUSE_S = 2.0
"""Between two tries to store facts."""
SEND_WITHIN_S = 5.0
"""A peer whose socket takes nothing for this long is let go: orders to all others wait behind it."""
CLOCK_BEATS = 30
"""Heartbeats that tell the offset of an agent's clock; older ones are forgotten, since clocks are put right."""
BLIND_AFTER_S = OBSERVER_GONE_AFTER_S
"""After so long without a record (this process was slow, or the database away) silences are counted anew."""
TICK_EVERY_S = 0.5
STOOD_STILL_S = 9.0
"""After so long without a turn of its loop this process begins anew: agents give up after 10 s of silence."""
TIDY_EVERY_S = 60.0
LAG_COUNTS_FOR_S = 10.0
DATABASE_AWAY = (OperationalError, InterfaceError)
AWAY = "The server cannot reach its database. Reconnect: nothing is lost meanwhile."
MAX_WAITING_FACTS = 2000
MAX_BATCH = 500

Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]


@dataclass(eq=False)
class Connection:
    """One open socket of one node."""

    node_id: int
    node: str
    send: Send
    session: str = field(default_factory=lambda: fresh_id("ses"))
    protocol: ServerSession = field(default_factory=ServerSession)
    facts: asyncio.Queue[tuple[int, FromAgent]] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_FACTS))
    heard_at: float | None = None
    """On the monotonic clock: the wall clock may be put right between two heartbeats."""
    recorded_at: float = -math.inf
    """On the monotonic clock: the newest record that holds this connection was taken then."""
    clock_deltas: deque[float] = field(default_factory=lambda: deque(maxlen=CLOCK_BEATS))
    seen_revision: int = 0
    wanted_revision: int = 0
    pushed_revision: int = -1
    pushed_at: float = 0.0
    """On the monotonic clock."""
    gpus: asyncio.Task[None] | None = None
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    last_words: Goodbye | None = None

    @property
    def offset_s(self) -> float | None:
        """Server's clock minus the agent's: the least delayed heartbeat tells it best. None before the first one."""
        return min(self.clock_deltas, default=None)

    @property
    def is_behind(self) -> bool:
        """The agent has had its order for a while and has not taken it over."""
        late = time.monotonic() - self.pushed_at > PUSH_AGAIN_AFTER_S
        return late and self.seen_revision < self.pushed_revision

    async def say(self, message: Message) -> None:
        await self.send({"type": "websocket.send", "bytes": encode_frame(message)})

    def keep_gpus(self, samples: list[GpuSample]) -> None:
        """Write the latest samples beside the conversation: heartbeats never wait for them, and they may be lost."""
        if self.gpus is None or self.gpus.done():
            self.gpus = asyncio.create_task(_record_gpus(self, samples))

    def close(self, code: CloseCode, reason: str) -> None:
        """Ask the socket's own task to say goodbye and close."""
        if self.last_words is None:
            self.last_words = Goodbye(code=int(code), reason=reason)
            self.closing.set()


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
        self._not_recording = asyncio.Event()
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
            self._look, self._not_recording = asyncio.Event(), asyncio.Event()
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
            self._not_recording.clear()
            try:
                await self._record()
            except DATABASE_AWAY as err:
                log.warning("agents' sockets: whom they heard is not stored, no lease is granted: %s", err)
            except Exception:
                log.exception("agents' sockets: whom they heard is not stored; trying again in %.0f s", RECORD_EVERY_S)
            finally:
                self._not_recording.set()
            await asyncio.sleep(max(0.0, began + RECORD_EVERY_S - time.monotonic()))

    async def let_it_record(self) -> None:
        """Where writers do not queue up but try again and again, let the record of whom we heard go first."""
        if database.vendor == "sqlite":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._not_recording.wait(), YIELD_S)

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


async def lifespan(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """The ASGI application of the web process's own life: it listens from its start on."""
    while True:
        event = await receive()
        if event["type"] == "lifespan.startup":
            fleet.listen()
            await send({"type": "lifespan.startup.complete"})
        elif event["type"] == "lifespan.shutdown":
            await fleet.close()
            await send({"type": "lifespan.shutdown.complete"})
            return


async def agent_socket(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """The ASGI application of one agent's connection."""
    event = await receive()
    if event["type"] != "websocket.connect":
        return
    await send({"type": "websocket.accept"})
    try:
        node = await in_database_thread(access.node_for_credential, _credential(scope))
    except DATABASE_AWAY as err:
        log.warning("an agent was sent away, since the database cannot be asked who it is: %s", err)
        await _end(send, CloseCode.SERVER_ERROR, AWAY)
        return
    if node is None:
        await _end(send, CloseCode.UNAUTHORIZED, "This credential is unknown or revoked. Join with a new join token.")
        return
    connection = Connection(node_id=node.pk, node=node.name, send=send)
    try:
        await _serve(connection, receive)
    except ProtocolError as err:
        log.warning("node=%s closed code=%d %s", node.name, err.code, err.reason)
        await _end(send, err.code, err.reason)
    except TimeoutError:
        await _end(send, CloseCode.MALFORMED, f"No hello within {HELLO_WITHIN_S:.0f} s.")
    except DATABASE_AWAY as err:
        log.warning("node=%s sent away, since its session cannot be stored: %s", node.name, err)
        await _end(send, CloseCode.SERVER_ERROR, AWAY)
    finally:
        fleet.remove(connection)
        await _forget_session(connection)


async def _forget_session(connection: Connection) -> None:
    """Say that nobody is connected any more; if that cannot be stored, the node's silence tells it."""
    try:
        await in_database_thread(sessions.end_session, connection.node_id, session=connection.session)
    except DATABASE_AWAY as err:
        log.warning("node=%s its session stays noted as open: %s", connection.node, err)


def _credential(scope: dict[str, Any]) -> str:
    for name, value in scope.get("headers", []):
        if name == b"authorization":
            scheme, _, secret = value.decode("latin-1").partition(" ")
            return secret.strip() if scheme.lower() == "bearer" else ""
    return ""


async def _end(send: Send, code: int, reason: str) -> None:
    """Say why, then close. The peer may be gone already."""
    try:
        async with asyncio.timeout(SEND_WITHIN_S):
            await send({"type": "websocket.send", "bytes": encode_frame(Goodbye(code=int(code), reason=reason))})
            await send({"type": "websocket.close", "code": int(code), "reason": reason[:100]})
    except Exception as err:
        log.debug("goodbye not sent: %s", err)


async def _serve(connection: Connection, receive: Receive) -> None:
    fleet.listen()
    hello = await asyncio.wait_for(_next_message(connection, receive), HELLO_WITHIN_S)
    if hello is None:
        return
    _, message = hello
    assert isinstance(message, Hello)  # the session lets nothing else be first
    acknowledged = await in_database_thread(
        sessions.begin_session, connection.node_id, message, session=connection.session, observer=fleet.observer
    )
    connection.heard_at = time.monotonic()
    welcome = Welcome(
        protocol=PROTOCOL_VERSION,
        server_version=SERVER_VERSION,
        at=time.time(),
        heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
        acknowledged=acknowledged,
    )
    await connection.send({"type": "websocket.send", "bytes": connection.protocol.welcome(welcome)})
    fleet.add(connection)
    await push(connection)
    tasks = {
        asyncio.create_task(_receive_all(connection, receive)),
        asyncio.create_task(_store_all(connection)),
        asyncio.create_task(connection.closing.wait()),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        if connection.gpus is not None:
            tasks.add(connection.gpus)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if connection.last_words is not None:
        await _end(connection.send, connection.last_words.code, connection.last_words.reason)


async def _next_message(connection: Connection, receive: Receive) -> tuple[int, FromAgent] | None:
    """The next message that is no repeat; None once the socket is closed."""
    while True:
        event = await receive()
        if event["type"] == "websocket.disconnect":
            return None
        received = connection.protocol.receive(event.get("bytes") or (event.get("text") or "").encode())
        if received is not None:
            return received


async def _receive_all(connection: Connection, receive: Receive) -> None:
    while (received := await _next_message(connection, receive)) is not None:
        now = time.time()
        connection.heard_at = time.monotonic()
        seq, message = received
        match message:
            case Heartbeat(at=at, revision=revision):
                if math.isfinite(at):
                    connection.clock_deltas.append(now - at)
                connection.seen_revision = revision
                reply = HeartbeatReply(
                    at=now, echo_at=at, revision=connection.wanted_revision, grants_lease=fleet.grants_lease(connection)
                )
                await connection.say(reply)
            case GpuSamples(samples=samples):
                connection.keep_gpus(samples)
            case Goodbye(reason=reason):
                log.info("node=%s says goodbye: %s", connection.node, reason)
                return
            case _ if seq:
                await connection.facts.put((seq, message))


async def _record_gpus(connection: Connection, samples: list[GpuSample]) -> None:
    try:
        await in_database_thread(sessions.record_gpus, connection.node_id, samples)
    except Exception as err:
        log.warning("node=%s GPU samples not stored: %s", connection.node, err)


async def _store_all(connection: Connection) -> None:
    """Commit facts in order, as many at once as wait, and acknowledge what is committed."""
    while True:
        batch = [await connection.facts.get()]
        while len(batch) < MAX_BATCH and not connection.facts.empty():
            batch.append(connection.facts.get_nowait())
        through = await _store(connection, batch)
        if through is None:
            connection.close(CloseCode.SUPERSEDED, "A newer connection of this node has taken over.")
            return
        await connection.say(Ack(through=through))


async def _store(connection: Connection, batch: list[tuple[int, FromAgent]]) -> int | None:
    """Try until the database takes it: facts wait in the agent's outbox meanwhile, nothing is dropped."""
    pause_s = 0.2
    while True:
        await fleet.let_it_record()
        try:
            return await in_database_thread(
                ingest.store_facts,
                connection.node_id,
                batch,
                session=connection.session,
                offset_s=connection.offset_s,
            )
        except DATABASE_AWAY as err:
            log.warning("node=%s facts not stored, trying again in %.1f s: %s", connection.node, pause_s, err)
        except Exception:
            log.exception("node=%s facts not stored; trying again in %.1f s", connection.node, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
