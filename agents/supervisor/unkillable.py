"""Processes that SIGKILL cannot end yet, but that can never run code of their own again: stuck in the kernel.

A thread in an uninterruptible wait (state D: a hung file system, a hung driver) with SIGKILL pending dies the moment it
would return to user mode. Proof of stop asks here when nothing else is left.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from agents.supervisor.process_table import stat_words

_KILL_BIT = 1 << (signal.SIGKILL - 1)
_EXITING = 0x4
"""PF_EXITING in the kernel's flags of a thread: it is on its way out, and what was pending may be taken off already."""
_DEAD = ("Z", "X")


@dataclass(frozen=True)
class StuckThread:
    pid: int
    tid: int
    state: str
    place: str
    """The kernel function in which it waits; empty if the kernel does not say."""

    def __str__(self) -> str:
        return f"{self.pid}/{self.tid} in state {self.state}" + (f" in {self.place}" if self.place else "")


def stuck_threads(pid: int, *, proc: Path = Path("/proc")) -> list[StuckThread] | None:
    """Return the threads of a process none of which can return to user mode; None if one can, or might.

    Each must be dead, or in state D with SIGKILL pending (or exiting already). What cannot be read counts as able to.
    """
    found = []
    try:
        tasks = sorted((proc / str(pid) / "task").iterdir(), key=lambda task: int(task.name))
        for task in tasks:
            words = stat_words(task / "stat")
            state = words[0].decode()
            if state not in _DEAD and not (state == "D" and (_kill_pends(task) or int(words[6]) & _EXITING)):
                return None
            found.append(StuckThread(pid=pid, tid=int(task.name), state=state, place=_place(task)))
    except (OSError, ValueError, IndexError):
        return None
    return found or None


def _kill_pends(task: Path) -> bool:
    """Whether SIGKILL waits for a thread or for its whole process. Raises `OSError` or `ValueError`."""
    for line in (task / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("SigPnd", "ShdPnd") and int(value, 16) & _KILL_BIT:
            return True
    return False


def _place(task: Path) -> str:
    try:
        place = (task / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if place == "0" else place
