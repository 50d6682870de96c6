"""Which plain tensors all ranks hold alike, so that one of them writes for all.

Torch's checkpoint planning takes every plain tensor for a replica. That is right for parameters under
DistributedDataParallel, and wrong for the averages of a batch norm or for a model that nobody synchronizes. So ranks
compare, at every save, a fingerprint of what they are taken to hold alike: in full, but for what has been found alike
once and training itself keeps so; of that a sample, since ranks that drift apart do so in nearly every value. Where
fingerprints differ, they compare tensor by tensor.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.samples import sampled
from everstep.checkpoint.snapshot import data_parallel, unwrap

Fingerprint = tuple[str | int, ...]
_BLOCK_WORDS = 1 << 17
"""Small enough for a processor's cache, large enough for a device."""
_SEED = 20


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

    def checksums(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Fingerprint]:
        """Of the plain tensors that have to be compared, by path: type, shape and sums."""
        return {
            path: (str(tensor.dtype), *tensor.shape, *checksum(tensor))
            for path, tensor in tensors.items()
            if path not in self._settled and not isinstance(tensor, DTensor)
        }

    def compare(self, said: Sequence[Mapping[str, Fingerprint]], *, synchronized: Iterable[str]) -> None:
        """Take every rank's checksums in; `synchronized` are paths that training itself keeps alike once they are."""
        found: dict[str, list[Fingerprint]] = {}
        for theirs in said:
            for path, value in theirs.items():
                found.setdefault(path, []).append(value)
        self.differing = frozenset(
            path for path, values in found.items() if len(values) < len(said) or len(set(values)) > 1
        )
        self._settled |= (found.keys() - self.differing) & set(synchronized)


def synchronized_paths(tracked: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Parameters of models under DistributedDataParallel, and what optimizers hold for such parameters alone."""
    wrappers = _data_parallel(tracked)
    synchronized = {
        (part, name): id(parameter)
        for part, wrapper in wrappers.items()
        for name, parameter in unwrap(wrapper).named_parameters()
        if name not in wrapper.parameters_to_ignore
    }
    optimizers = [
        part
        for part, target in tracked.items()
        if type(target).__module__.startswith("torch.optim.") and _holds_only(target, set(synchronized.values()))
    ]
    moments = {path for path in tensors if any(path.startswith(f"{part}/state/") for part in optimizers)}
    return {f"{part}/{name}" for part, name in synchronized} | moments


def _holds_only(optimizer: Any, parameters: set[int]) -> bool:
    """Whether it steps nothing but these parameters (by id)."""
    groups = getattr(optimizer, "param_groups", None)
    return groups is not None and all(id(parameter) in parameters for group in groups for parameter in group["params"])


def handed_on_paths(tracked: Mapping[str, Any]) -> set[str]:
    """Buffers that DistributedDataParallel copies from rank 0 to all before each forward pass: only rank 0's count."""
    return {
        f"{part}/{name}"
        for part, wrapper in _data_parallel(tracked).items()
        if wrapper.broadcast_buffers
        for name, _ in unwrap(wrapper).named_buffers()
        if name not in wrapper.parameters_to_ignore
    }


def _data_parallel(tracked: Mapping[str, Any]) -> dict[str, DistributedDataParallel]:
    found = {part: data_parallel(target) for part, target in tracked.items()}
    return {part: wrapper for part, wrapper in found.items() if wrapper is not None}


def checksum(tensor: torch.Tensor) -> tuple[int, ...]:
    """A hash of a tensor's bytes and their places, at nearly the speed of memory, also on a device.

    Sums of 32-bit words, each times a random number of its place, modulo 2**64: Carter and Wegman's multilinear hash.
    A plain sum would take ranks for alike that hold the same values in another order.
    """
    if not tensor.numel():
        return (0,)
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    words = data[:whole].clone() if data.storage_offset() % 4 else data[:whole]
    factors = _factors(data.device)
    blocks: list[torch.Tensor] = list(words.view(torch.int32).split(_BLOCK_WORDS))  # type: ignore[no-untyped-call]
    told = torch.stack([(block * factors[: len(block)]).sum() for block in blocks]).cpu().numpy().tobytes()
    digest = hashlib.blake2b(told, digest_size=8).digest()
    return (data.numel(), int.from_bytes(digest, "big"), *data[whole:].tolist())


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """The same on every rank, and drawn without touching the generators of training."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (_BLOCK_WORDS,), generator=generator).to(device)
