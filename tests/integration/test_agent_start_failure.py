"""A runner that was started but cannot be watched is killed at once: its run counts as not started."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agents.errors import StartFailed
from agents.policy import Account
from agents.supervisor.process_table import MARK_VARIABLE, all_processes, marked
from agents.supervisor.processes import RunnerProcess


async def test_runner_that_cannot_be_watched_does_not_live_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(pid: int) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    mark = f"job:1:{tmp_path.name}-{time.time_ns()}"
    with pytest.raises(StartFailed, match="Too many open files"):
        RunnerProcess.start(
            ["/bin/sleep", "60"],
            account=Account(name="me", uid=os.geteuid(), gid=os.getegid(), home="/"),
            directory=tmp_path,
            environment={MARK_VARIABLE: mark},
            cgroup=None,
            log=tmp_path / "runner.log",
        )
    assert marked(all_processes().values(), mark) == []
