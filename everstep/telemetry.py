"""Datagrams from ranks and runners to the node's agent: one JSON object each, over a Unix datagram socket.

`Run` and the runner send them, the agent decodes them. Standard library only. Sending never blocks and never raises:
a full or vanished socket must not slow training down. What could not be sent is kept, in order and up to a limit, and
is tried again with the next datagram, so that an agent may restart without losing the story.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from typing import Any

from everstep.errors import BadDatagram

MAX_DATAGRAM_BYTES = 60_000
BACKLOG_LIMIT = 1000
"""Datagrams kept while the agent is away; at 20 steps per second, the last 50 seconds."""

KINDS = frozenset({"resumed", "step", "phase", "saved", "rehashed", "save_failed", "save_skipped", "finished", "poke"})


_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode_fields(fields: dict[str, Any]) -> str:
    """A JSON object of them. Raises `BadDatagram` when they are none.

    It is half of what a report costs: `Run` makes it once, and `join_fields` puts it behind log's and datagram's heads.
    """
    try:
        return _ENCODE(fields)
    except (TypeError, ValueError, RecursionError) as err:
        raise BadDatagram(f"Cannot send {sorted(fields)}: {err}. Report plain numbers and strings.") from err


def join_fields(first: str, second: str) -> str:
    """One JSON object of two that share no name; the first is not empty."""
    return f"{first[:-1]},{second[1:]}" if len(second) > 2 else first


def encode(fields: dict[str, Any]) -> bytes:
    """The datagram's bytes. Raises `BadDatagram` when they are too many or not JSON."""
    return _checked(encode_fields(fields))


def _checked(text: str) -> bytes:
    frame = text.encode()
    if len(frame) > MAX_DATAGRAM_BYTES:
        raise BadDatagram(f"Cannot send {text[:60]!r}: {len(frame)} bytes are over the limit of {MAX_DATAGRAM_BYTES}.")
    return frame


def decode(frame: bytes) -> dict[str, Any]:
    """The fields of a received datagram; `kind`, `job` and `generation` are checked, the rest is the kind's own.

    Raises `BadDatagram` for bytes that are not such an object.
    """
    try:
        fields = json.loads(frame)
    except (ValueError, RecursionError) as err:
        raise BadDatagram(f"A datagram of {len(frame)} bytes is not JSON: {err}. Drop it.") from err
    if not isinstance(fields, dict):
        raise BadDatagram(f"A datagram holds a JSON {type(fields).__name__}, not an object. Drop it.")
    if fields.get("kind") not in KINDS:
        raise BadDatagram(f"A datagram's kind is {str(fields.get('kind'))[:40]!r}; known are {sorted(KINDS)}. Drop it.")
    generation = fields.get("generation")
    if not isinstance(fields.get("job"), str) or not isinstance(generation, int) or isinstance(generation, bool):
        raise BadDatagram(f"A datagram of kind {fields['kind']!r} names no job and generation. Drop it.")
    return fields


class Telemetry:
    """Sends one rank's (or runner's) datagrams. Without a socket path, everything is silently dropped."""

    def __init__(self, *, socket_path: str | None, job: str, generation: int, rank: int | None = None) -> None:
        self.generation = generation
        self._path = socket_path
        base = {"job": job, "pid": os.getpid()} | ({} if rank is None else {"rank": rank})
        self._base = encode_fields(base)[1:-1]
        self._backlog: deque[bytes] = deque(maxlen=BACKLOG_LIMIT)
        self._socket: socket.socket | None = None

    @property
    def open(self) -> bool:
        """There is somebody to tell."""
        return bool(self._path)

    def send(self, kind: str, **fields: Any) -> bool:
        """Send one datagram now, after what is still waiting; True when nothing is left waiting."""
        try:
            return self.open and self.send_encoded(kind, encode_fields(fields))
        except BadDatagram:
            return False

    def send_encoded(self, kind: str, fields: str) -> bool:
        """The same, of what `encode_fields` made."""
        if not self._path:
            return False
        head = f'{{"kind":"{kind}",{self._base},"generation":{self.generation},"at":{time.time()!r}}}'
        try:
            frame = _checked(join_fields(head, fields))
        except BadDatagram:
            return False
        self._backlog.append(frame)
        return self._flush()

    def close(self, *, limit_s: float = 0.5) -> None:
        """Give a slow agent at most `limit_s` to take what is waiting, then let go of the socket."""
        deadline = time.monotonic() + limit_s
        while self._path and not self._flush() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _flush(self) -> bool:
        """Whatever goes wrong, the path is looked up anew: an agent that restarted has bound a new socket to it."""
        kept = self._socket is not None
        try:
            if self._socket is None:
                self._socket = _connected(self._path or "")
            while self._backlog:
                self._socket.send(self._backlog[0])
                self._backlog.popleft()
        except OSError as err:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            return kept and not isinstance(err, BlockingIOError) and self._flush()
        return True


def _connected(path: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        channel.connect(path)
    except OSError:
        channel.close()
        raise
    return channel
