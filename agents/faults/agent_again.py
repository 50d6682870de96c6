"""Sees to it that a node whose agent was killed has one again: waits for whoever supervises it, else starts it.

For the keeper; stdlib only.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

AGENT_LOCK = "agent.lock"
"""Held by the agent that uses a state directory, from its start to its end."""

SUPERVISOR_LIMIT_S = 5.0
"""A supervisor that has not started an agent by then is taken for absent."""
_START_LIMIT_S = 15.0
_LOOK_EVERY_S = 0.1


def lock_holder(locks: str, inode: int) -> int | None:
    """Return who holds a flock on a file, from the text of /proc/locks (proc(5)).

    Asked of the kernel and not by trying: an agent that starts in that moment must not find its directory taken.
    """
    for line in locks.splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].rsplit(":", 1)[-1] == str(inode):
            return int(words[4])
    return None


def present_agent(state_directory: Path) -> int | None:
    """Process id of the agent that uses a state directory; None if there is none."""
    try:
        inode = (state_directory / AGENT_LOCK).stat().st_ino
    except FileNotFoundError:
        return None
    return lock_holder(Path("/proc/locks").read_text(), inode)


def ensure_agent(state_directory: Path, argv: Sequence[str]) -> str:
    """Wait for an agent, starting one if nobody else does. Returns who did it, as a sentence. Raises `OSError`."""
    pid = _await_agent(state_directory, within_s=SUPERVISOR_LIMIT_S)
    if pid is not None:
        return f"The agent is back as process {pid}."
    started = subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_with_usual_signals
    )
    pid = _await_agent(state_directory, within_s=_START_LIMIT_S, unless_ended=started)
    if pid == started.pid:
        return f"Nobody else started the agent: the keeper did, as process {pid}."
    if pid is not None:
        return f"The agent is back as process {pid}."
    return "The agent could not be started again: see its log, and start it by hand."


def _await_agent(
    state_directory: Path, *, within_s: float, unless_ended: subprocess.Popen[bytes] | None = None
) -> int | None:
    limit = time.monotonic() + within_s
    while (pid := present_agent(state_directory)) is None:
        ended = unless_ended is not None and unless_ended.poll() is not None
        if ended or time.monotonic() > limit:
            return None
        time.sleep(_LOOK_EVERY_S)
    return pid


def _with_usual_signals() -> None:
    """The keeper waits for SIGTERM with the signal blocked; the agent must not inherit that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
