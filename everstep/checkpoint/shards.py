"""Puts one rank's part of a checkpoint on disk: its shard and its file, hashed and synced. Standard library only.

The node's writer process calls it with the memory that the rank has copied its state into.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint.manifest import CheckpointName, FileEntry, rank_file, read_manifest, shard_file
from everstep.checkpoint.sealed import FORMAT

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank has copied: its tensors' bytes from 0 on, then a JSON object at `described_at`.

    The object has `chunks` (what lies where, without hashes), `parts` (structures), `own_keys` (of tensors that differ
    between ranks) and `handed_on` (those of them that rank 0 gives to all).
    """

    name: CheckpointName
    rank: int
    world_size: int
    shard_bytes: int
    described_at: int
    described_bytes: int


class Pace:
    """Lets bytes through at a rate, so that a shared store sees a stream and no storm. None: as fast as it goes.

    begin_after_s: before the first ones, so that blocks of several nodes take turns.
    """

    def __init__(self, bytes_per_s: float | None, *, begin_after_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._next = time.monotonic() + begin_after_s

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may go."""
        if self._bytes_per_s is None:
            return
        now = time.monotonic()
        self._next = max(self._next, now)
        time.sleep(max(0.0, self._next - now))
        self._next += count / self._bytes_per_s


def write_part(aside: Path, part: Part, memory: memoryview, pace: Pace) -> list[FileEntry]:
    """Write a rank's two files under `aside`; returns their entries once they are on disk. Raises OSError."""
    described = json.loads(bytes(memory[part.described_at : part.described_at + part.described_bytes]))
    chunks: list[dict[str, Any]] = described["chunks"]
    shard = aside / shard_file(part.rank)
    with shard.open("wb", buffering=0) as file:
        for chunk in chunks:
            digest = hashlib.sha256()
            for block in _blocks(memory[chunk["at"] : chunk["at"] + chunk["size_bytes"]]):
                pace.take(len(block))
                digest.update(block)
                _write_all(file.fileno(), block)
            chunk["sha256"] = digest.hexdigest()
        os.fsync(file.fileno())
    text = json.dumps(
        {
            "format": FORMAT,
            "generation": part.name.generation,
            "step": part.name.step,
            "rank": part.rank,
            "world_size": part.world_size,
            **described,
        }
    ).encode()
    own = aside / rank_file(part.rank)
    with own.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(text))
        os.fsync(file.fileno())
    return [
        FileEntry(name=own.name, size_bytes=len(text), sha256=hashlib.sha256(text).hexdigest()),
        FileEntry(name=shard.name, size_bytes=part.shard_bytes, sha256=None),
    ]


def copy_part(source: Path, aside: Path, pace: Pace) -> list[FileEntry]:
    """The same from the directory of a part that was written already and has a manifest. Raises OSError."""
    entries = read_manifest(source).files
    for entry in entries:
        with (
            (source / entry.name).open("rb", buffering=0) as kept,
            (aside / entry.name).open("wb", buffering=0) as file,
        ):
            while block := kept.read(BLOCK_BYTES):
                pace.take(len(block))
                _write_all(file.fileno(), memoryview(block))
            os.fsync(file.fileno())
    return list(entries)


def with_patience(work: Callable[[], list[FileEntry]], *, pauses_s: tuple[float, ...]) -> list[FileEntry]:
    """Try, and try again after each pause, as long as storage refuses. Raises the last OSError."""
    for pause_s in pauses_s:
        try:
            return work()
        except OSError:
            time.sleep(pause_s)
    return work()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blocks(memory: memoryview) -> list[memoryview]:
    return [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]
