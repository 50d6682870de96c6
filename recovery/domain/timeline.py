"""Timeline entries: sentences that an operator can read at 3 a.m., each chained to the one before by its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EntryKind(StrEnum):
    """What an entry tells; pages choose its icon by this."""

    FAULT = "fault"
    STATE = "state"
    DECISION = "decision"
    ORDER = "order"
    PROOF = "proof"
    FACT = "fact"
    RECEIPT = "receipt"
    PAGE = "page"
    DRILL = "drill"
    OPERATOR = "operator"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One sentence. `at` is when it happened; when it was recorded is added by the store."""

    kind: EntryKind
    at: float
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


def chain_hash(*, previous: str, seq: int, entry: Entry) -> str:
    """SHA-256 over the previous hash and this entry in canonical JSON; an edited entry breaks every later hash."""
    body = json.dumps(
        [previous, seq, entry.kind.value, entry.at, entry.text, entry.data], sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(body.encode()).hexdigest()


def join_names(names: tuple[str, ...] | list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
