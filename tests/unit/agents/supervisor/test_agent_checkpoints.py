"""What an agent takes for a complete checkpoint, seen from outside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.supervisor.checkpoints import complete_steps, is_complete
from tests.fakes.small_checkpoints import write_checkpoint


def test_complete_ones_are_listed_in_rising_order_by_generation(tmp_path: Path) -> None:
    for text in ("1:40", "1:20", "2:60"):
        write_checkpoint(tmp_path, text)
    assert complete_steps(str(tmp_path), 1) == [20, 40]
    assert is_complete(str(tmp_path), 2, 60) and not is_complete(str(tmp_path), 2, 40)
    assert complete_steps(str(tmp_path / "none"), 1) == []


def cut_the_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def change_the_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"total_steps": 100', '"total_steps": 900'))


def put_a_pipe_in_its_place(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    os.mkfifo(directory / "manifest.json")


def nest_it_deeply(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"[" * 100_000)


def rename_it(directory: Path) -> None:
    shutil.copytree(directory, directory.with_name("step-00000099"))
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    "damage",
    [
        cut_the_manifest,
        change_the_manifest,
        put_a_pipe_in_its_place,
        nest_it_deeply,
        rename_it,
        lambda directory: (directory / "manifest.json").unlink(),
        lambda directory: (directory / "manifest.json").write_text("[]"),
        lambda directory: (directory / "shard-00001.bin").unlink(),
        lambda directory: os.truncate(directory / "rank-00000.json", 7),
    ],
)
def test_what_no_rank_would_load_is_not_complete(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    directory = write_checkpoint(tmp_path, "1:20")
    assert is_complete(str(tmp_path), 1, 20)
    damage(directory)
    assert not is_complete(str(tmp_path), 1, 20)
    assert complete_steps(str(tmp_path), 1) == []
