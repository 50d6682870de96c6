"""A few values of each tensor, spread evenly over it: enough to see that a step moved it, or that two ranks differ.

`probe.py` reports them after the steps behind a save, `replicas.py` compares them between ranks at each save, so they
must cost next to nothing: a view of each tensor, and one copy to the host for each device and type.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

VALUES_PER_TENSOR = 32


def sampled(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """The samples' bytes, by device and type in the order in which they are met; of a DTensor, this rank's part."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if count := local.numel():
                alike.setdefault((local.device, local.dtype), []).append(_sample(local, count))
        return [torch.cat(samples).view(torch.uint8).cpu().numpy().tobytes() for samples in alike.values()]


def _sample(local: torch.Tensor, count: int) -> torch.Tensor:
    every = -(-count // VALUES_PER_TENSOR)
    if local.is_contiguous():
        return local.as_strided((-(-count // every),), (every,), local.storage_offset())
    # In the order of the numbers, not of the memory: a moment may come back from disk in another layout.
    return local.take(torch.arange(0, count, every, device=local.device))
