"""What a runner writes down, read from where we stopped: one JSON object per line, checked like all that jobs write."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

_MAX_LINE_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20

_Pid = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Rank = Annotated[int, Meta(ge=0, le=2**31)]
_Status = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class _Event(Struct, frozen=True, kw_only=True, tag_field="kind"):
    at: float


class RunnerStarted(_Event, frozen=True, tag="runner_started"):
    pid: _Pid
    protocol: int = 1


class RankBegan(_Event, frozen=True, tag="rank_started"):
    rank: _Rank
    pid: _Pid


class RankEnded(_Event, frozen=True, tag="rank_exited"):
    rank: _Rank
    pid: _Pid
    exit_code: _Status | None = None
    signal: _Status | None = None
    detail: str = ""


class RunnerEnded(_Event, frozen=True, tag="runner_ended"):
    reason: str = ""
    detail: str = ""


class LeaseExpired(_Event, frozen=True, tag="lease_expired"):
    """The runner kills its ranks: neither contact nor progress for too long."""

    silent_s: float = 0.0
    limit_s: float = 0.0
    phase: str = ""
    """Whose limit it was; "" from a runner that does not say."""


RunnerEvent = RunnerStarted | RankBegan | RankEnded | RunnerEnded | LeaseExpired

_decoder = msgspec.json.Decoder(RunnerEvent)


class LineTail:
    """New complete lines of a growing file that somebody else writes."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self._path = path
        self._offset = start
        self._rest = b""

    @classmethod
    def of_end(cls, path: Path, size_bytes: int) -> LineTail:
        """From `size_bytes` before the file's end on; the first line may be half of one."""
        return cls(path, start=max(0, size_of(path) - size_bytes))

    def lines(self) -> list[bytes]:
        """Return the lines that were completed since the last call; none if there is no such regular file."""
        try:
            # No links and no pipes: the job may put anything into its directory, and the agent may be root.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return []
            chunks = []
            while chunk := os.pread(descriptor, _CHUNK_BYTES, self._offset):
                chunks.append(chunk)
                self._offset += len(chunk)
        finally:
            os.close(descriptor)
        *lines, self._rest = b"".join((self._rest, *chunks)).split(b"\n")
        self._rest = self._rest[-_MAX_LINE_BYTES:]
        return [line for line in lines if line]


def size_of(path: Path) -> int:
    """Of a file in bytes; 0 where there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


class EventTail:
    """The events of one runner that have not been read yet."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.malformed = 0

    def read(self) -> list[RunnerEvent]:
        events = []
        for line in self._tail.lines():
            try:
                events.append(_decoder.decode(line[:_MAX_LINE_BYTES]))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.malformed += 1
        return events
