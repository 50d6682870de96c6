"""Watches training processes from outside: a pidfd for each rank as soon as its log names it, and looks into /proc."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Iterable
from pathlib import Path

SCAN_INTERVAL_S = 0.05


class Witness:
    """Collects what becomes of ranks and of their logged children, in a thread of its own."""

    def __init__(self, agents: Path) -> None:
        self.exits: dict[int, float] = {}
        """pid -> when its pidfd fired."""
        self.thaws: dict[int, float] = {}
        """pid -> when it was last seen stopped by a signal; it went on within a moment after."""
        self.lateness_s = 0.0
        """The longest time in which it saw nothing, since the machine did other things."""
        self._agents = agents
        self._read: dict[Path, int] = {}
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._known: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for descriptor in self._watched:
            os.close(descriptor)

    def alive(self) -> set[int]:
        """Pids that were seen and have not exited."""
        return self._known - set(self.exits)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._over.is_set():
            for path in self._agents.glob("*/runs/*/*/logs/rank-*.jsonl"):
                for pid in self._fresh_pids(path):
                    self._open(pid)
            for pid in self._watched.values():
                if is_stopped(pid):
                    self.thaws[pid] = time.time()
            until = time.monotonic() + SCAN_INTERVAL_S
            while (left := until - time.monotonic()) > 0:
                fired = self._poll.poll(left * 1000)
                now = time.monotonic()
                self.lateness_s, looked_at = max(self.lateness_s, now - looked_at - SCAN_INTERVAL_S), now
                for descriptor, _ in fired:
                    self.exits[self._watched.pop(descriptor)] = time.time()
                    self._poll.unregister(descriptor)
                    os.close(descriptor)

    def _fresh_pids(self, path: Path) -> list[int]:
        """Pids that whole lines behind the last place read name as started."""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            lines = file.read().split(b"\n")[:-1]
        self._read[path] = self._read.get(path, 0) + sum(len(line) + 1 for line in lines)
        entries = [json.loads(line) for line in lines if b'"start"' in line or b'"child"' in line]
        return [entry["pid"] for entry in entries if entry["kind"] in ("start", "child")]

    def _open(self, pid: int) -> None:
        if pid in self._known:
            return
        self._known.add(pid)
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.exits[pid] = time.time()
            return
        self._watched[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)


def marked_processes(job: str, generation: int) -> list[int]:
    """Live processes whose environment carries the mark of a generation."""
    return _processes(f"EVERSTEP_MARK={job}:{generation}:".encode())


def world_size_of(pids: Iterable[int]) -> set[int]:
    """The world sizes that living ranks were started with; children that they left behind have it from them."""
    name = b"WORLD_SIZE="
    return {
        int(word.removeprefix(name))
        for pid in pids
        for word in _content(pid, "environ").split(b"\0")
        if word.startswith(name)
    }


def processes_of(home: Path) -> dict[int, str]:
    """Live processes that name the folder in their environment or command line: pid -> command."""
    return {pid: command_line(pid) or "(no command line)" for pid in _processes(os.fsencode(home))}


def is_stopped(pid: int) -> bool:
    """Whether it is stopped by a signal, such as SIGSTOP."""
    return _content(pid, "stat").rpartition(b")")[2].split()[:1] == [b"T"]


def command_line(pid: int) -> str:
    """Its words, joined by spaces; empty for a process that is gone."""
    return _content(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def parent_of(pid: int) -> int | None:
    """Pid of the parent; None for a process that is gone."""
    words = _content(pid, "stat").rpartition(b")")[2].split()
    return int(words[1]) if words else None


def _processes(needle: bytes) -> list[int]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    return [pid for pid in pids if needle in _content(pid, "environ") or needle in _content(pid, "cmdline")]


def _content(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>; empty for zombies, and for a process that is gone or not ours to read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
