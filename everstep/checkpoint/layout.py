"""Which rank writes which bytes: planned once by torch.distributed.checkpoint, and again only when the state changes.

`Saver` asks for it. A tensor that all ranks hold alike is written by one of them, the load spread over all; of a
sharded one each rank writes its part. A plain tensor that differs between ranks gets a key for each rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from everstep.ranks import Team


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of one tensor as it lies in a rank's shard: `offsets` and `sizes` in the whole tensor of `shape`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    size_bytes: int


class Layout:
    """This rank's share of every save, as long as the state keeps its shape."""

    def __init__(self, planner: DefaultSavePlanner, plan: SavePlan) -> None:
        self._planner = planner
        # Larger items first: each block is then aligned for its type, without gaps.
        self._items = sorted(plan.items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn, _offsets(item)))
        self.chunks: tuple[Chunk, ...] = tuple(self._chunks())
        self.size_bytes = sum(chunk.size_bytes for chunk in self.chunks)

    def _chunks(self) -> list[Chunk]:
        found, at = [], 0
        for item in self._items:
            assert item.tensor_data is not None
            sizes, dtype = tuple(item.tensor_data.chunk.sizes), _dtype(item)
            size_bytes = torch.Size(sizes).numel() * dtype.itemsize
            found.append(
                Chunk(
                    key=item.index.fqn,
                    dtype=str(dtype).removeprefix("torch."),
                    shape=tuple(item.tensor_data.size),
                    offsets=_offsets(item),
                    sizes=sizes,
                    at=at,
                    size_bytes=size_bytes,
                )
            )
            at += size_bytes
        return found

    def copy(self, tensors: Mapping[str, torch.Tensor], view: Callable[..., torch.Tensor]) -> None:
        """Copy this rank's blocks of the live tensors (by key) to where `view` says; returns when all are copied."""
        self._planner.set_up_planner(dict(tensors))
        on_device = False
        for item, chunk in zip(self._items, self.chunks, strict=True):
            block = self._planner.resolve_data(item)
            assert isinstance(block, torch.Tensor)
            target = view(chunk.at, dtype=block.dtype, sizes=chunk.sizes)
            target.copy_(block.detach(), non_blocking=True)
            on_device = on_device or block.is_cuda
        if on_device:
            torch.cuda.synchronize()


def signature(tensors: Mapping[str, torch.Tensor]) -> str:
    """Equal as long as a layout made for these tensors can be used again."""
    described = [
        [key, str(tensor.dtype), list(tensor.shape), str(tensor.placements) if isinstance(tensor, DTensor) else ""]
        for key, tensor in tensors.items()
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def plan_layout(tensors: Mapping[str, torch.Tensor], team: Team) -> Layout:
    """Plan together with all ranks; a collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=team.leads)
    plans = team.gather(planner.create_local_plan())
    # Each rank makes the whole plan from the same parts: cheaper than sending it, and the outcome is the same.
    return Layout(planner, planner.create_global_plan(plans)[0][team.rank])


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _offsets(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)
