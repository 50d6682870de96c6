"""The connection to the server: dials out, says hello, sends what waits, and comes back by itself when it breaks.

One `AgentSession` per connection does the protocol; this module moves its bytes and keeps its clocks. It listens on
nothing. A drill may cut it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from agents.boot_clock import boottime_ns
from agents.log_lines import NodeLog
from agents.outbox import DiskOutbox
from agents.protocol.errors import RETRY_FORBIDDEN, CloseCode, MalformedFrame, ProtocolError
from agents.protocol.messages import (
    Ack,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    Order,
    Welcome,
)
from agents.protocol.session import AgentSession
from agents.protocol.version import MAX_FRAME_BYTES
from agents.server_clock import ServerClock
from agents.settings import Settings

log = NodeLog(__name__)

_OPEN_LIMIT_S = 10.0
_SILENCE_LIMIT_S = 10.0
"""Without a word from the server for this long, or five heartbeats, the connection is given up as half open."""
_STABLE_AFTER_S = 10.0
"""A connection that lasted this long starts the back-off anew."""
_TRANSIENT_LIMIT = 10
_BEATS_REMEMBERED = 100
_REFUSED_STATUS = {401: CloseCode.UNAUTHORIZED, 403: CloseCode.REVOKED}


def reconnect_delay(attempt: int, *, base_s: float, cap_s: float, draw: Callable[[float, float], float]) -> float:
    """Full jitter: anything between 0 and the cap of this attempt, so that a fleet does not come back as one wave."""
    return draw(0.0, min(cap_s, base_s * 2.0 ** min(attempt, 30)))


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """What the daemon does for the link."""

    hello: Callable[[], Hello]
    credential: Callable[[], str]
    welcomed: Callable[[], None]
    """Called after each welcome: the outbox may be filled with what the server has to know again."""
    ordered: Callable[[Order], None]
    refused: Callable[[CloseCode], Awaitable[bool]]
    """The server has refused this agent; True if something has changed, so that trying again can help."""
    granted: Callable[[int], None]
    """The server has written down that it heard the heartbeat that was sent at this time (CLOCK_BOOTTIME, ns)."""


class Link:
    """Keeps one connection to the server alive."""

    def __init__(self, *, settings: Settings, outbox: DiskOutbox, clock: ServerClock, handlers: Handlers) -> None:
        self.revision = 0
        """Newest order that was taken over; told with each heartbeat."""
        self.contact_ns = 0
        """When the newest hello or heartbeat was sent that the server has written down (CLOCK_BOOTTIME, ns)."""
        self._settings = settings
        self._outbox = outbox
        self._clock = clock
        self._handlers = handlers
        self._wake = asyncio.Event()
        self._cut = asyncio.Event()
        self._mended = asyncio.Event()
        self._mended.set()
        self._websocket: ClientConnection | None = None
        self._hello_sent_ns = 0
        self._beats: dict[float, int] = {}
        """Heartbeats that wait for their reply: their `at`, and when they were sent (CLOCK_BOOTTIME, ns)."""
        self._transient: deque[Message] = deque(maxlen=_TRANSIENT_LIMIT)
        self._welcome: Welcome | None = None
        self._ordered_revision = 0
        self._heard_at = 0.0

    @property
    def connected(self) -> bool:
        return self._welcome is not None

    def wake(self) -> None:
        """Something durable has been added to the outbox."""
        self._wake.set()

    def send_transient(self, message: Message) -> None:
        """Send what may be lost; without a connection it is dropped."""
        if self._welcome is not None:
            self._transient.append(message)
            self._wake.set()

    def cut(self) -> None:
        """Be cut off from the server: end the connection without a word, and make none until `mend`."""
        log.warning("the connection to the server is cut by a drill")
        self._mended.clear()
        self._cut.set()
        if self._websocket is not None:
            self._websocket.transport.abort()

    def mend(self) -> None:
        """Connections may be made again."""
        if not self._mended.is_set():
            log.info("the connection to the server may be made again")
        self._cut.clear()
        self._mended.set()

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        attempt = 0
        while True:
            await self._mended.wait()
            began = time.monotonic()
            code = await self._until_cut()
            if self._cut.is_set():
                attempt = 0
                continue
            if code == CloseCode.SUPERSEDED:
                log.error(
                    "another agent with this node's credential has connected, and the newest one counts: "
                    "see that only one runs for this node; trying again slowly",
                    node=self._settings.name,
                )
            refused = code in RETRY_FORBIDDEN and not await self._handlers.refused(CloseCode(code))
            if refused or code == CloseCode.SUPERSEDED:
                # Slow, and never in step with other nodes; an operator has to act before it can work.
                delay_s = self._settings.slow_retry_s * random.uniform(0.5, 1.5)
                attempt = 0
            else:
                attempt = 0 if time.monotonic() - began >= _STABLE_AFTER_S else attempt
                delay_s = reconnect_delay(
                    attempt,
                    base_s=self._settings.reconnect_base_s,
                    cap_s=self._settings.reconnect_cap_s,
                    draw=random.uniform,
                )
                attempt += 1
            log.info("trying again", in_s=round(delay_s, 2))
            await asyncio.sleep(delay_s)

    async def _until_cut(self) -> int | None:
        """One connection, or the attempt at one, that ends at once when it is cut."""
        connection = asyncio.ensure_future(self._one_connection())
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((connection, cut), return_when=asyncio.FIRST_COMPLETED)
            return connection.result() if connection.done() else None
        finally:
            for task in (connection, cut):
                task.cancel()
            await asyncio.gather(connection, cut, return_exceptions=True)

    async def _one_connection(self) -> int | None:
        """Hold one connection until it ends; return the code with which the server closed it, if it did."""
        url = self._settings.socket_url
        try:
            async with connect(
                url,
                additional_headers={"Authorization": f"Bearer {self._handlers.credential()}"},
                compression=None,
                proxy=None,
                open_timeout=_OPEN_LIMIT_S,
                close_timeout=0.5,
                ping_interval=None,
                max_size=MAX_FRAME_BYTES,
            ) as websocket:
                self._websocket = websocket
                return await self._converse(websocket)
        except InvalidStatus as err:
            status = err.response.status_code
            log.warning("the server refused the connection", server=url, status=status)
            return _REFUSED_STATUS.get(status)
        except (OSError, TimeoutError, InvalidHandshake) as err:
            log.warning("the server cannot be reached", server=url, error=err or type(err).__name__)
            return None
        except ConnectionClosed as err:
            return self._closed(err)
        finally:
            self._websocket = None
            self._welcome = None
            self._transient.clear()
            self._beats.clear()

    async def _converse(self, websocket: ClientConnection) -> int | None:
        session = AgentSession(self._handlers.hello(), self._outbox)
        self._ordered_revision = 0
        self._heard_at = time.monotonic()
        self._hello_sent_ns = boottime_ns()
        await websocket.send(session.opening())
        tasks = [
            asyncio.create_task(self._receive(websocket, session)),
            asyncio.create_task(self._send(websocket, session)),
            asyncio.create_task(self._beat()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except ProtocolError as err:
            log.error("the server broke the protocol", code=err.code, reason=err.reason)
            with contextlib.suppress(ConnectionClosed):
                await websocket.send(session.transient(Goodbye(code=err.code, reason=err.reason)))
                await websocket.close(err.code, err.reason[:100])
        except TimeoutError:
            log.warning("the server has been silent; giving the connection up", silent_s=_SILENCE_LIMIT_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return None

    @staticmethod
    def _closed(err: ConnectionClosed) -> int | None:
        code = err.rcvd.code if err.rcvd is not None else None
        reason = err.rcvd.reason if err.rcvd is not None else "it broke"
        log.warning("connection lost", code=code, reason=reason)
        return code

    # --- The three tasks of a connection --------------------------------------------------------------------------

    async def _receive(self, websocket: ClientConnection, session: AgentSession) -> None:
        async for frame in websocket:
            if isinstance(frame, str):
                raise MalformedFrame("text instead of bytes")
            self._heard_at = time.monotonic()
            self._handle(session.receive(frame))
        raise ConnectionClosed(websocket.protocol.close_rcvd, websocket.protocol.close_sent)

    def _handle(self, message: Message) -> None:
        match message:
            case Welcome():
                self._clock.begin(server_at=message.at, received_at=time.time())
                self._welcome = message
                self.contact_ns = max(self.contact_ns, self._hello_sent_ns)
                log.info("connected", server=self._settings.server, version=message.server_version)
                self._handlers.welcomed()
                self._wake.set()
            case HeartbeatReply():
                self._clock.observe(sent_at=message.echo_at, received_at=time.time(), server_at=message.at)
                sent_ns = self._beats.pop(message.echo_at, None)
                if message.grants_lease and sent_ns is not None:
                    self.contact_ns = max(self.contact_ns, sent_ns)
                    self._handlers.granted(sent_ns)
            case Ack():
                self._wake.set()  # there is room for more to be on its way
            case Order():
                # On one connection orders come as they were sent; what is older was overtaken while it was built.
                if message.revision >= self._ordered_revision:
                    self._ordered_revision = message.revision
                    self._handlers.ordered(message)
            case Goodbye():
                log.warning("the server says goodbye", code=message.code, reason=message.reason)

    async def _send(self, websocket: ClientConnection, session: AgentSession) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = session.frames_to_send()
            while batch or self._transient:
                # Between two batches of a long backlog, heartbeats must get through.
                while self._transient:
                    await websocket.send(session.transient(self._transient.popleft()))
                for frame in batch:
                    await websocket.send(frame)
                batch = session.frames_to_send()

    async def _beat(self) -> None:
        while True:
            interval_s = self._welcome.heartbeat_interval_s if self._welcome else 1.0
            if time.monotonic() - self._heard_at > max(_SILENCE_LIMIT_S, 5 * interval_s):
                raise TimeoutError
            if self._welcome:
                self._send_beat()
            await asyncio.sleep(max(0.05, interval_s))

    def _send_beat(self) -> None:
        at, now_ns = time.time(), boottime_ns()  # taken before it is sent: a lease must never count from later
        self._beats.setdefault(at, now_ns)
        while len(self._beats) > _BEATS_REMEMBERED:
            del self._beats[next(iter(self._beats))]
        self.send_transient(Heartbeat(at=at, revision=self.revision))
