"""Which processes can never run code of their own again, from a stub of /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.supervisor.unkillable import stuck_threads

KILL = "0000000000000100"
TERM = "0000000000004000"
NONE = "0000000000000000"
EXITING = 0x4


def thread(
    proc: Path, tid: int, state: str, *, own: str = NONE, shared: str = NONE, flags: int = 0, place: str = "nfs_wait"
) -> None:
    task = proc / "7/task" / str(tid)
    task.mkdir(parents=True)
    (task / "stat").write_text(f"{tid} (a ) D (x) {state} 1 7 7 0 -1 {flags} 0 0 0")
    (task / "status").write_text(f"Name:\tx\nState:\t{state}\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t{KILL}\n")
    (task / "wchan").write_text(place)


def test_stuck_with_kill_pending_is_enough_and_says_where(tmp_path: Path) -> None:
    thread(tmp_path, 7, "D", own=KILL)
    thread(tmp_path, 8, "D", shared=KILL)
    thread(tmp_path, 9, "Z", place="0")
    found = stuck_threads(7, proc=tmp_path)
    assert found is not None
    assert [str(one) for one in found] == [
        "7/7 in state D in nfs_wait",
        "7/8 in state D in nfs_wait",
        "7/9 in state Z",
    ]


def test_a_thread_on_its_way_out_counts_though_its_signal_was_taken_off(tmp_path: Path) -> None:
    thread(tmp_path, 7, "D", flags=EXITING | 0x400000)
    assert stuck_threads(7, proc=tmp_path) is not None


@pytest.mark.parametrize("state", ["R", "S", "T", "t", "I"])
def test_a_thread_in_any_other_state_is_not_stuck(tmp_path: Path, state: str) -> None:
    thread(tmp_path, 7, "D", own=KILL)
    thread(tmp_path, 8, state, own=KILL, shared=KILL, flags=EXITING)
    assert stuck_threads(7, proc=tmp_path) is None


@pytest.mark.parametrize("pending", [NONE, TERM])
def test_stuck_without_kill_pending_may_come_back(tmp_path: Path, pending: str) -> None:
    thread(tmp_path, 7, "D", own=pending, shared=pending)
    assert stuck_threads(7, proc=tmp_path) is None


def test_what_cannot_be_read_counts_as_able_to_run(tmp_path: Path) -> None:
    assert stuck_threads(7, proc=tmp_path) is None
    thread(tmp_path, 7, "D", own=KILL)
    (tmp_path / "7/task/7/status").unlink()
    assert stuck_threads(7, proc=tmp_path) is None
    (tmp_path / "7/task/7/status").write_text("SigPnd:\tnonsense\n")
    assert stuck_threads(7, proc=tmp_path) is None
