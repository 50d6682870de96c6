"""Something happens between two statements of the code under test, as another worker or connection would have it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from django.db import connection
from django.db.models import Model


@contextlib.contextmanager
def happens_before(
    kind: str, model: type[Model], happening: Callable[[], object], *, number: int = 1
) -> Iterator[None]:
    """Let it happen just before the so-many-th statement of a kind (SELECT, UPDATE) that names the model's table.

    It happens once, on the same connection. The block must come to that statement.
    """
    seen = 0

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal seen
        if sql.startswith(kind) and f'"{model._meta.db_table}"' in sql:
            seen += 1
            if seen == number:
                happening()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(watch):
        yield
    assert seen >= number, f"there were {seen} statements of kind {kind} on {model._meta.db_table}"
