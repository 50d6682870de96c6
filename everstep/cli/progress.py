"""How far a long command is, told on the error stream: on a terminal in one line that is written over, else rarely."""

from __future__ import annotations

import time
from typing import IO

from everstep.cli.output import duration, size

_QUIET_S = 1.0
"""What is done by then needs no progress."""
_EVERY_S, _EVERY_S_IN_LOGS = 0.2, 10.0


class Progress:
    """Counts bytes towards `total_bytes`."""

    def __init__(self, total_bytes: int, *, stream: IO[str]) -> None:
        self._total = total_bytes
        self._done = 0
        self._stream = stream
        self._terminal = stream.isatty()
        self._began = time.monotonic()
        self._next = self._began + (_QUIET_S if self._terminal else _EVERY_S_IN_LOGS)
        self._about = ""
        self._shown = False

    def begin(self, about: str) -> None:
        self._about = about

    def advance(self, count: int) -> None:
        """So many bytes more."""
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_EVERY_S if self._terminal else _EVERY_S_IN_LOGS)
        self._show(now - self._began)

    def end(self) -> None:
        """Clear the line on a terminal."""
        if self._shown and self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _show(self, elapsed_s: float) -> None:
        rate = self._done / elapsed_s
        left = duration((self._total - self._done) / rate) if self._total > self._done else "little"
        share = min(100, 100 * self._done // max(1, self._total))
        line = f"{self._about}: {share} % of {size(self._total)}, {size(int(rate))}/s, {left} left"
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()
        self._shown = True
