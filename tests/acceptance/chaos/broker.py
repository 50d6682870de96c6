"""A Valkey of the test's own, so that it can be flushed, stopped and started while a system uses it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from demo_check.system import die_with_parent

from everstep.cli.broker import find_program, ping


class Broker:
    """Stopped means gone: no process, no socket. What it held comes back with it, as with an append-only file."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-broker-"))
        self._socket = self.folder / "b.sock"
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

    def start(self) -> None:
        argv = [str(find_program()), "--port", "0", "--unixsocket", str(self._socket), "--dir", str(self.folder)]
        argv += ["--save", "", "--appendonly", "yes", "--logfile", str(self.folder / "log")]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        limit = time.monotonic() + 10
        while words := ping(self._socket):
            assert time.monotonic() < limit, words
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._socket.unlink(missing_ok=True)
            self._process = None

    def flush(self) -> None:
        """FLUSHALL: queues, streams and locks are gone."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(str(self._socket))
            connection.sendall(b"FLUSHALL SYNC\r\n")
            answer = connection.recv(64)
        assert answer == b"+OK\r\n", answer
