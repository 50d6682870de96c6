"""Domain dataclasses to plain JSON values and back; unknown keys are ignored, so that old rows stay readable."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Dataclasses become objects, tuples lists, enums their values."""
    return msgspec.to_builtins(value)


def from_json(data: Any, kind: type[T]) -> T:
    """Build a domain value. Raises `msgspec.ValidationError` naming the field that does not fit."""
    return msgspec.convert(data, kind)
