"""A rank's own log and beats: the truth that an auditor reads without asking the server.

`Run` writes them when EVERSTEP_LOG_DIR names a directory. One JSON object per line, handed to the kernel at once, so
that the lines of a killed rank are complete. A log that cannot be written never stops training.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from everstep.errors import BadDatagram
from everstep.telemetry import encode_fields, join_fields

BEAT_INTERVAL_S = 0.02


class RankLog:
    """Appends to `rank-<rank>.jsonl` in `directory`; with None, it writes nothing."""

    def __init__(self, directory: Path | None, *, rank: int, generation: int) -> None:
        self.generation = generation
        self._rank = rank
        self._beats_path = None if directory is None else directory / f"rank-{rank}.beats"
        self._fd = None if directory is None else _open_for_append(directory / f"rank-{rank}.jsonl")

    @property
    def open(self) -> bool:
        return self._fd is not None

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line; `at` is Unix seconds, `monotonic_ns` orders lines of one boot."""
        if self.open:
            with contextlib.suppress(BadDatagram):
                self.write_encoded(kind, encode_fields(fields))

    def write_encoded(self, kind: str, fields: str) -> None:
        """The same, of what `encode_fields` made."""
        if self._fd is None:
            return
        head = (
            f'{{"kind":"{kind}","at":{time.time()!r},"monotonic_ns":{time.monotonic_ns()},"pid":{os.getpid()},'
            f'"generation":{self.generation},"rank":{self._rank}}}'
        )
        try:
            os.write(self._fd, f"{join_fields(head, fields)}\n".encode())
        except (OSError, ValueError):
            return

    def start_beats(self) -> None:
        """Append the time to `rank-<rank>.beats` every 20 ms from a daemon thread, for as long as the process lives."""
        fd = None if self._beats_path is None else _open_for_append(self._beats_path)
        if fd is not None:
            threading.Thread(target=_beat, args=(fd,), name="everstep-beats", daemon=True).start()


def _beat(fd: int) -> None:
    while True:
        try:
            os.write(fd, f"{time.time():.6f}\n".encode())
        except OSError:
            return
        time.sleep(BEAT_INTERVAL_S)


def _open_for_append(path: Path) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
