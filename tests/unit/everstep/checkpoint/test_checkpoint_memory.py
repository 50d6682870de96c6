"""What counts in a node's memory, and what is removed from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint.manifest import CheckpointName, newest_checkpoint, record_lineage
from everstep.checkpoint.memory import (
    Held,
    default_root,
    forget,
    held_in,
    keep_only,
    keep_part,
    prepare_root,
    step_directory,
    used_bytes,
    whole_snapshots,
)
from everstep.checkpoint.shards import Part
from everstep.errors import SaveFailed

TOKEN = "0a1b2c3d"


def held(name: str, rank: int = 0, *, world_size: int = 2, copied: bool = False, token: str = TOKEN) -> Held:
    return Held(name=CheckpointName.parse(name), token=token, world_size=world_size, rank=rank, copied=copied)


def keep(root: Path, piece: Held, content: bytes = b"12345678") -> None:
    chunk = {"key": "w", "dtype": "uint8", "shape": [8], "offsets": [0], "sizes": [8], "at": 0, "size_bytes": 8}
    text = json.dumps({"chunks": [chunk], "parts": {}, "own_keys": {}}).encode()
    part = Part(
        name=piece.name,
        rank=piece.rank,
        world_size=piece.world_size,
        shard_bytes=8,
        described_at=8,
        described_bytes=len(text),
    )
    described = {"parent": None, "job": "j", "total_steps": 9, "torch_version": "2"}
    keep_part(piece, root, part, memoryview(content + text), described=described, may_publish=lambda: None)


def test_part_that_was_kept_is_found(tmp_path: Path) -> None:
    pieces = [held("1:20"), held("1:20", 1, copied=True), held("2:24")]
    for piece in pieces:
        keep(tmp_path, piece)
    assert sorted(held_in(tmp_path)) == sorted(pieces)
    assert (pieces[0].directory(tmp_path) / "shard-00000.bin").read_bytes() == b"12345678"
    assert used_bytes(tmp_path) >= 3 * 8


def test_part_that_is_torn_or_unfinished_does_not_count(tmp_path: Path) -> None:
    for step in (20, 24, 28):
        keep(tmp_path, held(f"1:{step}"))
    (held("1:20").directory(tmp_path) / "manifest.json").unlink()
    (held("1:24").directory(tmp_path) / "shard-00000.bin").write_bytes(b"1234567")
    assert held_in(tmp_path) == [held("1:28")]


def test_part_under_another_name_does_not_count(tmp_path: Path) -> None:
    keep(tmp_path, held("1:20"))
    held("1:20").directory(tmp_path).parent.rename(tmp_path / f"generation-00001-{TOKEN}" / "step-00000099")
    assert held_in(tmp_path) == []


def test_failed_part_leaves_nothing(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError("no")

    piece = held("1:20")
    with pytest.raises(OSError, match="no"):
        keep_part(
            piece,
            tmp_path,
            Part(name=piece.name, rank=0, world_size=2, shard_bytes=0, described_at=0, described_bytes=14),
            memoryview(b'{"chunks": []}'),
            described={"parent": None, "job": "j", "total_steps": 9, "torch_version": "2"},
            may_publish=refuse,
        )
    assert not list(tmp_path.glob("generation-*/step-*/*"))


def test_snapshot_is_whole_when_some_node_holds_each_part() -> None:
    own, copy = held("1:20"), held("1:20", 1, copied=True)
    assert whole_snapshots([own]) == {}
    assert whole_snapshots([own, copy]) == {own.name: TOKEN}
    assert whole_snapshots([own, held("1:24", 1)]) == {}, "parts of different steps are no snapshot"
    assert whole_snapshots([own, held("1:20", 1, token="ff")]) == {}, "nor those of different starts"
    assert whole_snapshots([own, held("1:20", 1, world_size=3)]) == {}


def test_what_is_not_kept_is_removed(tmp_path: Path) -> None:
    for name in ("1:20", "2:24", "2:28"):
        keep(tmp_path, held(name))
    keep_only(tmp_path, [step_directory(tmp_path, CheckpointName.parse(name), TOKEN) for name in ("1:20", "2:28")])
    assert [str(piece.name) for piece in held_in(tmp_path)] == ["1:20", "2:28"]
    forget(tmp_path)
    assert not tmp_path.exists()


def test_place_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SaveFailed, match="is not a directory of user"):
        prepare_root(tmp_path / "root")
    prepare_root(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_two_directories_of_a_job_have_two_places() -> None:
    assert default_root("local", Path("/a/c")) != default_root("local", Path("/b/c"))
    assert default_root("../../x y", Path("/a")).parent == default_root("job", Path("/a")).parent


def name(text: str) -> CheckpointName:
    return CheckpointName.parse(text)


def test_snapshot_newer_than_the_disk_is_gone_on_from(tmp_path: Path) -> None:
    record_lineage(tmp_path, 1, parent=None)
    assert newest_checkpoint(tmp_path, in_memory=[name("1:12")]) == name("1:12")


def test_generation_that_kept_nothing_goes_on_from_its_parent_in_memory(tmp_path: Path) -> None:
    record_lineage(tmp_path, 1, parent=None)
    record_lineage(tmp_path, 2, parent=name("1:12"))
    assert newest_checkpoint(tmp_path, in_memory=[name("1:12"), name("1:16")]) == name("1:12")


def test_snapshot_of_a_directory_that_was_made_anew_does_not_count(tmp_path: Path) -> None:
    before = record_lineage(tmp_path, 1, parent=None)
    assert record_lineage(tmp_path, 1, parent=None).token != before.token


def test_parent_that_is_gone_from_memory_means_what_was_before_it_and_not_beside_it(tmp_path: Path) -> None:
    record_lineage(tmp_path, 1, parent=None)
    record_lineage(tmp_path, 2, parent=name("1:12"))
    in_memory = [name("1:8"), name("1:16")]
    assert newest_checkpoint(tmp_path, in_memory=in_memory) == name("1:8")
    record_lineage(tmp_path, 3, parent=name("1:12"))
    assert newest_checkpoint(tmp_path, in_memory=[*in_memory, name("2:14")]) == name("1:8"), "2 is off the line"


def test_pieces_sort_own_before_copied() -> None:
    piece = held("1:20")
    assert sorted([replace(piece, copied=True), piece]) == [piece, replace(piece, copied=True)]
