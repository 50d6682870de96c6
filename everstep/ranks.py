"""The ranks of this run as saving and loading see them: who am I, gather, broadcast.

`Run` makes one `Team` when it resumes. A script without a process group is a team of one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from everstep.errors import UsageError

Value = TypeVar("Value")

_APART_LIMIT = timedelta(minutes=5)
"""For one message between two ranks."""


class Team:
    """All ranks of the default process group, or this process alone. Gather and broadcast are collectives."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.group = dist.group.WORLD if dist.get_backend() == "gloo" else _gloo_group()
        else:
            self.rank, self.world_size = 0, 1
            expected = int(os.environ.get("WORLD_SIZE", "1"))
            if expected > 1:
                raise UsageError(
                    f"WORLD_SIZE is {expected}, but there is no process group. "
                    "Call torch.distributed.init_process_group before run.resume()."
                )

    def apart(self) -> dist.ProcessGroup | None:
        """A group of its own for bytes between ranks, beside whatever else goes on; a collective. None if alone."""
        return _gloo_group(timeout=_APART_LIMIT) if self.world_size > 1 else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Each rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def greatest(self, *values: int) -> list[int]:
        """For each value, the greatest that any rank has: one small reduction, cheap enough for a training loop."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(value) for value in tensor]

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def _gloo_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Saving exchanges small host objects; over NCCL each of them would cross the GPU."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
