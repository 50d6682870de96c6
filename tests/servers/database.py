"""The database of a whole system under test: where it is, a look into it from outside, and how to take it away."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import psycopg

from tests.servers.postgresql import Postgresql


class SystemDatabase(Protocol):
    """SQLite or PostgreSQL, as a system's processes use it."""

    @property
    def url(self) -> str:
        """As `EVERSTEP_DATABASE_URL` takes it; empty for SQLite in the home folder."""

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a SELECT finds, read past all processes of the system."""

    def away(self) -> contextlib.AbstractContextManager[None]:
        """Nobody can write to it, or not even reach it."""


class Sqlite:
    """The file in a system's home folder."""

    url = ""

    def __init__(self, home: Path) -> None:
        self._path = home / "everstep.sqlite3"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=30)) as connection:
            return connection.execute(query).fetchall()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=30, isolation_level=None)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            try:
                yield
            finally:
                connection.execute("ROLLBACK")

    def back_up(self, path: Path) -> None:
        """A copy as of now, while others write."""
        with (
            contextlib.closing(sqlite3.connect(self._path, timeout=30)) as source,
            contextlib.closing(sqlite3.connect(path)) as copy,
        ):
            source.backup(copy)

    def restore(self, path: Path) -> None:
        """Put a copy in its place. Nobody may be using it."""
        for left in self._path.parent.glob(f"{self._path.name}*"):
            left.unlink()
        shutil.copy(path, self._path)


class PostgresqlOfSystem:
    """A server of its own that is stopped and started."""

    def __init__(self, server: Postgresql) -> None:
        self._server = server

    @property
    def url(self) -> str:
        return self._server.url

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        limit = time.monotonic() + 30
        while True:
            try:
                with psycopg.connect(self.url, connect_timeout=5) as connection:
                    return connection.execute(query).fetchall()
            except psycopg.OperationalError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.2)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self._server.stop()
        try:
            yield
        finally:
            self._server.start()
