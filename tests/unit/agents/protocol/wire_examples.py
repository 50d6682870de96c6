"""Builds any message of the wire from its struct alone, so that a new field or message is tested without new code."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from hypothesis import strategies as st

from agents.protocol.messages import FromAgent, FromServer, Message

AGENT_TYPES: tuple[type[Message], ...] = FromAgent.__args__  # type: ignore[attr-defined]
SERVER_TYPES: tuple[type[Message], ...] = FromServer.__args__  # type: ignore[attr-defined]


def values_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Every value that the type's own constraints allow."""
    return _strategy(msgspec.inspect.type_info(kind))


def _strategy(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType(ge=lowest):
            return st.integers(-(2**63) if lowest is None else lowest, 2**63 - 1)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True)
        case msgspec.inspect.StrType(min_length=shortest, max_length=longest):
            return st.text(min_size=shortest or 0, max_size=min(longest or 40, 40))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(_strategy(item), max_size=3)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_strategy(key), _strategy(value), max_size=3)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([_strategy(each) for each in types])
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            given = {found.name: _strategy(found.type) for found in fields if found.required}
            optional = {found.name: _strategy(found.type) for found in fields if not found.required}
            return st.fixed_dictionaries(given, optional=optional).map(lambda filled: cls(**filled))
    raise TypeError(f"{info} is not known here: teach it to build such values")


agent_messages = st.one_of([values_of(kind) for kind in AGENT_TYPES])
server_messages = st.one_of([values_of(kind) for kind in SERVER_TYPES])
