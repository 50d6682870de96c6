"""Samples of the state after the steps that a replay begins with: what a resumed run does to its state, seen early.

A digest proves what was loaded; it cannot see that the steps behind it move nothing, move something else, or draw from
generators that the script seeded anew. So `Run` looks at a few values of each tensor after the first steps behind each
save, where a recovery may resume, and behind each resume, and reports them with the step. The server compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from everstep.checkpoint.snapshot import collect
from everstep.checkpoint.tree import flatten
from everstep.errors import UnsupportedState

PROBED_STEPS = 2
"""Behind each save and each resume."""
VALUES_PER_TENSOR = 32
"""Spread evenly over the tensor, so that weights that move at all show it in one of the tensors."""


class StateProbes:
    """One rank's probes: `begin` where a resume may start from, `after_step` with each step."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        self._left = 0

    def begin(self, tracked: Mapping[str, Any]) -> None:
        """Look at the state now, and again after each of the next steps."""
        self._before = probe(tracked)
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
    """Map each part to a checksum (16 hex digits) of its values and of a sample of its tensors.

    One copy to the host for each part and device, however many tensors there are. A part that cannot be saved is left
    out: saving says why, and training goes on.
    """
    digests = {}
    for part, state in collect(tracked).items():
        try:
            structure, tensors = flatten(state, path=part)
        except UnsupportedState:
            continue
        text = json.dumps(structure, sort_keys=True).encode()
        digest = hashlib.blake2b(text, digest_size=8)
        for values in _samples(tensors.values()):
            digest.update(values)
        digests[part] = digest.hexdigest()
    return digests


def _samples(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        flat = local.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // VALUES_PER_TENSOR)][:VALUES_PER_TENSOR]
        by_device.setdefault(sample.device, []).append(sample.contiguous().view(torch.uint8))
    return [torch.cat(samples).cpu().numpy().tobytes() for samples in by_device.values()]
