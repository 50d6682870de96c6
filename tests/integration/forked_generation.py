"""A generation whose runners and ranks are forked from this process, which must run torch on one thread.

It costs a tenth of a second instead of ten, since torch is loaded already. The launch file, the journal, the watch, the
lease, the ending and a death signal on each rank are the runner's own; torch elastic and exec are left out.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import everstep
from everstep.elastic import rank_entry, runner, worker_group
from everstep.elastic.launch import Launch
from everstep.elastic.worker_group import OnStart, Outcome
from tests.integration.launches import Generation


def warm_up() -> None:
    """Load once, before any fork, what each rank would load: torch imports much of itself at first use."""
    torch.set_num_threads(1)
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
    everstep.Run  # noqa: B018 - imported when it is first named
    everstep.replayable_loader  # noqa: B018


class Forked(subprocess.Popen[bytes]):
    """A child of this process that was forked and not started, with what is needed of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode = None

    def __del__(self) -> None:
        """Nothing to close."""

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            time.sleep(0.002)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class ForkedGeneration(Generation):
    """One whose command is a Python program and a script's path. Call `warm_up` first."""

    def start_runner(self, directory: Path) -> subprocess.Popen[bytes]:
        pid = os.fork()
        if pid:
            return Forked(pid)
        code = 1
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(rank_entry.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            worker_group.run_worker_group = _fork_ranks
            code = runner.main(["--directory", str(directory)])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _fork_ranks(launch: Launch, directory: Path, *, on_start: OnStart) -> Outcome:
    """In place of torch elastic: start the ranks, and return when all have ended or one has failed."""
    ranks: dict[int, Forked] = {}
    for local in range(launch.ranks_per_node):
        rank = launch.first_rank + local
        pid = os.fork()
        if not pid:
            _become_rank(launch, rank=rank, local=local)
        ranks[rank] = Forked(pid)
        on_start(rank, ranks[rank])
    while True:
        codes = {rank: process.poll() for rank, process in ranks.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            return Outcome(reason="rank_failed", detail=str(failed))
        if all(code == 0 for code in codes.values()):
            return Outcome(reason="")
        time.sleep(worker_group.MONITOR_INTERVAL_S)


def _become_rank(launch: Launch, *, rank: int, local: int) -> None:
    """What torch elastic and `rank_entry` do, and then the script. Does not return."""
    os.setsid()
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(launch.world_size),
        "GROUP_WORLD_SIZE": str(launch.node_count),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
    }
    output = f"{launch.log_directory}/rank-{rank}.log"
    _become_script(launch.argv, environment, directory=launch.working_directory, output=output)


def fork_script(
    argv: Sequence[str], environment: Mapping[str, str], *, directory: Path, output: str = os.devnull
) -> Forked:
    """A script in a forked process, without a runner; `argv` is a Python program, the script and its arguments."""
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        for name in [name for name in os.environ if name.startswith("EVERSTEP_")]:
            del os.environ[name]
        environment = {**environment, "EVERSTEP_RUNNER_PID": str(parent)}
        _become_script(argv, environment, directory=str(directory), output=output)
    return Forked(pid)


def _become_script(argv: Sequence[str], environment: Mapping[str, str], *, directory: str, output: str) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        tempfile.tempdir = None  # what TMPDIR says now
        os.environ |= environment
        rank_entry.die_with_parent()
        rank_entry.release_what_was_inherited()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as an interpreter that starts does
        logging.getLogger().handlers.clear()  # they write to descriptors that are others' by now
        rank_entry.redirect_output(output)
        # What a test runner has put in their places writes to descriptors that are others' by now, too.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.chdir(directory)
        sys.argv = list(argv[1:])
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)
