"""One rank's part on disk."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest

from everstep.checkpoint.manifest import CheckpointName, FileEntry
from everstep.checkpoint.shards import Pace, Part, with_patience, write_part

DATA = bytes(range(256)) * 40


def copied(*sizes: int) -> tuple[Part, memoryview]:
    chunks, at = [], 0
    for number, size_bytes in enumerate(sizes):
        chunks.append({"key": f"model/{number}", "at": at, "size_bytes": size_bytes})
        at += size_bytes
    text = json.dumps({"chunks": chunks, "parts": {"model": 1}, "own_keys": {}}).encode()
    part = Part(
        name=CheckpointName(generation=2, step=40),
        rank=3,
        world_size=4,
        shard_bytes=at,
        described_at=at,
        described_bytes=len(text),
    )
    return part, memoryview(DATA[:at] + text + b"left from an earlier, longer save")


def test_part_is_two_files_of_which_each_byte_is_hashed(tmp_path: Path) -> None:
    part, memory = copied(100, 0, 5000)
    own, shard = write_part(tmp_path, part, memory, Pace(None))
    assert (own.name, shard.name) == ("rank-00003.json", "shard-00003.bin")
    assert (tmp_path / shard.name).read_bytes() == DATA[:5100]
    content = (tmp_path / own.name).read_bytes()
    assert own == FileEntry(name=own.name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    said = json.loads(content)
    assert (said["generation"], said["step"], said["rank"], said["world_size"]) == (2, 40, 3, 4)
    pieces = (DATA[:100], b"", DATA[100:5100])
    assert [chunk["sha256"] for chunk in said["chunks"]] == [hashlib.sha256(piece).hexdigest() for piece in pieces]
    assert said["parts"] == {"model": 1}


def test_second_attempt_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    write_part(tmp_path, *copied(5000), Pace(None))
    part, memory = copied(10)
    write_part(tmp_path, part, memory, Pace(None))
    assert (tmp_path / "shard-00003.bin").stat().st_size == 10


def test_storage_that_heals_in_time_loses_no_save() -> None:
    failures = [OSError("one"), OSError("two")]
    entry = FileEntry(name="shard", size_bytes=1, sha256=None)

    def work() -> list[FileEntry]:
        if failures:
            raise failures.pop()
        return [entry]

    assert with_patience(work, pauses_s=(0.0, 0.0)) == [entry]
    failures += [OSError("one"), OSError("two"), OSError("the last one is told")]
    failures.reverse()
    with pytest.raises(OSError, match="the last one is told"):
        with_patience(work, pauses_s=(0.0, 0.0))


def test_pace_lets_the_first_bytes_through_at_once() -> None:
    pace, began = Pace(1.0), time.monotonic()
    pace.take(10**6)
    assert time.monotonic() - began < 0.5
