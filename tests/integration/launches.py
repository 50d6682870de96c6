"""Real runners on this machine, started as an agent would: launch files, events, a socket; nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], Any], *, limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {limit_s} s: {condition}")


def lines_of(path: Path) -> list[dict[str, Any]]:
    whole = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may be under way
    return [json.loads(line) for line in whole]


class Generation:
    """One generation of a job on `nodes` nodes of this machine, one rank each unless said otherwise.

    terms: of the lease that its runners keep; None for none.
    """

    runner_stderr: int | None = None
    """Where runners say what torch elastic thinks of each death; None: to this process's own."""

    def __init__(
        self,
        root: Path,
        argv: list[str],
        *,
        number: int = 1,
        nodes: int = 2,
        parent: tuple[int, int] | None = None,
        port: int | None = None,
        environment: dict[str, str] | None = None,
        ranks_per_node: int = 1,
        terms: dict[str, float] | None = None,
        **changes: Any,
    ) -> None:
        self.ranks_per_node = ranks_per_node
        self.terms = terms
        self.directories = [root / f"node-{node}" / str(number) for node in range(nodes)]
        self.mark = f"job-{uuid.uuid4()}:{number}:plan-{number}"
        """Its own for each test: an agent elsewhere on this machine kills what carries its marks."""
        self.runners: list[subprocess.Popen[bytes]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        socket_path = root / f"s{number}"
        self.socket.bind(str(socket_path))
        for node, directory in enumerate(self.directories):
            directory.mkdir(parents=True)
            launch = {
                "protocol": 2,
                "job": "job-1",
                "generation": number,
                "plan_id": f"plan-{number}",
                "argv": argv,
                "working_directory": str(root),
                "environment": {"PATH": os.environ["PATH"], **(environment or {})},
                "run_id": f"run-{number}",
                "node_rank": node,
                "node_count": nodes,
                "ranks_per_node": ranks_per_node,
                "first_rank": node * ranks_per_node,
                "world_size": nodes * ranks_per_node,
                "master_address": "127.0.0.1",
                "master_port": port if port is not None else 0,
                "checkpoint_directory": str(root / "checkpoints"),
                "parent_generation": parent[0] if parent else None,
                "parent_step": parent[1] if parent else None,
                "socket": str(socket_path),
                "mark": self.mark,
                "stop_limit_s": 5,
                "log_directory": str(directory / "logs"),
                "cgroup": None,
                **({"contact": None, "progress": None, "lease": None} if terms is None else self._lease(node)),
                **changes,
            }
            (directory / "launch.json").write_text(json.dumps(launch))

    def _lease(self, node: int) -> dict[str, str]:
        paths = {name: str(self.directories[node] / name) for name in ("contact", "progress")}
        Path(paths["progress"]).write_bytes(bytes(16 * self.ranks_per_node))
        self.renew(node)
        self.change_terms(node, self.terms or {})
        return {**paths, "lease": str(self.directories[node] / "lease.json")}

    def renew(self, node: int) -> None:
        """What an agent does when the server has answered its heartbeat."""
        fd = os.open(self.directories[node] / "contact", os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(fd, time.clock_gettime_ns(time.CLOCK_BOOTTIME).to_bytes(8, "little"), 0)
        os.close(fd)

    def change_terms(self, node: int, terms: dict[str, float]) -> None:
        aside = self.directories[node] / "lease.json.tmp"
        aside.write_text(json.dumps(terms))
        aside.rename(self.directories[node] / "lease.json")

    def slot(self, rank: int) -> tuple[int, int, int]:
        """(boottime ns of its last progress, phase, steps of this generation) of a rank."""
        node, local = divmod(rank, self.ranks_per_node)
        content = (self.directories[node] / "progress").read_bytes()
        at_ns, phase, steps = struct.unpack_from("<QII", content, 16 * local)
        return at_ns, phase, steps

    def __enter__(self) -> Generation:
        port = free_port()
        for directory in self.directories:
            path = directory / "launch.json"
            launch = json.loads(path.read_text())
            path.write_text(json.dumps({**launch, "master_port": launch["master_port"] or port}))
            self.runners.append(self.start_runner(directory))
        return self

    def start_runner(self, directory: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "everstep.elastic.runner", "--directory", str(directory)],
            start_new_session=True,
            env={**os.environ, "AGENT_SECRET": "not for ranks"},
            stdin=subprocess.DEVNULL,
            stderr=self.runner_stderr,
        )

    def __exit__(self, *_: object) -> None:
        for runner in self.runners:
            runner.kill()  # also ends one that is stopped
            runner.wait()
        for node in range(len(self.directories)):
            for event in self.events(node, "rank_started"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(event["pid"], signal.SIGKILL)
        self.socket.close()

    def every_event(self, node: int) -> list[dict[str, Any]]:
        return lines_of(self.directories[node] / "events.jsonl")

    def events(self, node: int, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.every_event(node) if line["kind"] == kind]

    def wait_event(self, node: int, kind: str, *, limit_s: float = 60.0) -> dict[str, Any]:
        event: dict[str, Any] = wait_until(lambda: self.events(node, kind), limit_s=limit_s)[0]
        return event

    def log(self, rank: int) -> list[dict[str, Any]]:
        return lines_of(self.directories[rank // self.ranks_per_node] / "logs" / f"rank-{rank}.jsonl")

    def output(self, rank: int) -> str:
        path = self.directories[rank // self.ranks_per_node] / "logs" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def datagrams(self) -> list[dict[str, Any]]:
        """What an agent would have received so far. The kernel's queue is short: read it while ranks run."""
        found = []
        while select.select([self.socket], [], [], 0)[0]:
            found.append(json.loads(self.socket.recv(65536)))
        return found


def has_ended(pid: int, *, limit_s: float) -> bool:
    """Whether a process is gone, or a zombie, within the limit."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], limit_s)[0])
    finally:
        os.close(fd)
