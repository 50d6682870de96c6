"""Domain dataclasses to plain JSON values and back; unknown keys are ignored, so that old rows stay readable."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Dataclasses become objects, tuples lists, enums their values."""
    return msgspec.to_builtins(value)


def from_json(data: Any, kind: type[T]) -> T:
    """Build a domain value. Raises `msgspec.ValidationError` naming the field that does not fit."""
    value = msgspec.convert(data, kind)
    _fill_in(value)
    return value


def _fill_in(value: Any) -> None:
    """Give each dataclass its defaults as values of its own.

    msgspec leaves those that the data do not name to the class, and then leaves them out when it writes the value.
    """
    if is_dataclass(value):
        own = vars(value)
        for field in fields(value):
            if field.name not in own:
                object.__setattr__(value, field.name, getattr(value, field.name))
            _fill_in(own[field.name])
    elif isinstance(value, tuple | list):
        for item in value:
            _fill_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            _fill_in(item)
