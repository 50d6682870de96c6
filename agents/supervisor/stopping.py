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
from agents.supervisor.unkillable import StuckThread, stuck_threads

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
_TELL_AFTER_S = 5.0
UNKILLABLE_AFTER_S = 5.0
"""What is stuck in the kernel for this long with SIGKILL pending counts as stuck for good."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to look for."""

    mark: str
    group: ControlGroup | None
    runner: int | None
    """The runner's process id while it lives."""


async def prove_stopped(
    target: Callable[[], Target],
    *,
    own_children: set[int],
    stuck: Callable[[str], None],
    unkillable: Callable[[StopProof], None],
) -> StopProof:
    """Kill until nothing is left, however long that takes, and return the proof.

    `target` is asked again before each look. `own_children`, read anew each time, are processes that the agent itself
    needs. `stuck` hears every few seconds what will not die (a process in a hung system call does not, until the call
    returns). `unkillable` gets, once, the lesser proof that what is left cannot come back to life; the looks go on.
    """
    killed: set[int] = set()
    pause_s, tell_at = _FIRST_PAUSE_S, time.monotonic() + _TELL_AFTER_S
    empty_looks = 0
    hopeless_since: float | None = None
    told_unkillable = False
    while True:
        looked_at = target()
        stuck_now: list[StuckThread] | None = None
        try:
            left = _kill_group(looked_at, killed) if looked_at.group else _kill_tree(looked_at, own_children, killed)
        except OSError as err:
            # A look that failed proves nothing, and to give up would leave the server waiting for ever.
            words = f"It could not be looked for what is left ({err}); trying again."
            empty_looks = 0
        else:
            if left:
                words, empty_looks = _words(left), 0
                stuck_now = _all_stuck(left)
            else:
                words, empty_looks = "Nothing was left at the last look.", empty_looks + 1
                if empty_looks >= _looks_needed(looked_at):
                    return _proof(looked_at, killed)
        hopeless_since = None if stuck_now is None else hopeless_since or time.monotonic()
        if stuck_now and hopeless_since and not told_unkillable:
            stuck_s = time.monotonic() - hopeless_since
            if stuck_s >= UNKILLABLE_AFTER_S:
                unkillable(_unkillable_proof(stuck_now, killed, stuck_s=stuck_s))
                told_unkillable = True
        if time.monotonic() >= tell_at:
            if not told_unkillable:
                stuck(words)
            tell_at = time.monotonic() + _TELL_AFTER_S
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _looks_needed(target: Target) -> int:
    """A control group's word is one moment's. A walk through /proc takes a while, in which a process may fork behind
    its back and end: it counts when it finds nothing twice."""
    return 1 if target.group is not None else 2


def _kill_group(target: Target, killed: set[int]) -> list[Process]:
    """One round with a control group. Returns what was still alive."""
    assert target.group is not None
    if target.group.populated:
        killed |= target.group.processes()
        target.group.kill()
    processes = all_processes()
    left = {pid: processes[pid] for pid in target.group.processes() if pid in processes and not processes[pid].dead}
    # The second look: a process with the rights for it may have left its group.
    for stray in marked(processes.values(), target.mark):
        if stray.pid not in left:
            left[stray.pid] = stray
            if kill_exact(stray):
                killed.add(stray.pid)
    # `populated` has the last word: it changes only when the last thread is gone.
    return list(left.values()) or ([] if not target.group.populated else _unnamed())


def _kill_tree(target: Target, own_children: set[int], killed: set[int]) -> list[Process]:
    """One round without control groups. Returns what was still alive."""
    processes = all_processes()
    own = os.getpid()
    found = {process.pid: process for process in marked(processes.values(), target.mark)}
    runner = None
    if target.runner is not None:
        found.update((process.pid, process) for process in descendants(processes, target.runner))
        runner = processes.get(target.runner)
        found.pop(target.runner, None)
    else:
        # A dead runner leaves its orphans to the agent, the next subreaper above; whoever is a child of the agent but
        # was not started by it is such an orphan.
        for process in processes.values():
            if process.parent == own and process.pid not in own_children:
                orphans = [process, *descendants(processes, process.pid)]
                found.update((orphan.pid, orphan) for orphan in orphans if not orphan.dead)
        reap_orphans(own_children)
    if runner is not None and not runner.dead:
        # Last, since it is the subreaper: orphans of the others come to it and are found below it. What is stuck for
        # good makes no more of them.
        if not found or _all_stuck(list(found.values())) is not None:
            _kill(runner, killed)
        for process in found.values():
            _kill(process, killed)
        return [*found.values(), runner]
    for process in found.values():
        _kill(process, killed)
    return list(found.values())


def _kill(process: Process, killed: set[int]) -> None:
    if kill_exact(process):
        killed.add(process.pid)


def _all_stuck(left: list[Process]) -> list[StuckThread] | None:
    """The threads of all that is left if none can return to user mode; None if one can."""
    found: list[StuckThread] = []
    for process in left:
        threads = stuck_threads(process.pid)
        if threads is None:
            return None
        found.extend(threads)
    return found


def _unkillable_proof(threads: list[StuckThread], killed: set[int], *, stuck_s: float) -> StopProof:
    shown = ", ".join(str(thread) for thread in threads[:30])
    more = f" and {len(threads) - 30} more" if len(threads) > 30 else ""
    evidence = (
        f"{len(threads)} threads are left (process/thread {shown}{more}), none of which can return to user mode: "
        f"SIGKILL waits for them, seen so for {stuck_s:.1f} s. Reboot this node before anything runs on it"
    )
    return StopProof(kind=ProofKind.UNKILLABLE, at=time.time(), evidence=evidence[:4000], killed=len(killed))


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
