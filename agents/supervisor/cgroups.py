"""Control groups: one per generation, so that none of its processes can hide, and one write kills them all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from pathlib import Path

from agents.log_lines import NodeLog

log = NodeLog(__name__)


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
        for group in self._groups():
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
        for group in reversed(self._groups()):
            with contextlib.suppress(OSError):
                group.rmdir()

    def _groups(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return [Path(directory) for directory, _, _ in os.walk(self.path)]


class NodeGroups:
    """The directory that holds the groups of one agent's generations: `<mount>/everstep-<node>-<its state directory>`.

    The state directory tells agents of one name apart, since two systems may run on one machine.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def group(self, job: str, generation: int) -> ControlGroup:
        return ControlGroup(self._root / f"{job}-{generation}")

    def leave(self) -> None:
        """Remove the directory if nothing runs in it any more."""
        with contextlib.suppress(OSError):
            self._root.rmdir()

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
                root.mkdir(exist_ok=True)
                probe = ControlGroup(root / f"probe-{os.getpid()}")
                probe.create()
                usable = os.access(probe.path / "cgroup.procs", os.W_OK) and os.access(place / "cgroup.procs", os.W_OK)
                probe.remove()
            except OSError:
                continue
            if usable:
                return cls(root)
        return None


def _own_group() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return "/"
