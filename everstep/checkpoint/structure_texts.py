"""The JSON of a state's structures, written anew only where one has changed since the last save.

`Saver` asks for it while training waits. Mostly nothing but the random generators has changed.
"""

from __future__ import annotations

import json
import marshal

from everstep.checkpoint.tree import Structure

_PLAIN_TREE = 2
"""Of marshal's formats the last one without references: equal bytes are equal values of equal types, bit for bit."""


class StructureTexts:
    """Remembers the last structure of each part with its text."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, str]] = {}

    def of(self, part: str, structure: Structure) -> str:
        """As `json.dumps` writes it."""
        try:
            # == would take True for 1 and -0.0 for 0.0, and no NaN for itself.
            exact = marshal.dumps(structure, _PLAIN_TREE)
        except ValueError:  # it holds a kind of number of its own, such as an IntEnum
            return json.dumps(structure)
        last = self._last.get(part)
        if last is None or last[0] != exact:
            last = self._last[part] = (exact, json.dumps(structure))
        return last[1]
