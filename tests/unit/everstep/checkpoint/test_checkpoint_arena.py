"""Memory that a rank shares with its node's writer."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from everstep.checkpoint.arena import Arena, available_bytes
from everstep.errors import SaveFailed


def test_whoever_has_the_descriptor_reads_what_was_copied() -> None:
    arena = Arena(64)
    arena.view(8, dtype=torch.float32, sizes=(2, 3)).copy_(torch.arange(6.0).reshape(2, 3))
    arena.write(40, b"words")
    with mmap.mmap(os.dup(arena.fd), arena.size_bytes, prot=mmap.PROT_READ) as other:
        assert torch.frombuffer(bytearray(other[8:32]), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
        assert other[40:45] == b"words"
    arena.close()


def test_holds_a_little_more_than_was_asked_for() -> None:
    arena = Arena(10_000)
    assert arena.size_bytes >= 11_000
    arena.close()


def test_memory_that_is_not_there_is_refused_with_both_numbers() -> None:
    free = available_bytes()
    assert free is not None
    with pytest.raises(SaveFailed, match=r"needs \d+ MiB of host memory .* and \d+ MiB are free: give the node more"):
        Arena(free * 2)


def test_closing_gives_descriptor_and_memory_back() -> None:
    arena = Arena(1000)
    fd = arena.fd
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
