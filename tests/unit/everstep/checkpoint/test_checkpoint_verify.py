"""Whatever is wrong with a checkpoint is found and named, and nothing is found where nothing is wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.manifest import read_manifest
from everstep.checkpoint.verify import check_sizes, examine, read_rank_file, verify
from everstep.errors import CheckpointDamaged, CheckpointMissing
from tests.fakes.small_checkpoints import reseal, write_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "1:20")


def faults(directory: Path) -> list[str]:
    return [f"{fault.kind}: {fault}" for fault in examine(directory).faults]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_whole_checkpoint_is_verified_to_its_last_byte(directory: Path) -> None:
    seen: list[int] = []
    examination = examine(directory, progress=seen.append)
    assert examination.faults == () and examination.manifest == verify(directory)
    shards = sum(path.stat().st_size for path in directory.glob("shard-*"))
    assert sum(seen) == shards
    assert verify(directory, from_storage=True).world_size == 2


def test_any_flipped_byte_of_any_file_is_found(directory: Path) -> None:
    for path in sorted(directory.glob("[rs]*-*")):
        for at in range(0, path.stat().st_size, 5):
            flip(path, at)
            assert [fault.kind for fault in examine(directory).faults] == ["hash"], f"{path.name} at {at}"
            with pytest.raises(CheckpointDamaged, match=rf"1:20 .*{path.name} is not what was saved"):
                verify(directory)
            flip(path, at)
    verify(directory)


def test_every_fault_is_named_and_not_only_the_first(directory: Path) -> None:
    flip(directory / "shard-00000.bin", 1)
    flip(directory / "shard-00000.bin", 50)
    (directory / "rank-00001.json").unlink()
    with (directory / "shard-00001.bin").open("ab") as file:
        file.write(b"x")
    assert faults(directory) == [
        "size: rank-00001.json is missing",
        "size: shard-00001.bin has 49 bytes, the manifest says 48",
        "hash: shard-00000.bin is not what was saved: model/weight differs",
        "hash: shard-00000.bin is not what was saved: model/bias differs",
    ]
    with pytest.raises(CheckpointDamaged, match=r"rank-00001.json is missing; .*weight differs; and 1 more\. Choose"):
        verify(directory)


@pytest.mark.parametrize("length", [0, 17, 47, 49])
def test_file_of_another_length_is_found_by_its_size_alone(directory: Path, length: int) -> None:
    path = directory / "shard-00001.bin"
    path.write_bytes((path.read_bytes() + b"x")[:length])
    with pytest.raises(CheckpointDamaged, match=f"shard-00001.bin has {length} bytes, the manifest says 48"):
        check_sizes(directory, read_manifest(directory))


def test_case_R16_missing_shard_is_found(directory: Path) -> None:
    (directory / "shard-00001.bin").unlink()
    assert faults(directory) == ["size: shard-00001.bin is missing"]


def test_shard_of_another_step_is_found_though_it_is_whole_in_itself(tmp_path: Path, directory: Path) -> None:
    other = write_checkpoint(tmp_path, "1:40")
    shutil.copy(other / "shard-00001.bin", directory)
    (fault,) = examine(directory).faults
    assert (fault.kind, fault.file) == ("hash", "shard-00001.bin")
    assert fault.found_sha256 == read_rank_file(other, read_manifest(other), 1)["chunks"][0]["sha256"]


def test_file_of_another_save_says_which(tmp_path: Path, directory: Path) -> None:
    other = write_checkpoint(tmp_path, "1:40")
    shutil.copy(other / "rank-00001.json", directory)
    shutil.copy(other / "shard-00001.bin", directory)
    assert faults(directory) == [
        "hash: rank-00001.json is not what was saved: it says that it is that of rank 1 of 2 in checkpoint 1:40"
    ]
    for path in other.glob("[rs]*-*"):
        shutil.copy(path, directory)
    assert [fault.kind for fault in examine(directory).faults] == ["hash", "hash"]


def test_manifest_of_another_step_is_found(tmp_path: Path, directory: Path) -> None:
    shutil.copy(write_checkpoint(tmp_path, "1:40") / "manifest.json", directory)
    (fault,) = examine(directory).faults
    assert fault.kind == "manifest" and "holds checkpoint 1:40" in fault.what
    with pytest.raises(CheckpointDamaged, match=r"holds checkpoint 1:40, which belongs into generation-00001/step-0"):
        verify(directory)


def test_directory_without_a_manifest_is_no_checkpoint(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    for look in (examine, verify):
        with pytest.raises(CheckpointMissing):
            look(directory)


@pytest.mark.parametrize("name", ["rank-00000.json", "shard-00001.bin"])
@pytest.mark.parametrize(
    "make",
    [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)],
    ids=["directory", "pipe", "endless", "loop"],
)
def test_what_is_no_plain_file_is_found_and_not_waited_for(
    directory: Path, name: str, make: Callable[[Path], object]
) -> None:
    (directory / name).unlink()
    make(directory / name)
    (fault,) = examine(directory).faults
    assert (fault.kind, fault.file) == ("unreadable", name)


def test_link_to_the_very_same_bytes_is_as_good_as_the_file(directory: Path) -> None:
    path = directory / "shard-00000.bin"
    path.rename(directory.parent / "elsewhere")
    path.symlink_to("../elsewhere")
    verify(directory)


def chunk(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described["chunks"][0].update(changes)


def said(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described.update(changes)


def tensor(**more: Any) -> dict[str, Any]:
    return {"$": "tensor", "path": "model/weight", "dtype": "torch.float32", "shape": [6, 4], **more}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (said(rank=0), "that of rank 0 of 2 in checkpoint 1:20"),
        (said(step=40), "that of rank 1 of 2 in checkpoint 1:40"),
        (said(chunks=None), "lists no chunks"),
        (said(chunks=[7]), "other fields"),
        (said(parts=[]), "describes no state"),
        (said(own_keys={"a": 7}), "no names"),
        (said(handed_on=None), "what rank 0 hands on"),
        (said(parts={"model": tensor(strides=[1])}), "other dimensions in memory"),
        (said(parts={"model": tensor(strides=[0, 1])}), "in one place, or far apart"),
        (said(parts={"model": tensor(strides=[1, 1 << 40])}), "in one place, or far apart"),
        (said(parts={"model": tensor(strides=[1, 1 << 70])}), "other dimensions in memory"),
        (said(parts={"model": {"$": "pickle"}}), "kind 'pickle'"),
        (said(parts={"model": {"$": "dict", "items": [[1]]}}), "no pairs"),
        (said(parts={"model": {"$": "tensor", "path": "model/bias"}}), "without a path or a type"),
        (said(parts={"model": {"$": "array", "dtype": "|O", "shape": [1], "data": ""}}), "which there is not"),
        (said(parts={"model": {"$": "array", "dtype": "<i4", "shape": [2], "data": "AAAA"}}), "another length"),
        (said(parts={"model": {"$": "bytes", "data": "A"}}), "cannot be decoded"),
        (chunk(at=4), "at another place"),
        (chunk(size_bytes=10**18), "of another length"),
        (chunk(sizes=[-3, 4]), "a shape that is none"),
        (chunk(sizes=[True, 4]), "a shape that is none"),
        (chunk(shape=[10**10, 10**10]), "larger than any memory"),
        (chunk(offsets=[4, 0]), "lies outside model/weight"),
        (chunk(dtype="float33"), "names a type 'float33' that there is not"),
        (chunk(dtype="save"), "names a type 'save' that there is not"),
        (chunk(sha256=None), "without a key, a type or a hash"),
    ],
)
def test_what_no_writer_says_is_refused_though_all_hashes_are_right(
    directory: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    reseal(directory, rank_1=change)
    (fault,) = examine(directory).faults
    assert (fault.kind, fault.file) == ("description", "rank-00001.json")
    assert words in fault.what
    with pytest.raises(CheckpointDamaged):
        read_rank_file(directory, read_manifest(directory), 1)


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (1, chunk(key="filler", shape=[3, 4], offsets=[0, 0]), "of model/weight only 12 of 24 values are there"),
        (1, chunk(offsets=[0, 0]), "parts of model/weight are there twice"),
        (1, chunk(offsets=[2, 0]), "parts of model/weight are there twice"),
        (1, chunk(shape=[7, 4]), "model/weight in different shapes or types"),
        (1, chunk(dtype="int32"), "model/weight in different shapes or types"),
        (0, said(parts={}), "rank 1 holds the same model as rank 0, which holds none"),
        (1, said(own_keys={"model/bias": "model/bias@1"}), "no rank has written model/bias@1, which rank 1 needs"),
    ],
)
def test_tensor_that_is_not_there_in_full_and_once_is_refused_though_all_hashes_are_right(
    directory: Path, rank: int, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    reseal(directory, **{f"rank_{rank}": change})
    (fault,) = examine(directory).faults
    assert fault.kind == "description" and words in fault.what


@pytest.mark.parametrize(
    "change",
    [
        said(world_size=10**9), said(world_size=0), said(world_size=1), said(files=[]),
        lambda manifest: manifest["files"].append(manifest["files"][0]),
        lambda manifest: manifest["files"][0].update(name="../../x"),
    ],
)  # fmt: skip
def test_manifest_that_lists_other_files_than_ranks_write_is_refused_at_once(
    directory: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    reseal(directory, manifest=change)
    (fault,) = examine(directory).faults
    assert (fault.kind, fault.file) == ("manifest", "manifest.json")
    with pytest.raises(CheckpointDamaged):
        verify(directory)
