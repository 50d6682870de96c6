"""Which processes belong to a drilled generation, and signals to exactly these. For the keeper; stdlib only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from agents.faults.kept_fault import KeptFault, ProcessName
from agents.supervisor.cgroups import ControlGroup
from agents.supervisor.process_table import Process, all_processes, descendants, marked, open_exact


def generation_processes(fault: KeptFault) -> list[Process]:
    """Living processes of the generation on this node, the runner first: by control group, by mark, by descent."""
    processes = all_processes()
    found: dict[int, Process] = {}
    runner = processes.get(fault.runner.pid)
    if runner is not None and runner.start_time == fault.runner.start_time and not runner.dead:
        found[runner.pid] = runner
        found.update((process.pid, process) for process in descendants(processes, runner.pid))
    if fault.cgroup is not None:
        members = ControlGroup(Path(fault.cgroup)).processes()
        found.update((pid, processes[pid]) for pid in members if pid in processes and not processes[pid].dead)
    found.update((process.pid, process) for process in marked(processes.values(), fault.mark))
    for own in (os.getpid(), fault.agent.pid):
        found.pop(own, None)
    return list(found.values())


def names(processes: Iterable[Process]) -> tuple[ProcessName, ...]:
    return tuple(ProcessName(process.pid, process.start_time) for process in processes)


def send(name: ProcessName, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False if it is gone. Raises `PermissionError`."""
    descriptor = open_exact(name.pid, name.start_time)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
