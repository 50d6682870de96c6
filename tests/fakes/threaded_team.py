"""Ranks as threads of one process: a `Team` for tests of what ranks agree on, without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

_LIMIT_S = 20.0


class _Meeting:
    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=_LIMIT_S)
        self.values: list[Any] = [None] * world_size


class ThreadedTeam:
    """One rank's view; every method is a collective, as in the real one."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.world_size = rank, len(meeting.values)
        self._meeting = meeting

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        meeting = self._meeting
        meeting.values[self.rank] = value
        meeting.barrier.wait()
        found = list(meeting.values)
        meeting.barrier.wait()
        return found

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def greatest(self, *values: int) -> list[int]:
        return [max(column) for column in zip(*self.gather(values), strict=True)]


def on_each_rank(world_size: int, work: Callable[[Any], Result]) -> list[Result]:
    """What `work(team)` returned on each rank, in rank order."""
    meeting = _Meeting(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        running = [pool.submit(work, ThreadedTeam(rank, meeting)) for rank in range(world_size)]
        return [one.result(_LIMIT_S) for one in running]
