"""The conversation of one connection as a value: bytes in, messages out, no I/O and no clock.

The agent's link and the server's consumer hold one session per connection. `AgentSession` numbers durable messages and
forgets them when they are acknowledged; `ServerSession` demands a hello first, drops repeats and refuses gaps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.protocol.codec import agent_frames, encode_frame, server_frames
from agents.protocol.errors import MalformedFrame, OutOfOrder, OversizedFrame, UnsupportedVersion
from agents.protocol.messages import DURABLE, Ack, FromAgent, FromServer, Hello, Message, OutboxGap, Welcome
from agents.protocol.version import OLDEST_SUPPORTED_VERSION, PROTOCOL_VERSION


@dataclass
class Outbox:
    """Durable messages that the server has not acknowledged yet, oldest first; it outlives connections.

    When `limit` is reached the oldest are dropped and a numbered gap takes their place, so that the loss is told.
    """

    FULL = "the agent's outbox was full"
    FORGOTTEN = "the server had acknowledged them and does not hold them any more"

    outbox_id: str
    limit: int = 50_000
    next_seq: int = 1
    _pending: deque[tuple[int, Message]] = field(default_factory=deque)
    _dropped: tuple[int, int] | None = None
    _dropped_because: str = FULL

    def add(self, message: Message) -> int:
        """Number a message and keep it until it is acknowledged."""
        seq = self.next_seq
        self.next_seq += 1
        self._pending.append((seq, message))
        while len(self._pending) > self.limit:
            lost, _ = self._pending.popleft()
            first = self._dropped[0] if self._dropped else lost
            self._dropped, self._dropped_because = (first, lost), self.FULL
        return seq

    def begin(self, acknowledged: int) -> None:
        """A connection begins where the server stands.

        That may be before what it once acknowledged, if it was restored from a backup: the difference is a gap.
        """
        self.acknowledge(acknowledged)
        first = self._pending[0][0] if self._pending else self.next_seq
        if self._dropped is None and first > acknowledged + 1:
            self._dropped, self._dropped_because = (acknowledged + 1, first - 1), self.FORGOTTEN

    def acknowledge(self, through: int) -> None:
        """Forget everything up to and including `through`."""
        while self._pending and self._pending[0][0] <= through:
            self._pending.popleft()
        if self._dropped and self._dropped[1] <= through:
            self._dropped = None

    def pending(self, *, after: int) -> list[tuple[int, Message]]:
        """Messages to send in order, from the one after `after`; a gap stands in for what was dropped."""
        result: list[tuple[int, Message]] = []
        if self._dropped and self._dropped[1] > after:
            first, last = self._dropped
            gap = OutboxGap(first_seq=max(first, after + 1), last_seq=last, reason=self._dropped_because)
            result.append((last, gap))
        result.extend((seq, message) for seq, message in self._pending if seq > after)
        return result

    def __len__(self) -> int:
        return len(self._pending)


class AgentSession:
    """The agent's end of one connection."""

    def __init__(self, hello: Hello, outbox: Outbox) -> None:
        self._hello = hello
        self._outbox = outbox
        self._decoder = server_frames()
        self._sent_through: int | None = None

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
                self._sent_through = acknowledged
            case Ack(through=through):
                self._outbox.acknowledge(through)
        return message

    def frames_to_send(self) -> list[bytes]:
        """Durable messages not yet sent on this connection, encoded and in order; empty before the welcome."""
        if self._sent_through is None:
            return []
        frames = []
        for seq, message in self._outbox.pending(after=self._sent_through):
            frames.append(_frame_or_gap(seq, message))
            self._sent_through = seq
        return frames

    def transient(self, message: Message) -> bytes:
        """Encode a message that may be lost (heartbeats, GPU samples)."""
        if isinstance(message, DURABLE):
            raise TypeError(f"{type(message).__name__} is durable: add it to the outbox")
        return encode_frame(message)


def _frame_or_gap(seq: int, message: Message) -> bytes:
    """One message that cannot be encoded must not end every connection: its loss is told in its place."""
    try:
        return encode_frame(message, seq=seq)
    except (OversizedFrame, UnicodeEncodeError, OverflowError) as err:
        reason = f"a {type(message).__name__} could not be encoded ({err})"
        return encode_frame(OutboxGap(first_seq=seq, last_seq=seq, reason=reason[:1000]), seq=seq)


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
