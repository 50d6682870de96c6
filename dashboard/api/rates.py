"""A simple rate limit by address for the one operation that needs no credential.

The counts live in this process: with several web processes the limit is that many times higher, which is enough to
make guessing of join tokens (256 random bits) and flooding of the database pointless.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from django.http import HttpRequest
from ninja.throttling import BaseThrottle

MAX_ADDRESSES = 10_000


class AddressLimit(BaseThrottle):
    """At most `requests` per `window_s` seconds and address. The least recently seen address is forgotten first."""

    def __init__(self, *, requests: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()

    def allow_request(self, request: HttpRequest) -> bool:
        return self.wait_for(request.META.get("REMOTE_ADDR", "")) == 0.0

    def wait_for(self, address: str) -> float:
        """Count one request of the address; 0 if it may pass, else seconds to wait (and it is not counted)."""
        now = self._clock()
        with self._lock:
            times = self._seen.setdefault(address, deque())
            self._seen.move_to_end(address)
            while len(self._seen) > MAX_ADDRESSES:
                self._seen.popitem(last=False)
            while times and times[0] <= now - self._window_s:
                times.popleft()
            if len(times) >= self._requests:
                return times[0] + self._window_s - now
            times.append(now)
            return 0.0

    def wait(self) -> float:
        """Seconds to wait, for the Retry-After header: the whole window, which is enough for any caller."""
        return self._window_s

    def forget(self) -> None:
        """Forget all counts."""
        with self._lock:
            self._seen.clear()
