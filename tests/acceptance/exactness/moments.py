"""Catches a save in the middle: stops the writers where the files say that it is there, and looks again.

The kernel tells of each new file and each rename (inotify), so that nothing has to be slowed down. Whoever comes too
late lets the writers go on and waits for the next save. `faults` makes one watch for each fault that wants a save.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from everstep.checkpoint.manifest import ASIDE, MANIFEST

_IN_MOVED_TO, _IN_CREATE = 0x80, 0x100
_STOPPED_WITHIN_S = 5.0


class Moment(StrEnum):
    """Where a save is: no rank's part is on disk yet; some are, and the leader waits for the others; it is renamed and
    has no manifest; or a part of a snapshot is being put into a node's memory."""

    WRITING = "a part is being written"
    WAITING = "the leader waits for parts"
    PUBLISHING = "renamed and without manifest"
    KEEPING = "a part is being kept in memory"


@dataclass(frozen=True, kw_only=True)
class Caught:
    """A save that stands still. `path`: what is not whole yet."""

    moment: Moment
    step: int
    path: Path


class Watch:
    """Looks at directories whenever something in them is made or renamed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def catch(self, wanted: Moment, writers: Sequence[int], *, limit_s: float) -> Caught | None:
        """Wait for news and stop the writers at that moment; None if it was missed, or none came in time.

        The writers of what was caught are stopped; kill them, or let them go on.
        """
        select.select([self._fd], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 65536)
        found = self._look()
        if found is None or found.moment is not wanted or not writers:
            return None
        try:
            stop(writers)
            sure = self._look()
        except ProcessLookupError:
            sure = None
        if sure is not None and (sure.moment, sure.step) == (wanted, found.step):
            return sure
        let_go(writers)
        return None

    def _names(self, directory: Path) -> list[str]:
        """What is in it now; news of what is made in it will come from here on. Nothing if it is gone."""
        if self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _IN_MOVED_TO | _IN_CREATE) < 0:
            error = ctypes.get_errno()
            if error != errno.ENOENT:
                raise OSError(error, f"cannot watch {directory}: {os.strerror(error)}")
            return []
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(directory))
        return []

    def _look(self) -> Caught | None:
        raise NotImplementedError


class SaveWatch(Watch):
    """Watches the disk: one generation's directory from now on; what lies there already is not looked at again."""

    def __init__(self, directory: Path, *, world_size: int) -> None:
        super().__init__()
        self._directory = directory
        self._world_size = world_size
        self._old = set(self._names(directory))

    def _look(self) -> Caught | None:
        for name in self._names(self._directory):
            path = self._directory / name
            if name in self._old:
                continue
            if name.startswith(f"{ASIDE}step-"):
                files = self._names(path)
                done = sum(file.startswith("done-") and file.endswith(".json") for file in files)
                step = _step_of(name)
                if not done and any(file.startswith("shard-") for file in files):
                    return Caught(moment=Moment.WRITING, step=step, path=path)
                if 0 < done < self._world_size:
                    return Caught(moment=Moment.WAITING, step=step, path=path)
            elif name.startswith("step-"):
                if not (path / MANIFEST).exists():
                    return Caught(moment=Moment.PUBLISHING, step=int(name.removeprefix("step-")), path=path)
                self._old.add(name)
        return None


class SnapshotWatch(Watch):
    """Watches what the nodes keep of one generation in memory."""

    def __init__(self, roots: Sequence[Path], *, generation: int) -> None:
        super().__init__()
        self._roots = roots
        self._generation = f"generation-{generation:05d}"
        self._old = frozenset(caught.path for caught in self._parts())

    def _look(self) -> Caught | None:
        return next((caught for caught in self._parts() if caught.path not in self._old), None)

    def _parts(self) -> Iterator[Caught]:
        """The parts of this generation that are being written."""
        for place in [root / name for root in self._roots for name in self._names(root) if name.startswith("rank-")]:
            if self._generation not in self._names(place):
                continue
            directory = place / self._generation
            for name in self._names(directory):
                if name.startswith(f"{ASIDE}step-"):
                    yield Caught(moment=Moment.KEEPING, step=_step_of(name), path=directory / name)


def _step_of(aside: str) -> int:
    return int(aside.removeprefix(f"{ASIDE}step-").split("-")[0])


def stop(pids: Sequence[int]) -> None:
    """Stop processes, and wait until each of their threads stands. Raises `ProcessLookupError` where one is gone."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _STOPPED_WITHIN_S
    while (states := {state for pid in pids for state in _states(pid)}) != {"T"}:
        if states & {"Z", "X"}:
            raise ProcessLookupError(f"one of the processes {pids} has ended")
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} were told to stop {_STOPPED_WITHIN_S:.0f} s ago and still run")


def let_go(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def writers_of(ranks: Sequence[int]) -> dict[int, int]:
    """The writer that each of these ranks (process ids) has started, where it has."""
    found = {}
    for rank in ranks:
        for child in _children(rank):
            with contextlib.suppress(OSError):
                if b"everstep.checkpoint.writer_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found[rank] = child
    return found


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    return []


def _states(pid: int) -> list[str]:
    """Of each thread. Raises `ProcessLookupError` where the process is gone."""
    states = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError as err:
        raise ProcessLookupError(f"process {pid} has ended") from err
    for task in tasks:
        with contextlib.suppress(OSError):
            states.append(Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0])
    return states
