"""Which plain tensors all ranks hold alike, so that one of them writes for all.

Torch's checkpoint planning takes every plain tensor for a replica. That is right for parameters under
DistributedDataParallel, and wrong for the averages of a batch norm or for a model that nobody synchronizes. So ranks
compare, at every save, a fingerprint of what they are taken to hold alike: in full, but for what has been found alike
once and training itself keeps so; of that a sample, since ranks that drift apart do so in nearly every value. Where
fingerprints differ, they compare tensor by tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.samples import sampled

_ROW_WORDS = 4096
"""Words of 64 bits whose sum stands for them."""


class Replicas:
    """Remembers what has been found alike on all ranks and stays so, and what differs between them."""

    def __init__(self) -> None:
        self._settled: set[str] = set()
        self.differing: frozenset[str] = frozenset()

    def fingerprint(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """Of all that this rank takes for alike (8 bytes); equal on all ranks as long as it is."""
        in_full = {path: tensor for path, tensor in tensors.items() if path not in self.differing}
        digest = hashlib.blake2b(repr(self.checksums(in_full)).encode(), digest_size=8)
        for values in sampled(tensor for path, tensor in tensors.items() if path in self._settled):
            digest.update(values)
        return digest.digest()

    def doubt(self) -> None:
        """Nothing counts as found any more: what is alike must be compared in full again."""
        self._settled.clear()

    def checksums(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """Of the plain tensors that have to be compared, by path."""
        return {
            path: checksum(tensor)
            for path, tensor in tensors.items()
            if path not in self._settled and not isinstance(tensor, DTensor)
        }

    def compare(self, said: Sequence[Mapping[str, tuple[int, ...]]], *, synchronized: Iterable[str]) -> None:
        """Take every rank's checksums in; `synchronized` are paths that training itself keeps alike once they are."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for theirs in said:
            for path, value in theirs.items():
                found.setdefault(path, []).append(value)
        self.differing = frozenset(
            path for path, values in found.items() if len(values) < len(said) or len(set(values)) > 1
        )
        self._settled |= (found.keys() - self.differing) & set(synchronized)


def synchronized_paths(tracked: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Parameters of a model under DistributedDataParallel, and what optimizers hold for them."""
    model = tracked.get("model")
    if not isinstance(model, DistributedDataParallel):
        return set()
    parameters = {f"model/{name}" for name, _ in model.module.named_parameters()}
    optimizers = [part for part, target in tracked.items() if type(target).__module__.startswith("torch.optim.")]
    moments = {path for path in tensors if any(path.startswith(f"{part}/state/") for part in optimizers)}
    return parameters | moments


def checksum(tensor: torch.Tensor) -> tuple[int, ...]:
    """The number of bytes and a hash of 64 bits, at the speed of memory: of sums of rows, and of what fills no row."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // (8 * _ROW_WORDS) * 8 * _ROW_WORDS
    digest = hashlib.blake2b(data[whole:].cpu().numpy().tobytes(), digest_size=8)
    if whole:
        aligned = data[:whole].clone() if data.storage_offset() % 8 else data[:whole]
        digest.update(aligned.view(torch.int64).view(-1, _ROW_WORDS).sum(1).cpu().numpy().tobytes())
    return data.numel(), int.from_bytes(digest.digest())
