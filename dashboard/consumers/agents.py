"""The agents' socket: decodes frames, hands facts to `recovery.ingest`, answers heartbeats.

It has its own receive loop, since the stock consumer hops to one shared thread before every message: five times the
cost, and one slow socket would hold up all others. Database work runs in threads: what writes goes through the writer
that all sockets share.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agents.protocol.codec import encode_frame
from agents.protocol.errors import CloseCode, ProtocolError
from agents.protocol.messages import (
    Ack,
    FromAgent,
    Goodbye,
    GpuSamples,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Welcome,
)
from agents.protocol.version import PROTOCOL_VERSION
from dashboard.consumers.connection import DATABASE_AWAY, SEND_WITHIN_S, Connection, Send
from dashboard.consumers.fleet import fleet, push
from dashboard.database_threads import in_database_thread
from dashboard.database_writer import writer
from recovery import access, ingest, sessions

log = logging.getLogger(__name__)

SERVER_VERSION = "0.1.0"
HEARTBEAT_INTERVAL_S = 1.0
HELLO_WITHIN_S = 10.0
LONGEST_PAUSE_S = 2.0
"""Between two tries to store facts."""
AWAY = "The server cannot reach its database. Reconnect: nothing is lost meanwhile."
MAX_BATCH = 500

Receive = Callable[[], Any]
Result = TypeVar("Result")


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
    connection, events = Connection(node_id=node.pk, node=node.name, send=send), _Events(receive)
    try:
        await _serve(connection, events)
    except ProtocolError as err:
        log.warning("node=%s closed code=%d %s", node.name, err.code, err.reason)
        await _end(send, err.code, err.reason)
    except TimeoutError:
        await _end(send, CloseCode.MALFORMED, f"No hello within {HELLO_WITHIN_S:.0f} s.")
    except DATABASE_AWAY as err:
        log.warning("node=%s sent away, since its session cannot be stored: %s", node.name, err)
        await _end(send, CloseCode.SERVER_ERROR, AWAY)
    finally:
        events.close()
        fleet.remove(connection)
        await _forget_session(connection)


async def _forget_session(connection: Connection) -> None:
    """Say that nobody is connected any more; if that cannot be stored, the node's silence tells it."""
    try:
        await writer.run_urgently(sessions.end_session, connection.node_id, session=connection.session)
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


async def _serve(connection: Connection, events: _Events) -> None:
    fleet.listen()
    hello = await asyncio.wait_for(_next_message(connection, events), HELLO_WITHIN_S)
    if hello is None:
        return
    _, message = hello
    assert isinstance(message, Hello)  # the session lets nothing else be first
    acknowledged = await events.unless_gone(
        writer.run_urgently(
            sessions.begin_session, connection.node_id, message, session=connection.session, observer=fleet.observer
        )
    )
    if acknowledged is None:
        return
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
        asyncio.create_task(_receive_all(connection, events)),
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


class _Events:
    """A socket's events, the next of which can be looked at while something else goes on."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: asyncio.Future[Any] | None = None

    async def next(self) -> Any:
        if self._ahead is None:
            return await self._receive()
        ahead, self._ahead = self._ahead, None
        return await ahead

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """What the work returns; None, and the work is called off, if the peer's next event is that it hangs up.

        Agents that wait too long for a slow database hang up and come again: what they asked for then must not pile up.
        """
        working, self._ahead = asyncio.create_task(work), asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({working, self._ahead}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and self._ahead.result()["type"] == "websocket.disconnect":
                return None
            return await working
        finally:
            working.cancel()


async def _next_message(connection: Connection, events: _Events) -> tuple[int, FromAgent] | None:
    """The next message that is no repeat; None once the socket is closed."""
    while True:
        event = await events.next()
        if event["type"] == "websocket.disconnect":
            return None
        received = connection.protocol.receive(event.get("bytes") or (event.get("text") or "").encode())
        if received is not None:
            return received


async def _receive_all(connection: Connection, events: _Events) -> None:
    while (received := await _next_message(connection, events)) is not None:
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
        try:
            return await writer.run(
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
