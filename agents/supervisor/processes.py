"""The runner's process: started in a session and control group of its own, watched by a pidfd, found again later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agents.errors import StartFailed
from agents.policy import Account
from agents.supervisor.process_table import MARK_VARIABLE, limit_mark, open_exact, read_process

_STARTER = Path(__file__).with_name("starter.py")


class RunnerProcess:
    """One runner, started by this agent or by an earlier life of it."""

    def __init__(self, *, pid: int, start_time: int, descriptor: int, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self.start_time = start_time
        self.ended = asyncio.Event()
        self._descriptor = descriptor
        self._child = child
        asyncio.get_running_loop().add_reader(descriptor, self._woken)

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        account: Account,
        directory: Path,
        environment: dict[str, str],
        cgroup: Path | None,
        log: Path,
    ) -> RunnerProcess:
        """Start the runner. It outlives this agent. Raises `StartFailed`."""
        order = {
            "cgroup": None if cgroup is None else str(cgroup),
            "limit_mark": limit_mark(environment[MARK_VARIABLE]),
            "uid": account.uid,
            "gid": account.gid,
            "groups": list(account.groups),
            "directory": str(directory),
            "environment": environment,
            "argv": list(argv),
        }
        # A file and not a pipe: nothing to wait for, whatever its size, and no secret on a command line.
        with tempfile.TemporaryFile() as stdin, log.open("ab") as output:
            stdin.write(json.dumps(order).encode())
            stdin.seek(0)
            try:
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_STARTER)],
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    env={MARK_VARIABLE: environment[MARK_VARIABLE]},
                    start_new_session=True,
                )
            except OSError as err:
                raise StartFailed(f"The runner could not be started: {err}. Look at this node's limits.") from err
        try:
            process = read_process(child.pid)
            assert process is not None  # a child stays at least a zombie until it is waited for
            return cls(pid=child.pid, start_time=process.start_time, descriptor=os.pidfd_open(child.pid), child=child)
        except BaseException as err:
            # It is nothing but the starter yet. Left alive, it would run on while its run counts as not started.
            child.kill()
            child.wait()
            raise StartFailed(f"The runner could not be watched: {err}. Look at this node's limits.") from err

    @classmethod
    def adopt(cls, *, pid: int, start_time: int | None) -> RunnerProcess | None:
        """Watch a runner of an earlier life; None if it is gone."""
        descriptor = open_exact(pid, start_time)
        if descriptor is None:
            return None
        process = read_process(pid)
        if process is None or process.dead:
            os.close(descriptor)
            return None
        return cls(pid=pid, start_time=process.start_time, descriptor=descriptor, child=None)

    @property
    def exit_words(self) -> str:
        """How the runner ended, as far as this agent can know."""
        code = self._child.returncode if self._child is not None else None
        if code is None:
            return "The runner ended; how is not known, since an earlier life of the agent had started it."
        return f"The runner was killed by signal {-code}." if code < 0 else f"The runner ended with code {code}."

    def release(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _woken(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ChildProcessError):
                self._child.wait()  # the pidfd says that it is dead: this reaps and returns at once
        self.release()
        self.ended.set()
