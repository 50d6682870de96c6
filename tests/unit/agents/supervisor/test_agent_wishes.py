"""Wishes for a run as files that its ranks read."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from agents.supervisor.wishes import PINNED, SAVE_REQUEST, Wishes, write_wishes


def read(directory: Path) -> tuple[list[str], int]:
    return json.loads((directory / PINNED).read_text())["keep"], int((directory / SAVE_REQUEST).read_text())


def test_writes_the_whole_wish_into_private_files(tmp_path: Path) -> None:
    write_wishes(tmp_path, Wishes(keep=("1:20", "2:40"), save_request=3), before=None)
    assert read(tmp_path) == (["1:20", "2:40"], 3)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == [PINNED, SAVE_REQUEST]


def test_replaces_only_what_has_changed(tmp_path: Path) -> None:
    first = Wishes(keep=("1:20",), save_request=3)
    write_wishes(tmp_path, first, before=None)
    before = (tmp_path / PINNED).stat().st_ino
    write_wishes(tmp_path, Wishes(keep=("1:20",), save_request=4), before=first)
    assert (tmp_path / PINNED).stat().st_ino == before
    assert read(tmp_path) == (["1:20"], 4)


def test_writes_through_no_link_that_a_job_has_put_there(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / SAVE_REQUEST).symlink_to(victim)
    write_wishes(run, Wishes(save_request=1), before=None)
    assert victim.read_text() == "precious"
    assert not (run / SAVE_REQUEST).is_symlink()
    link = tmp_path / "link"
    link.symlink_to(run)
    with pytest.raises(OSError, match="link"):
        write_wishes(link, Wishes(), before=None)
