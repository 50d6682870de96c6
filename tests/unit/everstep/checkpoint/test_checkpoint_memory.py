"""What counts in a node's memory, and what is removed from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint.lineage import lineage_token, newest_snapshot, record_lineage
from everstep.checkpoint.manifest import CheckpointName, Manifest, read_manifest, write_manifest
from everstep.checkpoint.memory import (
    Held,
    default_root,
    forget,
    held_in,
    keep_only,
    keep_part,
    prepare_root,
    used_bytes,
    whole_snapshots,
)
from everstep.checkpoint.shards import Pace, Part, copy_part
from everstep.errors import CheckpointMissing, SaveFailed

TOKEN = "0a1b2c3d"


def name(text: str) -> CheckpointName:
    return CheckpointName.parse(text)


def put(root: Path, text: str) -> None:
    """A checkpoint on disk."""
    manifest = Manifest(
        name=name(text), parent=None, job="j", total_steps=9, world_size=1, created_at=0.0, torch_version="2", files=()
    )
    name(text).directory(root).mkdir(parents=True)
    write_manifest(name(text).directory(root), manifest, may_publish=lambda: None)


def held(text: str, rank: int = 0, *, world_size: int = 2, copied: bool = False, token: str = TOKEN) -> Held:
    return Held(name=name(text), token=token, world_size=world_size, rank=rank, copied=copied)


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
    directory = held("1:20").directory(tmp_path)
    directory.rename(directory.with_name("step-00000099"))
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
    assert not list(tmp_path.glob("*/generation-*/*"))


def test_part_that_goes_to_disk_from_memory_is_the_same(tmp_path: Path) -> None:
    piece, aside = held("1:20"), tmp_path / "aside"
    keep(tmp_path, piece)
    aside.mkdir()
    entries = copy_part(piece.directory(tmp_path), aside, Pace(None))
    assert tuple(entries) == read_manifest(piece.directory(tmp_path)).files
    assert sorted(path.name for path in aside.iterdir()) == ["rank-00000.json", "shard-00000.bin"]
    for path in aside.iterdir():
        assert path.read_bytes() == (piece.directory(tmp_path) / path.name).read_bytes()


def test_snapshot_is_whole_when_some_node_holds_each_part() -> None:
    own, copy = held("1:20"), held("1:20", 1, copied=True)
    assert whole_snapshots([own]) == {}
    assert whole_snapshots([own, copy]) == {own.name: TOKEN}
    assert whole_snapshots([own, held("1:24", 1)]) == {}, "parts of different steps are no snapshot"
    assert whole_snapshots([own, held("1:20", 1, token="ff")]) == {}, "nor those of different starts"
    assert whole_snapshots([own, held("1:20", 1, world_size=3)]) == {}


def test_what_is_not_kept_is_removed(tmp_path: Path) -> None:
    for text in ("1:20", "2:24", "2:28"):
        keep(tmp_path, held(text))
    keep(tmp_path, held("1:16", token="ff"))
    keep_only(tmp_path, {(name("1:20"), TOKEN), (name("2:28"), TOKEN)}, token=TOKEN, ranks=[0])
    assert [str(piece.name) for piece in held_in(tmp_path)] == ["1:20", "2:28"]
    forget(tmp_path)
    assert not tmp_path.exists()


def test_what_another_rank_is_writing_is_not_touched(tmp_path: Path) -> None:
    keep(tmp_path, held("2:24", 1))
    aside = held("2:28", 1).directory(tmp_path).with_name(".writing-step-00000028-ab")
    aside.mkdir()
    keep_only(tmp_path, {(name("2:28"), TOKEN)}, token=TOKEN, ranks=[0])
    assert aside.exists() and held_in(tmp_path) == [held("2:24", 1)]
    keep_only(tmp_path, {(name("2:28"), TOKEN)}, token=TOKEN, ranks=[1])
    assert not aside.exists() and held_in(tmp_path) == []


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


def test_snapshot_newer_than_the_disk_is_gone_on_from(tmp_path: Path) -> None:
    record_lineage(tmp_path, 1, parent=None)
    assert newest_snapshot(tmp_path, [name("1:12")]) == name("1:12")


def test_generation_that_kept_nothing_goes_on_from_its_parent_in_memory(tmp_path: Path) -> None:
    record_lineage(tmp_path, 1, parent=None)
    record_lineage(tmp_path, 2, parent=name("1:12"))
    assert newest_snapshot(tmp_path, [name("1:12"), name("1:16")]) == name("1:12")


def test_snapshot_of_a_directory_that_was_made_anew_does_not_count(tmp_path: Path) -> None:
    before = record_lineage(tmp_path, 1, parent=None)
    assert lineage_token(tmp_path, 1) == before
    assert record_lineage(tmp_path, 1, parent=None) == lineage_token(tmp_path, 1) != before
    assert lineage_token(tmp_path, 2) == ""


def test_disk_counts_where_it_is_newer_and_where_the_parent_in_memory_is_gone(tmp_path: Path) -> None:
    record_lineage(tmp_path, 1, parent=None)
    for step in (0, 10):
        put(tmp_path, f"1:{step}")
    assert newest_snapshot(tmp_path, [name("1:8")]) == name("1:10")
    record_lineage(tmp_path, 2, parent=name("1:12"))
    assert newest_snapshot(tmp_path, [name("1:12")]) == name("1:12")
    assert newest_snapshot(tmp_path, []) == name("1:10")
    record_lineage(tmp_path, 3, parent=name("1:12"))
    assert newest_snapshot(tmp_path, [name("2:14")]) == name("1:10"), "2 is off the line"


def test_parent_in_memory_that_is_gone_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    record_lineage(tmp_path, 1, parent=None)
    record_lineage(tmp_path, 2, parent=name("1:12"))
    with pytest.raises(CheckpointMissing, match="went on from checkpoint 1:12"):
        newest_snapshot(tmp_path, [])


def test_pieces_sort_own_before_copied() -> None:
    piece = held("1:20")
    assert sorted([replace(piece, copied=True), piece]) == [piece, replace(piece, copied=True)]


def test_snapshot_on_its_way_to_disk_stays_where_it_is_read_and_its_copies_go(tmp_path: Path) -> None:
    for piece in (held("2:24"), held("2:24", 1, copied=True), held("2:28")):
        keep(tmp_path, piece)
    keep_only(tmp_path, {(name("2:28"), TOKEN)}, token=TOKEN, ranks=[0, 1], flushed=name("2:24"))
    assert held_in(tmp_path) == [held("2:24"), held("2:28")]
