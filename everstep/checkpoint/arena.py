"""Memory that a rank copies its state into and its node's writer reads: the only thing that a save waits for.

It has no name in any file system, so that nothing is left behind whoever is killed. It is made once and reused; with
CUDA it is pinned, so that the copy runs at the speed of the bus.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from everstep.errors import SaveFailed

_ROOM = 1.1
"""Some more than is needed, since what is no tensor differs a little from save to save."""
_LEFT_FREE = 0.1
"""Share of the free memory that is never taken."""


class Arena:
    """Bytes shared with the writer through a file descriptor."""

    def __init__(self, size_bytes: int) -> None:
        """Raises `SaveFailed` where the machine has no memory for it."""
        self.size_bytes = int(size_bytes * _ROOM) + mmap.PAGESIZE
        free = available_bytes()
        if free is not None and self.size_bytes > free * (1 - _LEFT_FREE):
            raise SaveFailed(
                f"a save needs {self.size_bytes >> 20} MiB of host memory for its copy, and {free >> 20} MiB are free: "
                "give the node more memory, or shard the state over more ranks"
            )
        self.fd = os.memfd_create("everstep-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            self._map = mmap.mmap(self.fd, self.size_bytes)
        except OSError as err:
            os.close(self.fd)
            raise SaveFailed(f"cannot take {self.size_bytes >> 20} MiB of host memory for a save: {err}") from err
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        self._pinned = _pin(self.bytes)

    def view(self, at: int, *, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """Tensor of `sizes` over the bytes from `at` on, which must be a multiple of the item's size.

        Remembered, since every save asks for the same ones.
        """
        key = (at, dtype, sizes)
        if (found := self._views.get(key)) is None:
            count = torch.Size(sizes).numel() * dtype.itemsize
            found = self._views[key] = self.bytes[at : at + count].view(dtype).view(sizes)
        return found

    def write(self, at: int, data: bytes) -> None:
        self._map[at : at + len(data)] = data

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._views.clear()  # the mapping cannot be closed under them
        del self.bytes
        self._map.close()
        os.close(self.fd)


def available_bytes() -> int | None:
    """Memory that this process can still take: the machine's, or what its control group leaves; None if unknown."""
    found = [_meminfo(), _group_room()]
    return min((value for value in found if value is not None), default=None)


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None


def _group_room() -> int | None:
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        directory = Path("/sys/fs/cgroup") / own.lstrip("/")
        limit = (directory / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((directory / "memory.current").read_text())
    except (OSError, ValueError, StopIteration):
        return None


def _pin(data: torch.Tensor) -> bool:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0)) == 0
