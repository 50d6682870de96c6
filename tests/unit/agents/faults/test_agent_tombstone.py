"""How long a tombstone holds an agent down, and which ones do not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.boot_clock import boottime_ns, this_boot
from agents.faults import tombstone
from agents.faults.tombstone import (
    Tombstone,
    read_tombstone,
    remove_tombstone,
    tombstone_path,
    wait_while_down,
    write_tombstone,
)

SECOND = 1_000_000_000


def stone(*, in_s: float, boot_id: str | None = None) -> Tombstone:
    return Tombstone(until_boottime_ns=boottime_ns() + int(in_s * SECOND), drill="d", boot_id=boot_id or this_boot())


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sleeps that only count; after three, somebody lifts the stone."""
    taken: list[float] = []
    monkeypatch.setattr(tombstone.time, "sleep", taken.append)
    return taken


def test_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = stone(in_s=5)
    write_tombstone(tmp_path, written)
    assert read_tombstone(tmp_path) == written
    remove_tombstone(tmp_path)
    remove_tombstone(tmp_path)
    assert read_tombstone(tmp_path) is None


@pytest.mark.parametrize(
    ("left_ns", "boot", "left_s"),
    [
        (5 * SECOND, "now", 5.0),
        (600 * SECOND, "now", 600.0),
        (0, "now", 0.0),
        (-5 * SECOND, "now", 0.0),
        (5 * SECOND, "before", 0.0),
        (601 * SECOND, "now", 0.0),
    ],
)
def test_counts_in_its_own_boot_and_for_at_most_ten_minutes(left_ns: int, boot: str, left_s: float) -> None:
    found = Tombstone(until_boottime_ns=1000 * SECOND + left_ns, drill="d", boot_id=boot)
    assert found.left_s(now_ns=1000 * SECOND, boot_id="now") == left_s


def test_the_agent_waits_until_the_stone_is_lifted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float]
) -> None:
    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            remove_tombstone(tmp_path)

    monkeypatch.setattr(tombstone.time, "sleep", nap)
    write_tombstone(tmp_path, stone(in_s=60))
    wait_while_down(tmp_path)
    assert len(naps) == 3


def test_the_agent_waits_until_the_limit_if_nobody_lifts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float]
) -> None:
    written = stone(in_s=60)
    write_tombstone(tmp_path, written)
    clock = [written.until_boottime_ns - SECOND // 4]

    def nap(seconds: float) -> None:
        naps.append(seconds)
        clock[0] += int(seconds * SECOND) + 1

    monkeypatch.setattr(tombstone.time, "sleep", nap)
    monkeypatch.setattr(tombstone, "boottime_ns", lambda: clock[0])
    wait_while_down(tmp_path)
    assert sum(naps) == pytest.approx(0.25, abs=0.001)
    assert tombstone_path(tmp_path).exists(), "the agent touches nothing"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"until_boottime_ns": "x", "drill": "d", "boot_id": "b"}'])
def test_a_damaged_stone_does_not_hold_an_agent_down(tmp_path: Path, naps: list[float], content: str) -> None:
    tombstone_path(tmp_path).write_text(content)
    wait_while_down(tmp_path)
    assert naps == []


@pytest.mark.parametrize("found", [stone(in_s=-1), stone(in_s=60, boot_id="before"), None])
def test_the_agent_does_not_wait_without_a_valid_stone(
    tmp_path: Path, naps: list[float], found: Tombstone | None
) -> None:
    if found is not None:
        write_tombstone(tmp_path, found)
    wait_while_down(tmp_path)
    assert naps == []
