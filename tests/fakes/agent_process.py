"""One agent as a process beside a fake server, with all that a test wants to do to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agents.protocol.messages import Assignment, AssignmentPhase, LaunchSpec, LeaseTerms
from tests.fakes.agent_server import JOIN_TOKEN, FakeAgentServer

PROJECT = Path(__file__).resolve().parents[2]


class AgentProcess:
    """Starts, kills and starts again one agent over one state directory."""

    def __init__(self, server: FakeAgentServer, directory: Path, *, name: str = "gpu-01", more: tuple[str, ...] = ()):
        self.server = server
        self.state = directory / "state"
        self.log = directory / "agent.log"
        self.job_directory = directory / "job"
        self.checkpoints = directory / "checkpoints"
        self.policy = directory / "policy.toml"
        self.name = name
        self.more = more
        self._process: subprocess.Popen[bytes] | None = None
        self.job_directory.mkdir()
        self.policy.write_text("allow_root = true\n")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the agent and wait until the server has greeted it."""
        hellos = len(self.server.hellos)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(PROJECT / "tests/fakes/agent_with_stub_runner.py"),
                    *("--server", self.server.url, "--name", self.name, "--state", str(self.state)),
                    *("--simulated-gpus", "1", "--policy", str(self.policy), "--port-range", "24000-24999"),
                    *self.more,
                ],
                env={**os.environ, "EVERSTEP_JOIN_TOKEN": JOIN_TOKEN, "PYTHONPATH": str(PROJECT)},
                stderr=log,
                stdout=log,
            )
        await self.server.until(lambda: len(self.server.hellos) > hellos)

    async def kill(self) -> None:
        """SIGKILL: no farewell."""
        await self._end(signal.SIGKILL)

    async def end(self) -> int:
        """SIGTERM, and wait. Returns the exit code."""
        return await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        deadline = time.monotonic() + 20
        while self._process.poll() is None:
            assert time.monotonic() < deadline, "the agent does not end"
            await asyncio.sleep(0.01)
        return self._process.returncode

    def clean_up(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        quiet_looks = 0
        while quiet_looks < 3:  # one look may fall between the fork of a rank and its exec, when it has no mark yet
            left = self.marked(mark="")  # of every job
            quiet_looks = 0 if left else quiet_looks + 1
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def marked(self, mark: str = "job-1:") -> list[int]:
        """Living processes of this agent's runs."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "environ").read_bytes()
                if f"EVERSTEP_MARK={mark}".encode() in words and os.fsencode(self.checkpoints) in words:
                    found.append(int(entry.name))
        return found

    def assignment(
        self,
        phase: AssignmentPhase,
        *,
        generation: int = 1,
        plan_id: str | None = None,
        port: int | None = None,
        ranks: int = 1,
        node_rank: int = 0,
        parent: tuple[int, int] | None = None,
        argv: list[str] | None = None,
        user: str = "",
        lease: LeaseTerms | None = None,
        **environment: str,
    ) -> Assignment:
        """One generation of `job-1`; environment variables steer the stub runner's ranks."""
        launch = LaunchSpec(
            argv=argv or [sys.executable, "train.py"],
            working_directory=str(self.job_directory),
            environment=environment,
            user=user,
            run_id=f"run-{generation}",
            node_rank=node_rank,
            node_count=1 + node_rank,
            ranks_per_node=ranks,
            first_rank=node_rank * ranks,
            world_size=ranks * (1 + node_rank),
            master_address="127.0.0.1",
            master_port=port,
            checkpoint_directory=str(self.checkpoints),
            parent_generation=parent[0] if parent else None,
            parent_step=parent[1] if parent else None,
        )
        return Assignment(
            job="job-1",
            generation=generation,
            plan_id=plan_id or f"plan-{generation}",
            phase=phase,
            launch=None if phase is AssignmentPhase.STOP else launch,
            lease=lease,
        )
