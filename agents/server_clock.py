"""What time it is on the server: deadlines of faults are given on its clock, this node's may be wrong."""

from __future__ import annotations

import time
from collections import deque


class ServerClock:
    """Estimates the offset from heartbeat replies; the exchange with the shortest round trip tells it best."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=30)
        self._offset_s = 0.0

    def begin(self, *, server_at: float, received_at: float) -> None:
        """A connection begins: the first word gives a first estimate, older exchanges may be of another clock."""
        self._seen.clear()
        self._offset_s = server_at - received_at

    def observe(self, *, sent_at: float, received_at: float, server_at: float) -> None:
        """Take one exchange: two times of this node's clock and the server's in between, Unix seconds."""
        round_trip_s = received_at - sent_at
        if round_trip_s < 0:
            return
        self._seen.append((round_trip_s, server_at - (sent_at + received_at) / 2))
        self._offset_s = min(self._seen)[1]

    @property
    def offset_s(self) -> float:
        """Add to this node's clock to get the server's; 0 until the server was heard."""
        return self._offset_s

    def now(self) -> float:
        return time.time() + self._offset_s
