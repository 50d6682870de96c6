"""Time that the simulation makes up: a queue of things to do, each at its moment. Nothing here sleeps."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]

START = 1_000_000.0
"""Unix seconds at which every schedule begins: far from 0, so that an absolute time taken for a duration is seen."""


class VirtualTime:
    def __init__(self) -> None:
        self.now = START
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    def after(self, delay_s: float, action: Action) -> None:
        """Do it in `delay_s` seconds; what is due at the same moment is done in the order of the calls."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, action))

    def run_next(self) -> bool:
        """Go to the next moment and do what is due; False if nothing is left."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True

    @property
    def elapsed_s(self) -> float:
        return self.now - START
