"""A node for a keeper to work on, without the real agent: real processes that only sit there, and the keeper itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agents.boot_clock import SECOND_NS, boottime_ns, this_boot
from agents.faults.kept_fault import KeptFault, KeptFile, KeptStep, ProcessName, kept_path
from agents.faults.tombstone import wait_while_down
from agents.supervisor.process_table import Process, read_process

PROJECT = Path(__file__).resolve().parents[2]

RUNNER = """
import subprocess, sys, time
for number in range(2):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


def stand_in_agent(state: Path) -> None:
    """What an agent is to a keeper: stays away while a tombstone says so, then holds its state directory."""
    import fcntl

    wait_while_down(state)
    lock = os.open(state / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (state / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {time.time()}\n")
    time.sleep(600)


class DrilledNode:
    """One agent, one runner, two ranks, and whatever a test adds."""

    def __init__(self, directory: Path, *, name: str = "node-a", runner: list[str] | None = None) -> None:
        self.state = directory / f"state-{name}"
        self.state.mkdir()
        (self.state / "faults").mkdir()
        self.name = name
        self.mark = f"job-1:1:plan-1:{name}:{os.getpid()}:{directory.name}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.agent = self.start_agent()
        self.runner = self._start(
            runner or [sys.executable, "-c", RUNNER], EVERSTEP_MARK=self.mark, start_new_session=True
        )
        wait_until(lambda: (self.state / "starts").exists())
        wait_until(lambda: runner is not None or len(self.generation()) == 3)

    @property
    def agent_argv(self) -> tuple[str, ...]:
        return (sys.executable, __file__, str(self.state))

    def start_agent(self) -> subprocess.Popen[bytes]:
        return self._start(list(self.agent_argv))

    def starts(self) -> list[int]:
        """Process ids of all agents that have come up here, in order."""
        return [int(line.split()[0]) for line in (self.state / "starts").read_text().splitlines()]

    def fault(self, kind: str, *, duration_s: float = 0.0, not_after_s: float = 60.0) -> KeptFile:
        """Write a fault down, as the agent does."""
        file = KeptFile(
            kept_path(self.state, "drill-1"),
            KeptFault(
                drill="drill-1",
                kind=kind,
                step=KeptStep.WANTED,
                state_directory=str(self.state),
                boot_id=this_boot(),
                not_after_ns=boottime_ns() + int(not_after_s * SECOND_NS),
                duration_s=duration_s,
                undo_at_ns=boottime_ns() + int(duration_s * SECOND_NS),
                agent=name_of(self.agent.pid),
                agent_argv=self.agent_argv,
                agent_group=None,
                keeper_group=None,
                job="job-1",
                generation=1,
                mark=self.mark,
                cgroup=None,
                runner=name_of(self.runner.pid),
                master_port=None,
            ),
        )
        file.note()
        return file

    def keeper(self, file: KeptFile) -> subprocess.Popen[bytes]:
        return self._start([sys.executable, "-m", "agents.faults.keeper", str(file.path)], start_new_session=True)

    def noted(self) -> KeptFault:
        file = KeptFile.read(kept_path(self.state, "drill-1"))
        assert file is not None
        return file.value

    def generation(self) -> list[Process]:
        """Living processes with this node's mark."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if f"EVERSTEP_MARK={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    process = read_process(int(entry.name))
                    if process is not None and not process.dead:
                        found.append(process)
        return found

    def clean_up(self) -> None:
        agents = self.starts() if (self.state / "starts").exists() else []
        for process in self._processes:
            process.kill()
            process.wait()
        for pid in (*agents, *(process.pid for process in self.generation())):
            with contextlib.suppress(OSError):
                if str(self.state).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() or pid not in agents:
                    os.kill(pid, signal.SIGKILL)

    def _start(self, argv: list[str], *, start_new_session: bool = False, **more: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), **more}
        process = subprocess.Popen(argv, env=environment, start_new_session=start_new_session)
        self._processes.append(process)
        return process


def name_of(pid: int) -> ProcessName:
    process = read_process(pid)
    assert process is not None
    return ProcessName(process.pid, process.start_time)


def state_of(pid: int) -> str:
    """One letter as in ps(1); empty if there is no such process."""
    process = read_process(pid)
    return "" if process is None else process.state


def goes_on(pid: int) -> bool:
    """Whether a process is there and not stopped; it may wait for a disk."""
    return state_of(pid) in ("S", "R", "D")


def wait_until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


if __name__ == "__main__":
    stand_in_agent(Path(sys.argv[1]))
