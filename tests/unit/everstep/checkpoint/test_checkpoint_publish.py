"""When what ranks have written becomes a checkpoint, and when it must not."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import sealed
from everstep.checkpoint.manifest import CheckpointName, FileEntry, Manifest, complete_checkpoints, read_manifest
from everstep.checkpoint.publish import Publication, discard, publish, tell_done, tell_failed
from everstep.errors import CheckpointMissing, SaveFailed

NAME = CheckpointName(generation=1, step=20)


def publication(root: Path, aside: Path, *, world_size: int = 2) -> Publication:
    return Publication(
        root=root,
        aside=aside,
        name=NAME,
        parent=None,
        job="j1",
        total_steps=100,
        world_size=world_size,
        torch_version="2",
    )


def write(aside: Path, rank: int) -> list[FileEntry]:
    entries = []
    for name in (f"rank-{rank:05d}.json", f"shard-{rank:05d}.bin"):
        (aside / name).write_text(name)
        entries.append(FileEntry(name=name, size_bytes=len(name), sha256="ab" if name.endswith("json") else None))
    return entries


@pytest.fixture
def aside(tmp_path: Path) -> Path:
    directory = tmp_path / "generation-00001" / ".writing-step-00000020-abc"
    directory.mkdir(parents=True)
    return directory


def attempt(tmp_path: Path, aside: Path, **changes: Any) -> Manifest:
    terms: dict[str, Any] = {"limit_s": 0.05, "abandoned": lambda: False, "may_publish": lambda: None, **changes}
    return publish(publication(tmp_path, aside), **terms)


def write_all(aside: Path) -> None:
    for rank in range(2):
        tell_done(aside, rank, write(aside, rank))


def test_manifest_names_every_file_of_every_rank_and_nothing_else_stays(tmp_path: Path, aside: Path) -> None:
    write_all(aside)
    manifest = attempt(tmp_path, aside)
    directory = NAME.directory(tmp_path)
    assert read_manifest(directory) == manifest
    assert {path.name for path in directory.iterdir()} == {entry.name for entry in manifest.files} | {"manifest.json"}
    assert not aside.exists()


def spoil_by_missing_part(aside: Path) -> None:
    tell_done(aside, 0, write(aside, 0))


def spoil_by_failed_part(aside: Path) -> None:
    spoil_by_missing_part(aside)
    tell_failed(aside, 1, "OSError: no space left")


def spoil_by_other_size(aside: Path) -> None:
    write_all(aside)
    (aside / "shard-00001.bin").write_text("short")


def spoil_by_unshared_storage(aside: Path) -> None:
    write_all(aside)
    (aside / "shard-00001.bin").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_by_missing_part, r"nothing came from ranks \[1\]"),
        (spoil_by_failed_part, "rank 1: OSError: no space left"),
        (spoil_by_other_size, "shard-00001.bin has 5 bytes here, its writer says 15"),
        (spoil_by_unshared_storage, "storage that all nodes share"),
    ],
)
def test_what_is_not_whole_is_not_published(
    tmp_path: Path, aside: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(aside)
    with pytest.raises(SaveFailed, match=said):
        attempt(tmp_path, aside)
    assert complete_checkpoints(tmp_path) == []


def test_what_is_left_of_a_failed_save_is_given_up_and_its_space_with_it(tmp_path: Path, aside: Path) -> None:
    spoil_by_missing_part(aside)
    discard(publication(tmp_path, aside))
    NAME.directory(tmp_path).mkdir()  # renamed, and the manifest found no space
    discard(publication(tmp_path, aside))
    assert list((tmp_path / "generation-00001").iterdir()) == []


def test_a_complete_checkpoint_is_never_given_up(tmp_path: Path, aside: Path) -> None:
    write_all(aside)
    manifest = attempt(tmp_path, aside)
    discard(publication(tmp_path, aside))
    assert complete_checkpoints(tmp_path) == [manifest]


def test_manifest_that_cannot_be_made_durable_does_not_count(
    tmp_path: Path, aside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is told as failed must not turn up as complete."""
    write_all(aside)
    real = sealed.sync_directory

    def fail_for_the_step(path: Path) -> None:
        if path == NAME.directory(tmp_path):
            raise OSError(errno.EIO, "I/O error")
        real(path)

    monkeypatch.setattr(sealed, "sync_directory", fail_for_the_step)
    with pytest.raises(OSError, match="I/O error"):
        attempt(tmp_path, aside)
    assert complete_checkpoints(tmp_path) == []


@pytest.mark.parametrize("content", ["", "7", "[7]", '[{"name": "x"}]'])
def test_word_of_a_writer_that_makes_no_sense_fails_the_save(tmp_path: Path, aside: Path, content: str) -> None:
    write_all(aside)
    (aside / "done-00001.json").write_text(content)
    with pytest.raises(SaveFailed, match=r"rank 1's writer said something that cannot be read"):
        attempt(tmp_path, aside)


def test_ranks_may_give_a_save_up(tmp_path: Path, aside: Path) -> None:
    with pytest.raises(SaveFailed, match="another rank's part failed"):
        attempt(tmp_path, aside, abandoned=lambda: True)


def test_manifest_is_not_put_in_place_when_the_lease_has_run_out(tmp_path: Path, aside: Path) -> None:
    class RunOut(Exception):
        pass

    def run_out() -> None:
        raise RunOut

    write_all(aside)
    with pytest.raises(RunOut):
        attempt(tmp_path, aside, may_publish=run_out)
    with pytest.raises(CheckpointMissing):
        read_manifest(NAME.directory(tmp_path))


def test_what_a_killed_save_left_under_the_name_makes_room(tmp_path: Path, aside: Path) -> None:
    directory = NAME.directory(tmp_path)
    directory.mkdir()
    (directory / "shard-00007.bin").write_text("old")
    write_all(aside)
    attempt(tmp_path, aside)
    assert not (directory / "shard-00007.bin").exists()


def test_complete_checkpoint_is_never_written_over(tmp_path: Path, aside: Path) -> None:
    write_all(aside)
    first = attempt(tmp_path, aside)
    aside.mkdir()
    write_all(aside)
    with pytest.raises(SaveFailed, match="holds a complete checkpoint already"):
        attempt(tmp_path, aside)
    assert complete_checkpoints(tmp_path) == [first]


def test_slow_parts_are_waited_for_as_long_as_something_comes(tmp_path: Path, aside: Path) -> None:
    """Ranks of a node write one after the other: the last one may be done long after the first."""
    tell_done(aside, 0, write(aside, 0))

    def write_slowly() -> None:
        for size in range(1, 8):
            (aside / "shard-00001.bin").write_bytes(bytes(size))
            time.sleep(0.2)
        tell_done(aside, 1, write(aside, 1))

    writing = threading.Thread(target=write_slowly)
    writing.start()
    assert len(attempt(tmp_path, aside, limit_s=0.5).files) == 4
    writing.join()
