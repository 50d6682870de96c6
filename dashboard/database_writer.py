"""What the agents' sockets of one web process write: all that waits is one transaction, flushed once.

SQLite has one writer at a time, who keeps all others out until its disk has flushed, and nobody queues: each waiter
sleeps up to 0.1 s between two tries and gives up after 20 s. Many small transactions on a slow disk are then more than
it can take, and some of them starve. So the agents' consumers hand their writes over here: however many nodes there
are, the disk is asked to flush once for all that came meanwhile. PostgreSQL flushes for many at once by itself and
locks rows only, so that each write there stays a transaction of its own, and none waits for another's rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from django.db import OperationalError, connection, transaction

from dashboard.database_threads import in_database_thread, with_fresh_connection

log = logging.getLogger(__name__)

Result = TypeVar("Result")

HOLD_S = 0.5
"""No further write joins a group that has been at work for so long: others want to write, too."""
REST_S = 0.12
"""Before each group: longer than SQLite sleeps between two tries, so that another process that waits finds it free."""
YIELD_S = 5.0
"""For so long a group lets go first who asked for it."""


@dataclass(eq=False)
class _Write:
    """One write that somebody waits for."""

    call: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)
    begun: bool = False
    result: Any = None
    error: Exception | None = None

    def begin(self) -> bool:
        """False if nobody waits for it any more; from now on it counts as done, whoever still waits."""
        self.begun = self.begun or self.done.set_running_or_notify_cancel()
        return self.begun

    def perform(self) -> None:
        """Within the group's transaction, but undone on its own. Raises only what undoes the whole group."""
        self.result, self.error = None, None
        try:
            with transaction.atomic():
                self.result = self.call()
        except Exception as err:
            if transaction.get_rollback():
                raise
            self.error = err

    def settle(self) -> None:
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


def _settle(group: Iterable[_Write]) -> None:
    for write in group:
        write.settle()


def _commit(writes: Iterable[_Write], group: list[_Write]) -> None:
    """Perform writes in one transaction; `group` then holds them. Raises if nothing of it is stored."""
    with transaction.atomic():  # may wait long: who comes or goes until it has begun, is still heeded
        # Before all hints of the group: whoever waits for a commit does not wait for the broker.
        transaction.on_commit(partial(_settle, group))
        for write in writes:
            group.append(write)
            write.perform()
        if transaction.get_rollback():
            raise OperationalError("the transaction was lost while it was written")


class DatabaseWriter:
    """Runs functions that write in the order in which they were given, urgent ones first, many in one transaction."""

    def __init__(self, *, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._urgent: deque[_Write] = deque()
        self._waiting: deque[_Write] = deque()
        self._nobody_first = threading.Event()
        self._nobody_first.set()
        self._rested_at = 0.0
        """On the monotonic clock: before then no group begins."""

    async def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Return what the function returned, or raise what it raised, once that is committed.

        Whoever is cancelled before the function began has not written anything. What the function has done on commit
        must be robust: an error there would lose what others of its group wanted done.
        """
        return await self._run(self._waiting, partial(function, *args, **kwargs))

    async def run_urgently(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Like `run`, ahead of all that is not urgent: for what somebody waits for who gives up after a while."""
        return await self._run(self._urgent, partial(function, *args, **kwargs))

    @contextlib.contextmanager
    def going_first(self) -> Iterator[None]:
        """While this lasts no group begins: somebody writes by a thread of its own who must not wait for many."""
        self._nobody_first.clear()
        try:
            yield
        finally:
            self._rest()
            self._nobody_first.set()

    async def _run(self, queue: deque[_Write], call: Callable[[], Result]) -> Result:
        if connection.vendor != "sqlite":
            return await in_database_thread(call)
        write = _Write(call)
        queue.append(write)
        self._thread.submit(self._write_what_waits)
        result: Result = await asyncio.wrap_future(write.done)
        return result

    def _next(self) -> _Write | None:
        """The next write that somebody waits for."""
        while queue := self._urgent or self._waiting:
            write = queue.popleft()
            if write.begin():
                return write
        return None

    def _write_what_waits(self) -> None:
        if self._urgent or self._waiting:  # else an earlier group has taken it along
            self._write(self._those_in_time())

    def _those_in_time(self) -> Iterator[_Write]:
        """Those that wait, until the group has been at work for long enough; at least one."""
        until = time.monotonic() + HOLD_S
        while (write := self._next()) is not None:
            yield write
            if time.monotonic() >= until:
                return

    def _write(self, writes: Iterable[_Write]) -> None:
        """One transaction for these, once it is its turn."""
        group: list[_Write] = []
        self._nobody_first.wait(YIELD_S)
        time.sleep(max(0.0, self._rested_at - time.monotonic()))
        try:
            with_fresh_connection(partial(_commit, writes, group))
        except Exception as err:
            self._rest()
            self._recover(group, err)
        finally:
            self._rest()

    def _rest(self) -> None:
        self._rested_at = time.monotonic() + REST_S

    def _recover(self, group: list[_Write], err: Exception) -> None:
        """Nothing of a group is stored. One write may have spoilt it: halves find out which, and the others go in."""
        if group and group[0].done.done():
            log.error("agents' sockets: after a commit, hints of its writes were not sent", exc_info=err)
            return
        if len(group) > 1:
            half = len(group) // 2
            self._write(group[:half])
            self._write(group[half:])
            return
        if not group:  # it did not even begin: the database is away, for all
            group = list(iter(self._next, None))
        for write in group:
            write.error = err
        _settle(group)


writer = DatabaseWriter(name="agents-writer")
