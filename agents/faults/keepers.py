"""The agent's side of keepers: writes a fault down, starts its keeper, reads how far it has come. `Faults` calls."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from agents.boot_clock import SECOND_NS, boottime_ns, this_boot
from agents.errors import StateUnusable
from agents.faults.drill_record import DrillRecord
from agents.faults.impossible import FaultImpossible
from agents.faults.kept_fault import (
    KeptFault,
    KeptFile,
    KeptStep,
    ProcessName,
    forget,
    held_alone,
    kept_path,
)
from agents.faults.moment import DrilledRun
from agents.settings import Settings, is_safe_name
from agents.supervisor.cgroups import ControlGroup, NodeGroups, cgroup2_mount
from agents.supervisor.process_table import read_process
from agents.supervisor.records import RunRecords

_START_AGAIN_S = 2.0


class Keepers:
    """All keepers of this node's faults."""

    def __init__(self, *, state_directory: Path, settings: Settings, children: set[int]) -> None:
        self._state_directory = state_directory
        self._settings = settings
        self._children = children
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}

    def write_down(self, record: DrillRecord, run: DrilledRun, *, not_after_s: float) -> None:
        """Put all that doing and undoing takes on disk. `not_after_s`: seconds from now.

        Raises `FaultImpossible` or `StateUnusable`.
        """
        if not is_safe_name(record.drill):
            raise FaultImpossible(f"drill {record.drill!r} cannot name a file")
        remembered = RunRecords(self._state_directory).read(record.job, record.generation)
        if remembered is None or run.runner_pid is None:
            raise FaultImpossible(f"generation {record.generation} of {record.job} has no runner here any more")
        agent, runner = _name(os.getpid()), _name(run.runner_pid)
        path = kept_path(self._state_directory, record.drill)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as err:
            raise StateUnusable(f"{path.parent} cannot be made ({err.strerror}).") from err
        fault = KeptFault(
            drill=record.drill,
            kind=record.kind.value,
            step=KeptStep.WANTED,
            state_directory=str(self._state_directory),
            boot_id=this_boot(),
            not_after_ns=boottime_ns() + int(not_after_s * SECOND_NS),
            duration_s=record.duration_s,
            undo_at_ns=boottime_ns() + int(record.duration_s * SECOND_NS),
            agent=agent,
            agent_argv=(sys.executable, *sys.orig_argv[1:]),
            agent_group=_own_group(),
            keeper_group=self._make_group(record),
            job=record.job,
            generation=record.generation,
            mark=remembered.mark,
            cgroup=remembered.cgroup,
            runner=runner,
            master_port=run.launch.master_port,
        )
        KeptFile(path, fault).note()

    def start(self, drill: str) -> None:
        """Start a keeper for what is written down; one too many goes away by itself. Raises `OSError`."""
        if time.monotonic() - self._started_at.get(drill, -_START_AGAIN_S) < _START_AGAIN_S:
            return
        self._started_at[drill] = time.monotonic()
        # It inherits our environment and our log, and hands them to the agent that it may have to start.
        keeper = subprocess.Popen(
            [sys.executable, "-m", "agents.faults.keeper", str(kept_path(self._state_directory, drill))],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._children.add(keeper.pid)
        self._started[drill] = keeper

    def read(self, drill: str) -> KeptFault | None:
        """None if nothing is written down. Raises `StateUnusable`."""
        file = KeptFile.read(kept_path(self._state_directory, drill))
        return None if file is None else file.value

    def lives(self, drill: str) -> bool:
        """Whether a keeper is at work on it, of this agent or of an earlier one."""
        started = self._started.get(drill)
        if started is not None and started.poll() is None:
            return True
        self._reap(drill)
        with held_alone(kept_path(self._state_directory, drill)) as alone:
            return not alone

    def withdraw(self, drill: str) -> bool:
        """Take back what no keeper has begun; False if one has it in hand."""
        path = kept_path(self._state_directory, drill)
        with held_alone(path) as alone:
            file = KeptFile.read(path) if alone else None
            if file is None or file.value.step is not KeptStep.WANTED:
                return False
            self.forget(file.value)
        return True

    def forget(self, fault: KeptFault) -> None:
        """Remove what is left of a fault that is over."""
        forget(kept_path(self._state_directory, fault.drill))
        if fault.keeper_group is not None:
            group = Path(fault.keeper_group)
            ControlGroup(group).remove()
            with contextlib.suppress(OSError):
                group.parent.rmdir()
        self._reap(fault.drill)

    def _reap(self, drill: str) -> None:
        started = self._started.get(drill)
        if started is not None and started.poll() is not None:
            self._children.discard(started.pid)
            del self._started[drill]

    def _make_group(self, record: DrillRecord) -> str | None:
        """A group for the keeper outside the agent's unit and the generation, where groups can be made."""
        groups = None
        if self._settings.cgroups:
            groups = NodeGroups.find(f"{self._settings.name}-keeper", self._state_directory)
        if groups is None:
            return None
        group = groups.group(record.drill, record.generation)
        try:
            group.create()
        except OSError:
            return None
        return str(group.path)


def _name(pid: int) -> ProcessName:
    process = read_process(pid)
    if process is None or process.dead:
        raise FaultImpossible(f"process {pid} has just ended")
    return ProcessName(process.pid, process.start_time)


def _own_group() -> str | None:
    """Directory of the control group that the agent runs in; None without cgroup v2."""
    mount = cgroup2_mount(Path("/proc/self/mountinfo").read_text())
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if mount is not None and line.startswith("0::"):
            return str(mount / line[3:].lstrip("/"))
    return None
