"""Which rank writes which bytes: planned once by torch.distributed.checkpoint, and again only when the state changes.

`Saver` asks for it. A tensor that all ranks hold alike is written by one of them, the load spread over all; of a
sharded one each rank writes its part. A plain tensor that differs between ranks gets a key for each rank.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from everstep.errors import SaveFailed
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

    def __init__(self, plan: SavePlan) -> None:
        # Larger items first: each block is then aligned for its type, without gaps.
        items = sorted(plan.items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn, _offsets(item)))
        self.chunks: tuple[Chunk, ...] = tuple(_chunks(items))
        self.size_bytes = sum(chunk.size_bytes for chunk in self.chunks)
        self.text = json.dumps([vars(chunk) for chunk in self.chunks])
        """The chunks as JSON."""

    def copy(
        self,
        tensors: Mapping[str, torch.Tensor],
        view: Callable[..., torch.Tensor],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Copy this rank's blocks of the live tensors (by key) to where `view` says; returns when all are copied.

        meanwhile: what else reads the live state; done when this returns. Raises `SaveFailed` where a tensor is not
        what this layout was made for.
        """
        targets, sources = [], []
        with torch.no_grad():
            for chunk in self.chunks:
                block = tensors[chunk.key]
                if isinstance(block, DTensor):
                    block = block.to_local()
                if block.shape != chunk.sizes:
                    raise SaveFailed(f"{chunk.key} has shape {tuple(block.shape)} here, {chunk.sizes} was planned")
                targets.append(view(chunk.at, dtype=block.dtype, sizes=chunk.sizes))
                sources.append(block)
            with _beside(meanwhile or (lambda: None)):
                if targets:  # a rank may have nothing to write: there are fewer tensors than ranks
                    torch._foreach_copy_(targets, sources, non_blocking=True)  # one call: Python costs more than copies
        for device in {block.device for block in sources} - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)  # a model may be spread over several


@contextlib.contextmanager
def _beside(work: Callable[[], None]) -> Iterator[None]:
    """Do that while the body copies, which leaves Python to others; returns when both are done.

    With an accelerator it is done behind the body: copies are only queued there, and what another thread asks a device
    for would not wait for the streams of this one.
    """
    if torch.accelerator.is_available():
        yield
        work()
        return
    with ThreadPoolExecutor(1, thread_name_prefix="everstep-look") as other:
        finish: Callable[[], object]
        try:
            finish = other.submit(work).result
        except RuntimeError:  # this process may have no more threads
            finish = work
        yield
        finish()


Signature = tuple[tuple[str, torch.dtype, torch.Size, object], ...]


def signature(tensors: Mapping[str, torch.Tensor]) -> Signature:
    """Equal as long as a layout made for these tensors can be used again."""
    return tuple(
        (key, tensor.dtype, tensor.shape, tensor.placements if isinstance(tensor, DTensor) else None)
        for key, tensor in tensors.items()
    )


def plan_layout(tensors: Mapping[str, torch.Tensor], team: Team) -> Layout:
    """Plan together with all ranks; a collective. Raises `SaveFailed`, on all ranks, where one cannot."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plan, problem = None, ""
    try:
        planner.set_up_planner(dict(tensors), is_coordinator=team.leads)
        plan = planner.create_local_plan()
    except Exception as err:  # the others must not be left waiting
        problem = f"{type(err).__name__}: {err}"
    said = team.gather((plan, problem))
    if problems := [f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(said) if theirs]:
        raise SaveFailed(f"what is to be saved cannot be laid out: {'; '.join(problems)}")
    # Each rank makes the whole plan from the same parts: cheaper than sending it, and the outcome is the same.
    return Layout(planner.create_global_plan([theirs for theirs, _ in said if theirs is not None])[0][team.rank])


def _chunks(items: Iterable[WriteItem]) -> list[Chunk]:
    found, at = [], 0
    for item in items:
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


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _offsets(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)
