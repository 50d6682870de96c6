"""Bytes between files and host tensors, as ranks send them to each other: `memory_load.py` and `memory_partner.py`."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def read_bytes(path: Path, at: int, size_bytes: int) -> torch.Tensor:
    """`size_bytes` of a file from `at` on, as uint8. Raises OSError, also where the file ends before."""
    data = torch.empty(size_bytes, dtype=torch.uint8)
    view = data.numpy().data
    with path.open("rb", buffering=0) as file:
        while len(view):
            count = os.preadv(file.fileno(), [view], at)
            if not count:
                raise OSError(f"{path} ends at byte {at}")
            view, at = view[count:], at + count
    return data


def write_bytes(path: Path, at: int, data: torch.Tensor) -> None:
    """Write a uint8 tensor into a file that is there. Raises OSError."""
    view = data.numpy().data
    with path.open("r+b", buffering=0) as file:
        while len(view):
            count = os.pwrite(file.fileno(), view, at)
            view, at = view[count:], at + count
