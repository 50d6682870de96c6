"""Whether a node can write checkpoints is known by writing, not by free space."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import write_test as module
from everstep.checkpoint.write_test import LARGEST_BYTES, write_test


def test_good_store_is_left_as_it_was(tmp_path: Path) -> None:
    write_test(tmp_path / "new", size_bytes=10_000)
    assert list((tmp_path / "new").iterdir()) == []


def test_case_R40_full_target_is_found_though_free_space_looks_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "write", full)
    free = os.statvfs(tmp_path)
    assert free.f_bavail * free.f_frsize > LARGEST_BYTES
    with pytest.raises(OSError, match="No space left on device"):
        write_test(tmp_path, size_bytes=LARGEST_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_than_were_written_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(module.os, "write", lambda fd, data: real(fd, bytes(len(data))))
    with pytest.raises(OSError, match="other bytes came back"):
        write_test(tmp_path, size_bytes=100)


@pytest.mark.parametrize(("wanted", "written"), [(0, 1), (100, 100), (10 * LARGEST_BYTES, LARGEST_BYTES)])
def test_small_states_are_tested_with_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, written: int
) -> None:
    real, sizes = os.write, []

    def counted(fd: int, data: Any) -> int:
        sizes.append(len(data))
        return real(fd, data)

    monkeypatch.setattr(module.os, "write", counted)
    write_test(tmp_path, size_bytes=wanted)
    assert sizes == [written]


def test_what_a_killed_test_has_left_is_removed_later_and_others_are_left_alone(tmp_path: Path) -> None:
    prefix = f".write-test-{module.socket.gethostname()}-"
    for name, age_s in (
        (f"{prefix}1", 7200),
        (f"{prefix}2.tmp", 7200),
        (f"{prefix}3", 10),
        (".write-test-other-1", 7200),
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    write_test(tmp_path, size_bytes=10)
    assert {path.name for path in tmp_path.iterdir()} == {f"{prefix}3", ".write-test-other-1"}
