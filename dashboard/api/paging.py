"""Opaque cursors for lists: they name the last row that was seen, so that pages are stable under inserts."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from ninja import Query
from pydantic import BaseModel, ConfigDict

from dashboard.api.problems import Problem
from recovery.queries import Position

MAX_LIMIT = 200
DEFAULT_LIMIT = 50

Limit = Annotated[int, Query(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description="Items of one page.")]
Cursor = Annotated[str | None, Query(None, max_length=400, description="`next` of the page before.")]

Item = TypeVar("Item")
View = TypeVar("View")


class Page(BaseModel, Generic[Item]):
    """One page of a list; `next` is the cursor of the page after it, null on the last one."""

    model_config = ConfigDict(from_attributes=True)

    items: list[Item]
    next: str | None


def page(
    request: HttpRequest,
    response: HttpResponse,
    views: Sequence[View],
    *,
    limit: int,
    key: Callable[[View], list[Any]],
) -> dict[str, Any]:
    """Cut `views` (asked for with limit + 1) to a page; `key` gives what the cursor must hold of a view.

    A further page is announced as `next` and in the `Link` header.
    """
    shown = views[:limit]
    if len(views) <= limit:
        return {"items": shown, "next": None}
    cursor = _encode(key(shown[-1]))
    query = {**request.GET.dict(), "cursor": cursor}
    response["Link"] = f'<{request.path}?{urlencode(query)}>; rel="next"'
    return {"items": shown, "next": cursor}


def position(cursor: str | None) -> Position | None:
    """The position in a list by time that a cursor holds. Raises `Problem`."""
    match _decode(cursor):
        case None:
            return None
        case [float() as at, str() as row_id] if "\0" not in row_id:
            return Position(at=at, id=row_id)
    raise _bad_cursor()


def name_position(cursor: str | None) -> str:
    """The name in a list by name that a cursor holds; empty for the beginning. Raises `Problem`."""
    match _decode(cursor):
        case None:
            return ""
        case [str() as name] if "\0" not in name:
            return name
    raise _bad_cursor()


def number_position(cursor: str | None) -> tuple[int, int] | None:
    """The pair of numbers in a list by two numbers that a cursor holds. Raises `Problem`."""
    match _decode(cursor):
        case None:
            return None
        case [int() as first, int() as second]:
            return first, second
    raise _bad_cursor()


def _encode(values: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(values, separators=(",", ":")).encode()).decode().rstrip("=")


def _decode(cursor: str | None) -> Any:
    if cursor is None:
        return None
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError) as err:
        raise _bad_cursor() from err


def _bad_cursor() -> Problem:
    return Problem("bad_cursor", "This cursor is not one that this list gave: begin again without it.")
