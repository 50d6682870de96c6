"""The moment that ages are counted to: given by the caller, so that a page and its tests agree, or the clock's."""

from __future__ import annotations

import time


def moment(now: float | None) -> float:
    """`now` itself, or the present in Unix seconds."""
    return time.time() if now is None else now
