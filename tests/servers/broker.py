"""A broker of the tests' own, so that it can be flushed, filled, stopped and started while something uses it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from everstep.cli.broker import find_program

_START_LIMIT_S = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def embedded() -> Path:
    """The Valkey that `everstep up` starts."""
    return find_program()


def debian_redis() -> Path:
    """The `redis-server` of Debian's package, which production may run."""
    found = shutil.which("redis-server")
    assert found is not None, "redis-server is missing: on Debian, apt install redis-server."
    return Path(found)


class Broker:
    """Stopped means gone: no process, no socket. What it held comes back with it, as with an append-only file."""

    def __init__(self, program: Path | None = None, *, socket: Path | None = None) -> None:
        """`socket`: where it listens, a short path; by default in a folder of its own."""
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-broker-"))
        self._program = program or embedded()
        self._socket = socket or self.folder / "b.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5, decode_responses=True)

    def start(self) -> None:
        argv = [str(self._program), "--port", "0", "--unixsocket", str(self._socket), "--dir", str(self.folder)]
        argv += ["--save", "", "--appendonly", "yes", "--maxmemory-policy", "noeviction"]
        argv += ["--logfile", str(self.folder / "log")]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        limit = time.monotonic() + _START_LIMIT_S
        while not self._answers():
            assert time.monotonic() < limit and self._process.poll() is None, f"{self._program} did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._socket.unlink(missing_ok=True)
            self._process = None

    def flush(self) -> None:
        """FLUSHALL: queues, streams and locks are gone."""
        with self.client as client:
            assert client.flushall()

    def fill(self) -> None:
        """Refuse every write from now on for want of memory, until `empty`."""
        with self.client as client:
            client.config_set("maxmemory", 1)

    def empty(self) -> None:
        """Take writes again."""
        with self.client as client:
            client.config_set("maxmemory", 0)

    def _answers(self) -> bool:
        try:
            with self.client as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def _die_with_parent() -> None:
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
