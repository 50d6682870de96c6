"""Killing a generation, and proving that nothing of it is left on this node; the fence that relaunching waits for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from agents.protocol.messages import ProofKind, StopProof
from agents.supervisor.cgroups import ControlGroup
from agents.supervisor.process_table import Process, all_processes, descendants, kill_exact, marked, reap_orphans

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
_TELL_AFTER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to look for."""

    mark: str
    group: ControlGroup | None
    runner: int | None
    """The runner's process id while it lives."""


async def prove_stopped(
    target: Callable[[], Target], *, own_children: set[int], stuck: Callable[[str], None]
) -> StopProof:
    """Kill until nothing is left, however long that takes, and return the proof.

    `target` is asked again before each look. `own_children`, read anew each time, are processes that the agent itself
    needs. `stuck` hears every few seconds what will not die (a process in a hung system call does not, until the call
    returns).
    """
    killed: set[int] = set()
    pause_s, tell_at = _FIRST_PAUSE_S, time.monotonic() + _TELL_AFTER_S
    while True:
        looked_at = target()
        try:
            left = _kill_group(looked_at, killed) if looked_at.group else _kill_tree(looked_at, own_children, killed)
        except OSError as err:
            # A look that failed proves nothing, and to give up would leave the server waiting for ever.
            words = f"It could not be looked for what is left ({err}); trying again."
        else:
            if not left:
                return _proof(looked_at, killed)
            words = _words(left)
        if time.monotonic() >= tell_at:
            stuck(words)
            tell_at = time.monotonic() + _TELL_AFTER_S
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _kill_group(target: Target, killed: set[int]) -> list[Process]:
    """One round with a control group. Returns what was still alive."""
    assert target.group is not None
    if target.group.populated:
        killed |= target.group.processes()
        target.group.kill()
    processes = all_processes()
    left = [processes[pid] for pid in target.group.processes() if pid in processes and not processes[pid].dead]
    # The second look: a process with the rights for it may have left its group.
    strays = marked(processes.values(), target.mark)
    for stray in strays:
        if kill_exact(stray):
            killed.add(stray.pid)
    # `populated` has the last word: it changes only when the last thread is gone.
    return left or strays or ([] if not target.group.populated else _unnamed())


def _kill_tree(target: Target, own_children: set[int], killed: set[int]) -> list[Process]:
    """One round without control groups. Returns what was still alive."""
    processes = all_processes()
    own = os.getpid()
    found = {process.pid: process for process in marked(processes.values(), target.mark)}
    if target.runner is not None:
        found.update((process.pid, process) for process in descendants(processes, target.runner))
        runner = processes.get(target.runner)
        found.pop(target.runner, None)
        if not found and runner is not None and not runner.dead:
            # Last, since it is the subreaper: orphans of the others come to it and are found below it.
            found[runner.pid] = runner
    else:
        # A dead runner leaves its orphans to the agent, the next subreaper above; whoever is a child of the agent but
        # was not started by it is such an orphan.
        for process in processes.values():
            if process.parent == own and process.pid not in own_children:
                orphans = [process, *descendants(processes, process.pid)]
                found.update((orphan.pid, orphan) for orphan in orphans if not orphan.dead)
        reap_orphans(own_children)
    for process in found.values():
        if kill_exact(process):
            killed.add(process.pid)
    return list(found.values())


def _proof(target: Target, killed: set[int]) -> StopProof:
    if target.group is not None:
        evidence = f"cgroup {target.group.path} is empty and no process carries the mark {target.mark}"
        kind = ProofKind.CGROUP_EMPTY
    else:
        evidence = f"no process carries the mark {target.mark} and the runner has no descendant left"
        kind = ProofKind.PROC_SCAN_EMPTY
    return StopProof(kind=kind, at=time.time(), evidence=evidence, killed=len(killed))


def _unnamed() -> list[Process]:
    return [Process(pid=0, parent=0, state="?", start_time=0)]


def _words(left: list[Process]) -> str:
    shown = ", ".join(f"{process.pid} (state {process.state})" for process in left[:20])
    return (
        f"{len(left)} processes do not die yet: {shown}. "
        f"A process in state D waits for its device; reboot the node if it stays."
    )
