"""Control groups: one per generation, so that none of its processes can hide, and one write kills them all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from agents.log_lines import NodeLog

log = NodeLog(__name__)

_LEFT_OVER_AFTER_S = 3600.0
"""A group that is made is filled within seconds; this is far beyond the longest time that a drill freezes an agent."""
_MOST_REMOVED = 100
"""Left-over groups removed at one start, which must not take long; the next start goes on."""
_HOLD_TRIES, _HOLD_PAUSE_S = 50, 0.02
_NAME = re.compile(r"(everstep-.+?)(?:-keeper)?-([0-9a-f]{8})")


def cgroup2_mount(mountinfo: str) -> Path | None:
    """Return where cgroup v2 is mounted: the only hierarchy, or beside version 1 on hybrid hosts.

    `mountinfo` is the text of /proc/self/mountinfo (proc(5): after ` - ` come file system, source and options).
    """
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if separator and after.split()[:1] == ["cgroup2"]:
            return Path(before.split()[4].encode().decode("unicode_escape"))
    return None


class ControlGroup:
    """The group of one generation on this node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Raises `OSError`."""
        self.path.mkdir(parents=True, exist_ok=True)
        _date(self.path)

    @property
    def populated(self) -> bool:
        """Whether any process is alive in the group or below it; zombies do not count."""
        try:
            events = (self.path / "cgroup.events").read_text()
        except FileNotFoundError:
            return False
        return "populated 1" in events.splitlines()

    def processes(self) -> set[int]:
        """Process ids in the group and below it."""
        found: set[int] = set()
        for group in self.groups():
            with contextlib.suppress(OSError):
                found.update(int(word) for word in (group / "cgroup.procs").read_text().split())
        return found

    def holds(self, pid: int) -> bool:
        return pid in self.processes()

    def kill(self) -> None:
        """Kill all that is in the group now, new forks included (Linux 5.14; before, one by one)."""
        try:
            # Opened without the wish to create: where there is no such file, the kernel would refuse it as forbidden.
            descriptor = os.open(self.path / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the empty group; what cannot be removed yet stays and does no harm."""
        for group in reversed(self.groups()):
            with contextlib.suppress(OSError):
                group.rmdir()

    def groups(self) -> list[Path]:
        """The group and those below it, each before what is in it."""
        if not self.path.is_dir():
            return []
        return [Path(directory) for directory, _, _ in os.walk(self.path)]


class NodeGroups:
    """The directory that holds the groups of one agent's generations: `<mount>/everstep-<node>-<its state directory>`.

    The state directory tells agents of one name apart, since two systems may run on one machine.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: int | None = None

    def group(self, job: str, generation: int) -> ControlGroup:
        return ControlGroup(self._root / f"{job}-{generation}")

    def hold(self) -> None:
        """Lock the directory for as long as this process lives, so that other agents see that it has an owner.

        Without the lock, which a kernel may refuse, it is only removed where it is old and empty, and `create` of a
        group makes it again.
        """
        for _ in range(_HOLD_TRIES):
            try:
                self._root.mkdir(exist_ok=True)
                held = _lock(self._root, fcntl.LOCK_SH)
            except (BlockingIOError, FileNotFoundError, FileExistsError):
                time.sleep(_HOLD_PAUSE_S)  # another agent looks whether it is left over, or has removed it just now
                continue
            except OSError as err:
                log.debug("the control group cannot be locked", path=self._root, error=err)
                return
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), self._root.stat()):
                    self._held = held
                    _date(self._root)
                    return
            os.close(held)  # it was removed just before the lock
        log.debug("the control group is still held by somebody who looks at it", path=self._root)

    def leave(self) -> None:
        """Remove the directory if nothing runs in it any more."""
        with contextlib.suppress(OSError):
            self._root.rmdir()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def remove_left_over(self, *, now: float) -> int:
        """Remove what agents left beside this one that were killed and never started again; return how many.

        That is: named as theirs, held by no agent, without a process, and untouched for an hour. Nothing is killed; the
        kernel refuses to remove a group that holds a process.
        """
        removed = 0
        for path in sorted(self._root.parent.glob("everstep-*")):
            if removed == _MOST_REMOVED:
                break
            if path != self._root and path.is_dir():
                removed += _remove_if_left_over(path, now=now)
        return removed

    @classmethod
    def find(cls, node: str, state_directory: Path) -> NodeGroups | None:
        """Return a place where this process may make groups, None if there is none."""
        mount = cgroup2_mount(Path("/proc/self/mountinfo").read_text())
        if mount is None:
            return None
        state = hashlib.sha256(os.fsencode(state_directory.absolute())).hexdigest()[:8]
        # At the top where that is allowed (root), else in the group that was delegated to this service or session.
        for place in dict.fromkeys((mount, mount / _own_group().lstrip("/"))):
            root = place / f"everstep-{node}-{state}"
            try:
                probe = ControlGroup(root / f"probe-{os.getpid()}")
                try:
                    probe.create()
                except (FileNotFoundError, FileExistsError):  # another agent has just removed what was left here
                    probe.create()
                usable = os.access(probe.path / "cgroup.procs", os.W_OK) and os.access(place / "cgroup.procs", os.W_OK)
                probe.remove()
            except OSError:
                continue
            if usable:
                return cls(root)
        return None


def _date(directory: Path) -> None:
    """Write down how old it is: unasked, the kernel forgets it with the inode."""
    with contextlib.suppress(OSError):
        os.utime(directory)


def _remove_if_left_over(path: Path, *, now: float) -> bool:
    name = _NAME.fullmatch(path.name)
    if name is None:
        return False
    owner = path.with_name(f"{name[1]}-{name[2]}")  # an agent holds its own directory, but not that of its keepers
    try:
        with contextlib.ExitStack() as locks:
            for place in dict.fromkeys((owner, path)):
                if place.exists():
                    locks.enter_context(_locked(place))
            group = ControlGroup(path)
            groups = group.groups()
            if group.populated or any(now - one.stat().st_mtime < _LEFT_OVER_AFTER_S for one in groups):
                return False
            for one in reversed(groups):
                one.rmdir()
    except OSError as err:
        log.debug("a control group stays", path=path, error=err)
        return False
    log.debug("left-over control group removed", path=path)
    return True


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory alone. Raises `BlockingIOError` where somebody holds it already."""
    descriptor = _lock(directory, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(directory: Path, kind: int) -> int:
    """Return a descriptor with a lock on it, which ends with the process. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _own_group() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return "/"
