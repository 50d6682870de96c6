"""Samples of the state after the steps that a replay begins with: what a resumed run does to its state, seen early.

A digest proves what was loaded; it cannot see that the steps behind it move nothing, move something else, or draw from
generators that the script seeded anew. So `Run` looks at a few values of each tensor after the first steps behind each
save, where a recovery may resume, and behind each resume, and reports them with the step. The server compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from everstep.checkpoint.samples import sampled
from everstep.checkpoint.snapshot import collect

PROBED_STEPS = 2
"""Behind each save and each resume."""
TENSORS_PER_PART = 64
"""Spread evenly over the part: weights that move at all show it in one of 64 times 32 values."""
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class StateProbes:
    """One rank's probes: `begin` where a resume may start from, `after_step` with each step."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        self._left = 0

    def begin(self, tracked: Mapping[str, Any]) -> None:
        """Look at the state now, and again after each of the next steps."""
        self.begin_with(collect(tracked))

    def begin_with(self, states: Mapping[str, Any]) -> None:
        """The same of states that somebody has just collected."""
        self._before = _probe(states)
        self._left = PROBED_STEPS

    def after_step(self, tracked: Mapping[str, Any]) -> dict[str, Any] | None:
        """`digests` by part, and the `unmoved` parts, which are as before the step; None where nobody looks."""
        if not self._left:
            return None
        before, self._before = self._before, probe(tracked)
        self._left -= 1
        unmoved = [part for part, digest in self._before.items() if before.get(part) == digest]
        return {"digests": self._before, "unmoved": unmoved}


def probe(tracked: Mapping[str, Any]) -> dict[str, str]:
    """Map each part to a checksum (16 hex digits) of its numbers and words and of a sample of its tensors.

    One copy to the host for each part, device and type, however many tensors there are.
    """
    return _probe(collect(tracked))


def _probe(states: Mapping[str, Any]) -> dict[str, str]:
    digests = {}
    for part, state in states.items():
        words: list[str] = []
        tensors: list[torch.Tensor] = []
        _walk(state, words, tensors)
        digest = hashlib.blake2b("\n".join(words).encode(), digest_size=8)
        for values in sampled(_spread(tensors, TENSORS_PER_PART)):
            digest.update(values)
        digests[part] = digest.hexdigest()
    return digests


def _walk(value: Any, words: list[str], tensors: list[torch.Tensor]) -> None:
    """Collect a tree's leaves, in the order of its keys. What no checkpoint can hold is passed over: saving says so."""
    if type(value) in _PLAIN:
        words.append(repr(value))
    elif isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            words.append(str(key))
            _walk(value[key], words, tensors)
    elif isinstance(value, list | tuple):
        if _PLAIN.issuperset(map(type, value)):  # the generators' hundreds of numbers, in one go
            words.append(repr(list(value)))
            return
        for item in value:
            _walk(item, words, tensors)
    elif isinstance(value, np.ndarray | np.generic):
        words.append(value.tobytes().hex())
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        words.append(repr(value))


def _spread(tensors: Sequence[torch.Tensor], count: int) -> Sequence[torch.Tensor]:
    """At most `count` of them, evenly spread from the first one on."""
    return tensors[:: max(1, -(-len(tensors) // count))]
