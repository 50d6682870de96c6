"""The ranks of this run as saving and loading see them: who am I, gather, broadcast.

`Run` makes one `Team` when it resumes. A script without a process group is a team of one.
"""

from __future__ import annotations

import os
import pickle
import struct
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from everstep.errors import UsageError

Value = TypeVar("Value")

_APART_LIMIT = timedelta(minutes=5)
"""For one message between two ranks."""
_SMALL_BYTES = 1024
_LENGTH = struct.Struct("<Q")


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
        """Each rank's value, in rank order, on every rank; one collective for values of less than a kilobyte."""
        if self.world_size == 1:
            return [value]
        packed = pickle.dumps(value)
        given = self._gather_bytes(packed, room=_SMALL_BYTES)
        if (longest := max(length for length, _ in given)) > _SMALL_BYTES:
            given = self._gather_bytes(packed, room=longest)
        return [pickle.loads(data) for _, data in given]  # noqa: S301 - from ranks of this run, as torch's own gather

    def _gather_bytes(self, data: bytes, *, room: int) -> list[tuple[int, bytes]]:
        """Each rank's number of bytes, and as many of them as there is room for: one collective."""
        mine = torch.zeros(_LENGTH.size + room, dtype=torch.uint8)
        head = _LENGTH.pack(len(data)) + data[:room]
        mine[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everybody, mine, group=self.group)
        found = []
        for theirs in everybody:
            packet = theirs.numpy().tobytes()
            length = int(_LENGTH.unpack_from(packet)[0])
            found.append((length, packet[_LENGTH.size : _LENGTH.size + length]))
        return found

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
