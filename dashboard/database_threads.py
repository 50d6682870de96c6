"""Database work of coroutines: a few threads of their own, so that one slow query never holds up other sockets.

Channels' `database_sync_to_async` sends everything through one thread per process; a query of 2 s there delays every
socket by 2 s. The agents' and the browsers' consumers call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from django.db import close_old_connections

Result = TypeVar("Result")


class DatabaseThreads:
    """So many threads that use the ORM, each with a connection of its own."""

    def __init__(self, count: int, *, name: str) -> None:
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)

    async def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run a function that uses the ORM, with its connection closed when it is too old or broken."""
        call = partial(with_fresh_connection, partial(function, *args, **kwargs))
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


in_database_thread = DatabaseThreads(4, name="live-database").run


def with_fresh_connection(call: Callable[[], Result]) -> Result:
    """Call a function that uses the ORM in this thread, which serves many."""
    close_old_connections()
    try:
        return call()
    finally:
        close_old_connections()
