"""The conversation of one connection as a value: bytes in, messages out, no I/O and no clock.

The agent's link and the server's consumer hold one session per connection. `AgentSession` sends what its outbox holds
and forgets it when it is acknowledged; `ServerSession` demands a hello first, drops repeats and refuses gaps.
"""

from __future__ import annotations

from typing import Protocol

from agents.protocol.codec import agent_frames, encode_frame, server_frames
from agents.protocol.errors import MalformedFrame, OutOfOrder, UnsupportedVersion
from agents.protocol.messages import DURABLE, Ack, FromAgent, FromServer, Hello, Message, OutboxGap, Welcome
from agents.protocol.version import OLDEST_SUPPORTED_VERSION, PROTOCOL_VERSION

_WINDOW = 1000
"""Durable messages that may be on their way at once: heartbeats wait behind those that the server has no time for."""
_BATCH_BYTES = 256 << 10


class Pending(Protocol):
    """What a session needs of an outbox; see `agents.protocol.outbox.Outbox`."""

    def begin(self, acknowledged: int) -> None: ...
    def acknowledge(self, through: int) -> None: ...
    def frames(self, *, after: int, through: int, max_bytes: int) -> list[tuple[int, bytes]]: ...


class AgentSession:
    """The agent's end of one connection."""

    def __init__(self, hello: Hello, outbox: Pending) -> None:
        self._hello = hello
        self._outbox = outbox
        self._decoder = server_frames()
        self._sent_through: int | None = None
        self._acknowledged = 0

    @property
    def established(self) -> bool:
        """The server has said welcome."""
        return self._sent_through is not None

    def opening(self) -> bytes:
        """The first frame to send."""
        return encode_frame(self._hello)

    def receive(self, frame: bytes) -> FromServer:
        """Take one frame; acknowledgements reach the outbox here. Raises `ProtocolError`."""
        _, message = self._decoder.decode(frame)
        match message:
            case Welcome(acknowledged=acknowledged):
                self._outbox.begin(acknowledged)
                self._sent_through = self._acknowledged = acknowledged
            case Ack(through=through):
                self._acknowledged = max(self._acknowledged, through)
                self._outbox.acknowledge(through)
        return message

    def frames_to_send(self) -> list[bytes]:
        """The next durable messages to send on this connection, encoded and in order; empty before the welcome.

        One batch of bounded size, and never too many that are not acknowledged: ask again until there are none, and
        after each acknowledgement.
        """
        if self._sent_through is None:
            return []
        batch = self._outbox.frames(
            after=self._sent_through, through=self._acknowledged + _WINDOW, max_bytes=_BATCH_BYTES
        )
        if batch:
            self._sent_through = batch[-1][0]
        return [frame for _, frame in batch]

    def transient(self, message: Message) -> bytes:
        """Encode a message that may be lost (heartbeats, GPU samples)."""
        if isinstance(message, DURABLE):
            raise TypeError(f"{type(message).__name__} is durable: add it to the outbox")
        return encode_frame(message)


class ServerSession:
    """The server's end of one connection."""

    def __init__(self) -> None:
        self._decoder = agent_frames()
        self.hello: Hello | None = None
        self._received_through = 0

    def receive(self, frame: bytes) -> tuple[int, FromAgent] | None:
        """Take one frame. Returns (sequence number, message), or None for a repeat. Raises `ProtocolError`.

        The first message must be a hello of a supported version.
        """
        seq, message = self._decoder.decode(frame)
        if self.hello is None:
            if not isinstance(message, Hello):
                raise MalformedFrame(f"the first message is {type(message).__name__}, not a hello")
            if not OLDEST_SUPPORTED_VERSION <= message.protocol <= PROTOCOL_VERSION:
                raise UnsupportedVersion(message.protocol, oldest=OLDEST_SUPPORTED_VERSION, newest=PROTOCOL_VERSION)
            self.hello = message
            return seq, message
        if isinstance(message, Hello):
            raise MalformedFrame("a second hello on one connection")
        if not isinstance(message, DURABLE):
            return 0, message
        return self._take_durable(seq, message)

    def welcome(self, message: Welcome) -> bytes:
        """Encode the welcome and start counting after what is already stored."""
        self._received_through = message.acknowledged
        return encode_frame(message)

    def _take_durable(self, seq: int, message: FromAgent) -> tuple[int, FromAgent] | None:
        if seq == 0:
            raise MalformedFrame(f"{type(message).__name__} has no sequence number")
        if seq <= self._received_through:
            return None
        expected = self._received_through + 1
        starts = message.first_seq if isinstance(message, OutboxGap) and message.last_seq == seq else seq
        if starts > expected:
            raise OutOfOrder(f"Message {seq} came where {expected} was due.")
        self._received_through = seq
        return seq, message
