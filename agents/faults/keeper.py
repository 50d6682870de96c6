"""The keeper of one fault: a process outside the agent that does it and undoes it, whatever becomes of the agent.

`python -m agents.faults.keeper FILE`, started by `faults.Faults` in a session and a control group of its own. The file
(`kept_fault`) says what to do and how far it has come: a keeper that finds a fault begun only undoes it. SIGTERM means
undo at once.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from agents.boot_clock import SECOND_NS, boottime_ns, this_boot
from agents.errors import AgentError
from agents.faults.agent_again import ensure_agent
from agents.faults.deaf_sockets import CannotIsolate, DeafSockets
from agents.faults.generation_processes import generation_processes, names, send
from agents.faults.kept_fault import LONGEST_FAULT_S, KeptFile, KeptStep, ProcessName, held_alone
from agents.faults.tombstone import Tombstone, remove_tombstone, write_tombstone
from agents.log_lines import NodeLog, configure_logging
from agents.supervisor.cgroups import ControlGroup
from agents.supervisor.process_table import read_process

log = NodeLog(__name__)

_ALONE_WITHIN_S = 2.0
"""The agent holds the file for moments; another keeper for long."""
_ROUNDS, _ROUND_S = 100, 0.02
"""Looks for processes that a fork has added since; a process in a system call that hangs takes neither signal."""
_LOOK_EVERY_S = 0.5


class Fault:
    """One kind of fault. `begin` may find out that it cannot be; `undo` works on whatever an earlier keeper began."""

    def __init__(self, file: KeptFile) -> None:
        self.file = file

    def check(self) -> str:
        """Why it cannot be done here, as a sentence; empty if it can. Nothing has happened yet."""
        return ""

    def begin(self) -> str:
        """Do it; returns what was done, as a sentence."""
        raise NotImplementedError

    def look_again(self) -> None:
        """Called every half second while it lasts."""

    def undo(self, *, restart: bool) -> str:
        """Undo it; returns how, as a sentence. `restart`: whether an agent may be started."""
        raise NotImplementedError


class KillAgent(Fault):
    """Agent, runner and ranks die; a tombstone keeps the next agent down."""

    def begin(self) -> str:
        fault = self.file.value
        write_tombstone(
            Path(fault.state_directory),
            Tombstone(until_boottime_ns=fault.undo_at_ns, drill=fault.drill, boot_id=fault.boot_id),
        )
        _kill_agent(fault.agent)
        killed = set()
        for _ in range(_ROUNDS):
            left = generation_processes(fault)
            if not left:
                break
            if fault.cgroup is not None:
                ControlGroup(Path(fault.cgroup)).kill()
            for name in names(left):
                send(name, signal.SIGKILL)
                killed.add(name.pid)
            time.sleep(_ROUND_S)
        return f"SIGKILL to the agent, process {fault.agent.pid}, and to {len(killed)} processes of the generation"

    def undo(self, *, restart: bool) -> str:
        fault = self.file.value
        directory = Path(fault.state_directory)
        remove_tombstone(directory)
        return ensure_agent(directory, fault.agent_argv) if restart else "The node may have an agent again."


class RestartAgent(Fault):
    """The agent alone dies."""

    def begin(self) -> str:
        _kill_agent(self.file.value.agent)
        return f"SIGKILL to the agent, process {self.file.value.agent.pid}"

    def undo(self, *, restart: bool) -> str:
        fault = self.file.value
        if not restart:
            return "The node may have an agent again."
        return ensure_agent(Path(fault.state_directory), fault.agent_argv)


class FreezeNode(Fault):
    """Agent, runner and ranks get SIGSTOP, later SIGCONT."""

    def begin(self) -> str:
        fault = self.file.value
        told = set(fault.stopped)
        for _ in range(_ROUNDS):
            agent = read_process(fault.agent.pid)
            everyone = [*([agent] if agent is not None else []), *generation_processes(fault)]
            running = [process for process in everyone if not process.dead and process.state not in "Tt"]
            if not running:
                break
            new = [name for name in names(running) if name not in told]
            if new:
                told.update(new)
                self.file.note(stopped=(*self.file.value.stopped, *new))
            for name in names(running):
                send(name, signal.SIGSTOP)
            time.sleep(_ROUND_S)
        return f"SIGSTOP to {len(told)} processes: the agent, the runner and all below it"

    def undo(self, *, restart: bool) -> str:
        woken = [name for name in self.file.value.stopped if send(name, signal.SIGCONT)]
        return f"SIGCONT to {len(woken)} processes"


class IsolateNode(Fault):
    """Ranks hear nothing of ranks on other nodes; the agent cuts its own connection."""

    def __init__(self, file: KeptFile) -> None:
        super().__init__(file)
        self._sockets = DeafSockets(file.value)

    def check(self) -> str:
        try:
            found = self._sockets.find()
            taken = self._sockets.take(found)
        except CannotIsolate as err:
            return str(err)
        self._taken = tuple(found)
        return "" if taken else "The ranks here hold no TCP connection to ranks on other nodes: nothing to cut."

    def begin(self) -> str:
        self.file.note(sockets=self._taken)
        self._sockets.deafen(self._taken)
        return f"{len(self._taken)} TCP connections to ranks on other nodes made deaf"

    def look_again(self) -> None:
        try:
            found = self._sockets.find()
            if found:
                self._sockets.take(found)
                self.file.note(sockets=(*self.file.value.sockets, *found))
                self._sockets.deafen(found)
        except (CannotIsolate, AgentError, OSError) as err:
            log.warning("a new connection could not be cut", drill=self.file.value.drill, error=err)

    def undo(self, *, restart: bool) -> str:
        restored = self._sockets.hear_again(self.file.value.sockets)
        self._sockets.close()
        return f"{restored} of {len(self.file.value.sockets)} connections hear again; the others are closed"


KINDS: dict[str, type[Fault]] = {
    "kill-agent": KillAgent,
    "restart-agent": RestartAgent,
    "freeze-node": FreezeNode,
    "isolate-node": IsolateNode,
}


def keep(file: KeptFile) -> None:
    """Take a fault from where it is to its end. Raises `StateUnusable` or `OSError` only before it has begun."""
    fault = KINDS[file.value.kind](file)
    asked_to_end = False
    if file.value.step is KeptStep.WANTED:
        if not _begin(fault):
            return
    elif file.value.boot_id != this_boot():
        file.note(step=KeptStep.UNDONE, undone_at=time.time(), undone_detail="The node has booted since.")
        return
    while not asked_to_end and (left_s := _left_s(file)) > 0:
        asked_to_end = signal.sigtimedwait([signal.SIGTERM], min(left_s, _LOOK_EVERY_S)) is not None
        fault.look_again()
    _join_group(file.value.agent_group)  # before an agent is started in it, and to leave our own group empty
    words = fault.undo(restart=not asked_to_end)
    _note_if_possible(file, step=KeptStep.UNDONE, undone_at=time.time(), undone_detail=words)
    log.info("a fault is undone", drill=file.value.drill, kind=file.value.kind, detail=words)


def _begin(fault: Fault) -> bool:
    """Do it, if it may still be; False if it may not."""
    file = fault.file
    if file.value.boot_id != this_boot() or boottime_ns() > file.value.not_after_ns:
        return _decline(file, KeptStep.EXPIRED, "its deadline passed before its moment came")
    refusal = fault.check()
    if refusal:
        return _decline(file, KeptStep.REFUSED, refusal)
    file.note(step=KeptStep.DOING, undo_at_ns=boottime_ns() + int(file.value.duration_s * SECOND_NS))
    at = time.time()
    try:
        words = fault.begin()
    except (CannotIsolate, AgentError, OSError) as err:
        fault.undo(restart=True)
        return _decline(file, KeptStep.REFUSED, str(err))
    _note_if_possible(file, step=KeptStep.APPLIED, applied_at=at, detail=words)
    log.info("a fault is applied", drill=file.value.drill, kind=file.value.kind, detail=words)
    return True


def _decline(file: KeptFile, step: KeptStep, detail: str) -> bool:
    _join_group(file.value.agent_group)
    _note_if_possible(file, step=step, detail=detail)
    return False


def _note_if_possible(file: KeptFile, **changes: Any) -> None:
    """Once something has happened, a full disk must not keep it from being undone."""
    try:
        file.note(**changes)
    except AgentError as err:
        log.error("the keeper's note could not be written", drill=file.value.drill, error=err)


def _kill_agent(agent: ProcessName) -> None:
    """Kill it and see it dead: it holds its directory until then, and must not be taken for the next one."""
    send(agent, signal.SIGKILL)
    for _ in range(_ROUNDS):
        process = read_process(agent.pid)
        if process is None or process.dead or process.start_time != agent.start_time:
            return
        time.sleep(_ROUND_S)


def _left_s(file: KeptFile) -> float:
    return min(LONGEST_FAULT_S, (file.value.undo_at_ns - boottime_ns()) / SECOND_NS)


def _join_group(group: str | None) -> None:
    """Move this process to a control group; where that cannot be, it stays where it is."""
    if group is not None:
        try:
            (Path(group) / "cgroup.procs").write_text("0")
        except OSError as err:
            log.warning("the keeper stays in its control group", group=group, error=err)


def main() -> int:
    configure_logging(verbose=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    path = Path(sys.argv[1])
    try:
        with held_alone(path, within_s=_ALONE_WITHIN_S) as alone:
            file = KeptFile.read(path) if alone else None
            if file is None or file.value.step in (KeptStep.UNDONE, KeptStep.REFUSED, KeptStep.EXPIRED):
                return 0
            _join_group(file.value.keeper_group)
            keep(file)
    except (AgentError, OSError) as err:
        log.error("a fault could not be kept; the next agent looks after it", file=path, error=err)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
