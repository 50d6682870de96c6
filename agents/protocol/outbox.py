"""Durable messages on their way to the server, as a value: numbered, bounded, kept until they are acknowledged.

What had to go is told as a gap under the numbers of what it stood for. No I/O: `agents.outbox` keeps one on disk, an
`AgentSession` sends from it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from agents.protocol.codec import encode_body, encode_frame, frame_of_body
from agents.protocol.errors import OversizedFrame
from agents.protocol.messages import Message, OutboxGap, StepReports

_THINNED_TO = 8
"""One of so many step reports stays when the oldest are thinned."""
_UNENCODABLE = (OversizedFrame, UnicodeEncodeError, OverflowError)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One message under its number, or a gap that stands for the numbers from `first` to `last`."""

    first: int
    last: int
    body: bytes | None = None
    """The encoded message; None for a gap."""
    steps: bool = False
    """It holds step reports, the first to go when there is too much."""
    reason: str = ""
    """Of a gap."""

    @property
    def size_bytes(self) -> int:
        return 0 if self.body is None else len(self.body)


@dataclass
class Outbox:
    """What the server has not acknowledged yet, oldest first; it outlives connections.

    Beyond `limit` messages or `limit_bytes` the oldest step reports are thinned, then the oldest messages are dropped,
    and numbered gaps take their places, so that the loss is told.
    """

    FULL = "the agent's outbox was full"
    THINNED = "the agent's outbox was full: only some of these step reports were kept"
    FORGOTTEN = "the server had acknowledged them and does not hold them any more"
    BEHIND = "the agent's outbox is older than what the server holds; what was not sent by then is lost"

    outbox_id: str
    limit: int = 50_000
    limit_bytes: int = 32 << 20
    next_seq: int = 1
    reshaped: int = 0
    """Rises when more has changed than a new last entry and acknowledged first ones."""
    _entries: deque[Entry] = field(default_factory=deque)
    _count: int = 0
    _bytes: int = 0
    _unsent_from: int | None = None
    """What has this number or a later one was added after the outbox was restored, and has never been sent."""

    @classmethod
    def restored(
        cls, *, outbox_id: str, next_seq: int, entries: Iterable[Entry], limit: int, limit_bytes: int
    ) -> Outbox:
        """Go on with what an earlier life has kept."""
        box = cls(outbox_id=outbox_id, next_seq=next_seq, limit=limit, limit_bytes=limit_bytes)
        box._replace(entries)
        box._unsent_from = next_seq
        box._make_room()
        return box

    def add(self, message: Message) -> int:
        """Number a message and keep it until it is acknowledged.

        One that cannot be encoded must not end every connection: its loss is told in its place.
        """
        seq = self.next_seq
        try:
            body = encode_body(message)
        except _UNENCODABLE as err:
            return self.tell_gap(f"a {type(message).__name__} could not be encoded ({err})")
        self.next_seq += 1
        self._append(Entry(first=seq, last=seq, body=body, steps=isinstance(message, StepReports)))
        self._make_room()
        return seq

    def tell_gap(self, reason: str) -> int:
        """Tell of a loss whose extent is not known, under a number of its own."""
        seq = self.next_seq
        self.next_seq += 1
        self._append(Entry(first=seq, last=seq, reason=reason[:1000]))
        return seq

    def begin(self, acknowledged: int) -> None:
        """A connection begins where the server stands.

        That may be before what it once acknowledged, if it was restored from a backup: the difference is a gap. It may
        be beyond what this outbox knows, if its disk lost the newest entries: then what was added since gets later
        numbers, since the server would take them for repeats.
        """
        known_below = self.next_seq if self._unsent_from is None else self._unsent_from
        if acknowledged >= known_below:
            self._renumber(known_below, acknowledged)
        self._unsent_from = None
        self.acknowledge(acknowledged)
        first = self._entries[0].first if self._entries else self.next_seq
        if first > acknowledged + 1:
            self._entries.appendleft(Entry(first=acknowledged + 1, last=first - 1, reason=self.FORGOTTEN))
            self.reshaped += 1

    def acknowledge(self, through: int) -> None:
        """Forget everything up to and including `through`."""
        while self._entries and self._entries[0].last <= through:
            self._pop_oldest()

    def frames(self, *, after: int, through: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """(number, frame) of the entries from the one after `after` to `through`, at least one if there is any.

        Not more than about `max_bytes`, so that a long backlog is encoded and sent piece by piece.
        """
        found: list[tuple[int, bytes]] = []
        total = 0
        for entry in self._entries:
            if entry.last <= after:
                continue
            if max(entry.first, after + 1) > through or total >= max_bytes:
                break
            frame = _frame(entry, after=after)
            total += len(frame)
            found.append((entry.last, frame))
        return found

    @property
    def entries(self) -> Iterable[Entry]:
        """All that waits, oldest first."""
        return tuple(self._entries)

    @property
    def newest(self) -> Entry:
        """The entry that was added last."""
        return self._entries[-1]

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        """Messages that wait; gaps do not count."""
        return self._count

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._count += entry.body is not None
        self._bytes += entry.size_bytes

    def _pop_oldest(self) -> Entry:
        entry = self._entries.popleft()
        self._count -= entry.body is not None
        self._bytes -= entry.size_bytes
        return entry

    def _replace(self, entries: Iterable[Entry]) -> None:
        replaced = list(entries)  # read before the old ones go: they may be made from those
        self._entries.clear()
        self._count = self._bytes = 0
        for entry in replaced:
            self._append(entry)

    def _renumber(self, known_below: int, acknowledged: int) -> None:
        shift = acknowledged + 2 - known_below
        unsent = [entry for entry in self._entries if entry.last >= known_below]
        self._replace(
            [
                Entry(first=acknowledged + 1, last=acknowledged + 1, reason=self.BEHIND),
                *(
                    msgspec.structs.replace(entry, first=max(entry.first, known_below) + shift, last=entry.last + shift)
                    for entry in unsent
                ),
            ]
        )
        self.next_seq += shift
        self.reshaped += 1

    # --- When there is too much -----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Below the limits by a tenth at once, so that this is rare."""
        if self._count <= self.limit and self._bytes <= self.limit_bytes:
            return
        self.reshaped += 1
        count, size = self.limit - self.limit // 10, self.limit_bytes - self.limit_bytes // 10
        while self._count > count or self._bytes > size:
            if not self._thin():
                self._drop_oldest(count, size)

    def _thin(self) -> bool:
        """Keep one of eight among the older three quarters of step reports. False if there are too few."""
        numbers = [entry.last for entry in self._entries if entry.steps]
        older = numbers[: len(numbers) * 3 // 4]
        if len(older) < _THINNED_TO:
            return False
        gone = set(older) - set(older[_THINNED_TO - 1 :: _THINNED_TO])
        self._replace(
            _merged(
                Entry(first=entry.first, last=entry.last, reason=self.THINNED) if entry.last in gone else entry
                for entry in self._entries
            )
        )
        return True

    def _drop_oldest(self, count: int, size: int) -> None:
        first = last = self._entries[0].first
        while self._count > count or self._bytes > size:
            last = self._pop_oldest().last
        self._entries.appendleft(Entry(first=first, last=last, reason=self.FULL))


def _merged(entries: Iterable[Entry]) -> Iterable[Entry]:
    """Gaps that follow each other and have one reason become one."""
    for (is_gap, reason), group in itertools.groupby(entries, key=lambda entry: (entry.body is None, entry.reason)):
        if is_gap:
            gaps = list(group)
            yield Entry(first=gaps[0].first, last=gaps[-1].last, reason=reason)
        else:
            yield from group


def _frame(entry: Entry, *, after: int) -> bytes:
    if entry.body is not None:
        return frame_of_body(entry.body, seq=entry.last)
    gap = OutboxGap(first_seq=max(entry.first, after + 1), last_seq=entry.last, reason=entry.reason)
    return encode_frame(gap, seq=entry.last)
