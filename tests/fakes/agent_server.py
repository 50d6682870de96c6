"""A server for agents that keeps nothing: speaks the real protocol, records what it hears, orders what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence

from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from agents.protocol.codec import encode_frame
from agents.protocol.errors import ProtocolError
from agents.protocol.messages import (
    Ack,
    Assignment,
    AssignmentReport,
    FaultOrder,
    FromAgent,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    Order,
    ProbeOrder,
    SeenPhase,
    Welcome,
)
from agents.protocol.session import ServerSession

JOIN_TOKEN = "a-join-token"


class FakeAgentServer:
    """One address with both doors: POST /api/v1/agents/join and the websocket /ws/agent."""

    def __init__(self, *, heartbeat_interval_s: float = 0.2) -> None:
        self.heartbeat_interval_s = heartbeat_interval_s
        self.acknowledges = True
        self.refuse_with: int | None = None
        """Close code for every new connection, after its hello."""
        self.clock_offset_s = 0.0
        self.grants_lease = False
        self.beats: list[float] = []
        """When each heartbeat was answered (CLOCK_BOOTTIME, seconds)."""
        self.probes: Sequence[ProbeOrder] = ()
        self.memory_of: list[str] | None = None
        self.credentials: dict[str, str] = {}
        self.joins: list[dict[str, str]] = []
        self.hellos: list[Hello] = []
        self.durable: list[tuple[str, int, FromAgent]] = []
        """(outbox id, sequence number, message), each once, as a real server would store them."""
        self.transient: list[FromAgent] = []
        self.accepted = 0
        """TCP connections so far, whatever became of them."""
        self.repeats = 0
        self.errors: list[ProtocolError] = []
        self.revision = 0
        self._assignments: Sequence[Assignment] = ()
        self._faults: Sequence[FaultOrder] = ()
        self._stored: dict[str, int] = {}
        self._connections: dict[asyncio.StreamWriter, ServerProtocol] = {}
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Drop all connections without a word and stop listening, as a crash would."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop_connections()
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def messages(self) -> list[FromAgent]:
        """Durable messages in the order in which they would have been stored."""
        return [message for _, _, message in self.durable]

    def heard(self, kind: type) -> list[FromAgent]:
        return [message for message in self.messages if isinstance(message, kind)]

    def phases(self, generation: int = 1) -> list[SeenPhase]:
        """The phases that were reported of a generation, in order."""
        return [
            message.phase
            for message in self.messages
            if isinstance(message, AssignmentReport) and message.generation == generation
        ]

    def order(self, assignments: Sequence[Assignment], *, faults: Sequence[FaultOrder] = ()) -> None:
        """Change what the node should run and push it."""
        self._assignments, self._faults = assignments, faults
        self.revision += 1
        self.push(self.current_order())

    def current_order(self) -> Order:
        return Order(
            revision=self.revision,
            assignments=list(self._assignments),
            faults=list(self._faults),
            probes=list(self.probes),
            memory_of=self.memory_of,
        )

    def push(self, message: Message) -> None:
        for writer, protocol in self._connections.items():
            self._send(writer, protocol, encode_frame(message))

    def drop_connections(self) -> None:
        for writer in list(self._connections):
            writer.transport.abort()

    def close_connections(self, code: int) -> None:
        for writer, protocol in self._connections.items():
            protocol.send_close(code, "the test says so")
            self._flush(writer, protocol)

    async def until(self, condition: Callable[[], object], *, within_s: float = 60.0) -> None:
        """Wait until something has been heard; AssertionError with the story so far if it was not."""
        deadline = time.monotonic() + within_s
        while not condition():
            self._changed.clear()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                told = "\n".join(str(message)[:400] for message in self.messages[-30:])
                raise AssertionError(f"not heard within {within_s} s; the last messages were:\n{told}\n{self.errors}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left_s, 0.1))

    # --- The two doors ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await self._join(head, reader, writer)
            else:
                await self._converse(head, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the test is over, or the agent is gone
        finally:
            self._connections.pop(writer, None)
            writer.close()

    async def _join(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.joins.append(body)
        if body["token"] != JOIN_TOKEN:
            answer, status = {"title": "Refused", "detail": "the token is not valid"}, "403 Forbidden"
        else:
            self.credentials[body["node"]] = f"credential-{len(self.joins)}"
            answer, status = {"node": body["node"], "credential": self.credentials[body["node"]]}, "201 Created"
        raw = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw)
        await writer.drain()
        self._changed.set()

    async def _converse(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = ServerProtocol(max_size=1 << 20)
        session = ServerSession()
        protocol.receive_data(head)
        while True:
            for event in protocol.events_received():
                if isinstance(event, Request):
                    if not self._knows(event.headers.get("Authorization", "")):
                        protocol.send_response(protocol.reject(401, "unknown credential"))
                    else:
                        protocol.send_response(protocol.accept(event))
                elif event.opcode is Opcode.BINARY:
                    self._hear(writer, protocol, session, event.data)
                elif event.opcode is Opcode.CLOSE:
                    self._connections.pop(writer, None)
            self._flush(writer, protocol)
            chunk = await reader.read(1 << 16)
            if not chunk:
                return
            protocol.receive_data(chunk)

    def _knows(self, authorization: str) -> bool:
        return authorization.removeprefix("Bearer ") in self.credentials.values()

    def _hear(
        self, writer: asyncio.StreamWriter, protocol: ServerProtocol, session: ServerSession, frame: bytes
    ) -> None:
        try:
            taken = session.receive(frame)
        except ProtocolError as err:
            self.errors.append(err)
            protocol.send_close(err.code, err.reason[:100])
            return
        self._changed.set()
        if taken is None:
            self.repeats += 1
            return
        seq, message = taken
        match message:
            case Hello():
                self._greet(writer, protocol, session, message)
            case Heartbeat():
                self.transient.append(message)
                now = time.time() + self.clock_offset_s
                self.beats.append(time.clock_gettime(time.CLOCK_BOOTTIME))
                reply = HeartbeatReply(
                    at=now, echo_at=message.at, revision=self.revision, grants_lease=self.grants_lease
                )
                self._send(writer, protocol, encode_frame(reply))
            case _ if seq == 0:
                self.transient.append(message)
            case _:
                assert session.hello is not None
                outbox = session.hello.outbox_id
                self.durable.append((outbox, seq, message))
                if self.acknowledges:
                    self._stored[outbox] = seq
                    self._send(writer, protocol, encode_frame(Ack(through=seq)))

    def _greet(
        self, writer: asyncio.StreamWriter, protocol: ServerProtocol, session: ServerSession, hello: Hello
    ) -> None:
        self.hellos.append(hello)
        if self.refuse_with is not None:
            protocol.send_close(self.refuse_with, "the test says so")
            return
        stored = self._stored.get(hello.outbox_id, 0)
        # What was not acknowledged was not committed: a real server would have rolled it back.
        self.durable = [entry for entry in self.durable if entry[0] != hello.outbox_id or entry[1] <= stored]
        welcome = Welcome(
            protocol=hello.protocol,
            server_version="fake",
            at=time.time() + self.clock_offset_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            acknowledged=stored,
        )
        self._connections[writer] = protocol
        self._send(writer, protocol, session.welcome(welcome))
        if self.revision:
            self._send(writer, protocol, encode_frame(self.current_order()))

    def _send(self, writer: asyncio.StreamWriter, protocol: ServerProtocol, frame: bytes) -> None:
        if protocol.state is not State.OPEN or writer.is_closing():
            return
        protocol.send_binary(frame)
        self._flush(writer, protocol)

    @staticmethod
    def _flush(writer: asyncio.StreamWriter, protocol: ServerProtocol) -> None:
        for data in protocol.data_to_send():
            if data:
                writer.write(data)
            else:
                with contextlib.suppress(OSError):
                    writer.write_eof()
