"""Processes as /proc shows them: who carries a generation's mark, who descends from whom, and killing exactly one.

The mark is carried twice. The environment names the generation, but a process may start its children with another one,
or write over it. A resource limit that means nothing to training (`limit_mark`) goes through fork, exec and setsid, and
no process has a reason to touch it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "EVERSTEP_MARK"
_PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Gone, or none of ours. Any other error (too many open files) says nothing about a process and is passed on."""


def limit_mark(mark: str) -> int:
    """Return the RLIMIT_RTTIME of a generation's processes: microseconds of real-time work, tens of thousands of years.

    For processes that are not scheduled as real-time ones, the kernel does nothing with it (getrlimit(2)).
    """
    return (1 << 61) + int.from_bytes(hashlib.sha256(mark.encode()).digest()[:6])


@dataclass(frozen=True)
class Process:
    """One process; the start time tells it from a later one with the same number."""

    pid: int
    parent: int
    state: str
    """Of its main thread, or of another one if the main thread alone has ended."""
    start_time: int
    """Clock ticks since boot."""

    @property
    def dead(self) -> bool:
        """A zombie: it runs no code any more and only waits to be reaped."""
        return self.state in ("Z", "X")


def read_process(pid: int) -> Process | None:
    """Return one process, None if there is none. Raises `OSError` if that cannot be told."""
    try:
        words = stat_words(_PROC / str(pid) / "stat")
    except _GONE:
        return None
    state = words[0].decode()
    if state == "Z":
        state = _living_state(pid) or state
    return Process(pid=pid, parent=int(words[1]), state=state, start_time=int(words[19]))


def stat_words(path: Path) -> list[bytes]:
    """The words of a stat file (proc(5)) from the state on. Raises `OSError`."""
    text = path.read_bytes()
    # The name in parentheses may hold anything, also spaces and parentheses.
    return text[text.rindex(b")") + 2 :].split()


def _living_state(pid: int) -> str | None:
    """State of a thread that runs on after its main thread has ended; None if there is none."""
    for task in _PROC.joinpath(str(pid), "task").glob("*/stat"):
        with contextlib.suppress(*_GONE):
            state = stat_words(task)[0].decode()
            if state not in ("Z", "X"):
                return state
    return None


def all_processes() -> dict[int, Process]:
    found = {}
    for name in os.listdir(_PROC):  # noqa: PTH208  names only: a third of the cost on a node with many processes
        if name.isdecimal():
            process = read_process(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def carries_mark(pid: int, mark: str) -> bool:
    """Whether the process carries the generation's mark, either way. Raises `OSError` if that cannot be told."""
    with contextlib.suppress(*_GONE):
        environment = (_PROC / str(pid) / "environ").read_bytes()
        if f"{MARK_VARIABLE}={mark}".encode() in environment.split(b"\0"):
            return True
    with contextlib.suppress(*_GONE):
        limits = (_PROC / str(pid) / "limits").read_bytes()
        return str(limit_mark(mark)).encode() in limits.split()
    return False


def marked(processes: Iterable[Process], mark: str) -> list[Process]:
    """Living processes that carry the mark."""
    return [process for process in processes if not process.dead and carries_mark(process.pid, mark)]


def descendants(processes: dict[int, Process], root: int) -> list[Process]:
    """Living descendants of `root`, itself not among them; also of its dead children."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = list(children.get(root, ()))
    while waiting:
        process = waiting.pop()
        if not process.dead:
            found.append(process)
        waiting.extend(children.get(process.pid, ()))
    return found


def open_exact(pid: int, start_time: int | None) -> int | None:
    """Return a pidfd of exactly this process, None if it is gone. The caller closes it."""
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, ValueError, OverflowError):
        return None
    # Checked after opening: from here on the descriptor cannot come to mean another process.
    try:
        process = read_process(pid)
    except OSError:
        os.close(descriptor)
        raise
    if process is None or (start_time is not None and process.start_time != start_time):
        os.close(descriptor)
        return None
    return descriptor


def kill_exact(process: Process) -> bool:
    """Send SIGKILL to exactly this process; False if it was gone already or is out of reach."""
    descriptor = open_exact(process.pid, process.start_time)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def reap_orphans(known: set[int]) -> None:
    """Reap dead children of this process that it did not start: orphans that came here as to their subreaper."""
    own = os.getpid()
    for process in all_processes().values():
        if process.parent == own and process.dead and process.pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
