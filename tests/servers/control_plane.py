"""A control plane of real processes, one by one in a test's hands: web, worker, broker and database."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.servers.broker import Broker
from tests.servers.database import SystemDatabase

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 60.0
T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ControlPlane:
    """Use it as a context manager: leaving it kills what runs. The broker and the database are the caller's."""

    def __init__(self, home: Path, broker: Broker, database: SystemDatabase, *, nodes: Iterable[str]) -> None:
        self.home = home
        self.broker = broker
        self.database = database
        self._port = _free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "DJANGO_"))}
        self._environment = ours | {
            "EVERSTEP_HOME": str(home),
            "EVERSTEP_REDIS_URL": broker.url,
            "EVERSTEP_DATABASE_URL": database.url,
            "DJANGO_SETTINGS_MODULE": "dashboard.settings",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        enrolled = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("enroll.py")), *nodes],
            env=self._environment,
            stdout=subprocess.PIPE,
            check=True,
            timeout=START_LIMIT_S,
        )
        told = json.loads(enrolled.stdout)
        self.credentials: dict[str, str] = told["credentials"]
        self._token = told["token"]

    def __enter__(self) -> ControlPlane:
        self.start("web", "worker")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self._processes)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def agents_url(self) -> str:
        return f"ws://127.0.0.1:{self._port}/ws/agent"

    def log(self, role: str) -> str:
        return (self.home / f"{role}.log").read_text(errors="replace")

    def start(self, *roles: str) -> None:
        """Start processes together; returns once the web process answers, if it is among them."""
        for role in roles:
            assert role not in self._processes
            with (self.home / f"{role}.log").open("ab") as log:
                self._processes[role] = subprocess.Popen(
                    self._argv(role),
                    cwd=self.home,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
        if "web" in roles:
            self.wait_until(self._answers, what="the web process to answer", limit_s=START_LIMIT_S)

    def kill(self, *roles: str) -> None:
        """SIGKILL for whole process groups, at once."""
        going = [self._processes.pop(role) for role in tuple(roles)]
        for process in going:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in going:
            process.wait()

    @contextlib.contextmanager
    def frozen(self, role: str) -> Any:
        """The process stands still."""
        group = self._processes[role].pid
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)

    # --- Over REST ------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        request = urllib.request.Request(
            f"{self.address}/api/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as err:
            raise AssertionError(f"{method} {path}: {err.code} {err.read().decode(errors='replace')}") from err

    def wait_until(
        self, look: Callable[[], T | None], *, what: str, limit_s: float, instead: Callable[[], object] = str
    ) -> T:
        """Until `look` returns something true; errors of a server that is not there yet are none.

        `instead` says how things stand if it never does.
        """
        limit, trouble = time.monotonic() + limit_s, ""
        while time.monotonic() < limit:
            try:
                if found := look():
                    return found
            except OSError as err:
                trouble = f" ({err})"
            time.sleep(0.1)
        raise AssertionError(f"Waited {limit_s:.0f} s for {what}{trouble}: {instead()}\n{self._tails()}")

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"{self.address}/healthz", timeout=5):
            return True

    def _tails(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.home.glob("*.log")
        )

    def _argv(self, role: str) -> Sequence[str]:
        if role == "web":
            argv = ["-m", "uvicorn", "dashboard.asgi:application", "--port", str(self._port), "--no-access-log"]
            return [sys.executable, *argv, "--ws", "websockets-sansio", "--ws-per-message-deflate", "false"]
        argv = [
            "-m",
            "celery",
            "-A",
            "dashboard.celery",
            "worker",
            "--pool",
            "prefork",
            "-c",
            "1",
            "--loglevel",
            "INFO",
        ]
        return [sys.executable, *argv, "-Q", "recovery,default", "--without-gossip", "--without-mingle"]


@contextlib.contextmanager
def home_folder() -> Any:
    """A folder with a short path, since sockets may lie in it."""
    home = Path(tempfile.mkdtemp(prefix="everstep-life-"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
