"""The file of one fault that a keeper does and undoes: `<state>/faults/<drill>.json`, all that undoing it takes.

The agent writes it, then starts the keeper, which writes each of its steps into it *before* it takes it; so whoever
comes later, another keeper or the next agent, knows what may have happened. Stdlib only, since the keeper uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from agents.durable import read_json, write_json
from agents.errors import StateUnusable

LONGEST_FAULT_S = 600.0
"""No fault lasts longer than this, whatever a server or a damaged file asks for."""
_LOOK_EVERY_S = 0.02


class KeptStep(StrEnum):
    """How far a kept fault has come."""

    WANTED = "wanted"
    """Nothing has happened yet."""
    DOING = "doing"
    """On disk just before the fault; from here on it is undone, never begun anew."""
    APPLIED = "applied"
    UNDONE = "undone"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclass(frozen=True)
class ProcessName:
    """Exactly one process: a later one of the same number started at another time."""

    pid: int
    start_time: int
    """Clock ticks since boot, as in /proc/<pid>/stat."""


@dataclass(frozen=True, kw_only=True)
class KeptFault:
    drill: str
    kind: str
    """A `FaultKind`, as text."""
    step: KeptStep
    state_directory: str
    boot_id: str
    not_after_ns: int
    """CLOCK_BOOTTIME; later than this the fault is not begun."""
    duration_s: float
    undo_at_ns: int
    """CLOCK_BOOTTIME; set anew in the moment of the fault."""
    agent: ProcessName
    agent_argv: tuple[str, ...]
    """How to start the agent again. Its environment is no file's business: the keeper inherits it."""
    agent_group: str | None
    """Control group in which the agent was started."""
    keeper_group: str | None
    """Control group of the keeper, so that nothing that ends a unit or a generation takes it along."""
    job: str
    generation: int
    mark: str
    """What processes of the generation carry on this node."""
    cgroup: str | None
    """Control group of the generation."""
    runner: ProcessName
    master_port: int | None
    """Port of the generation's rendezvous."""
    stopped: tuple[ProcessName, ...] = ()
    """Processes that got SIGSTOP, or were about to."""
    sockets: tuple[int, ...] = ()
    """Inodes of sockets that were made deaf, or were about to be."""
    applied_at: float | None = None
    """Unix seconds."""
    undone_at: float | None = None
    detail: str = ""
    undone_detail: str = ""


class KeptFile:
    """A `KeptFault` and its file."""

    def __init__(self, path: Path, value: KeptFault) -> None:
        self.path = path
        self.value = value

    def note(self, **changes: Any) -> None:
        """Change some fields; on disk when this returns. Raises `StateUnusable`."""
        self.value = replace(self.value, **changes)
        write_json(self.path, asdict(self.value))

    @classmethod
    def read(cls, path: Path) -> KeptFile | None:
        """None if there is no such file. Raises `StateUnusable` if it holds no fault."""
        value = read_json(path)
        if value is None:
            return None
        try:
            fault = KeptFault(
                **{
                    **value,
                    "step": KeptStep(value["step"]),
                    "agent": ProcessName(**value["agent"]),
                    "agent_argv": tuple(value["agent_argv"]),
                    "runner": ProcessName(**value["runner"]),
                    "stopped": tuple(ProcessName(**name) for name in value["stopped"]),
                    "sockets": tuple(value["sockets"]),
                }
            )
        except (KeyError, TypeError, ValueError) as err:
            raise StateUnusable(
                f"{path} holds no fault ({err}). See that nothing of drill {path.stem} is left, then remove it."
            ) from err
        return cls(path, fault)


def kept_path(state_directory: Path, drill: str) -> Path:
    """The caller has checked that the drill's name is safe in a path."""
    return state_directory / "faults" / f"{drill}.json"


@contextlib.contextmanager
def held_alone(path: Path, *, within_s: float = 0.0) -> Iterator[bool]:
    """Hold a kept fault for this process; yields False if another one does. The kernel gives it back when we die.

    A keeper holds its fault as long as it lives, the agent for moments, to see that no keeper is there.
    """
    limit = time.monotonic() + within_s
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= limit:
                    yield False
                    return
                time.sleep(_LOOK_EVERY_S)
            else:
                yield True
                return
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Remove a kept fault that is over."""
    path.unlink(missing_ok=True)
    path.with_suffix(".lock").unlink(missing_ok=True)
