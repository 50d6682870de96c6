"""`everstep up`: the whole control plane on this machine, on loopback, with nothing to install or start beside it.

Embedded defaults: SQLite, and Valkey on a Unix socket. It starts the server's rooms as processes and imports none.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from everstep.cli.broker import broker_service, external_broker, socket_path
from everstep.cli.hold import HOLD_FILE, MARKER_FILE
from everstep.cli.supervise import Service, StopWanted, Supervisor, SupervisorError

HOST = "127.0.0.1"
DEFAULT_PORT = 8400
LEAST_FREE_BYTES = 300_000_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "up", help="start the control plane: web, worker, beat and an embedded broker", description=__doc__
    )
    add_place_arguments(parser)
    parser.set_defaults(run=run)


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """`--port` and `--home`, which `up` and `demo` share."""
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port on {HOST}; 0 takes a free one (default: {DEFAULT_PORT})"
    )
    parser.add_argument(
        "--home",
        type=Path,
        default=Path(os.environ.get("EVERSTEP_HOME", ".everstep")),
        help="folder for database, broker, logs (default: EVERSTEP_HOME, else .everstep)",
    )


def run(args: argparse.Namespace) -> int:
    """Entry point of `everstep up`; returns when a stop signal came."""

    def work(supervisor: Supervisor, plane: ControlPlane) -> None:
        login = bring_up(supervisor, plane, bootstrap=())
        say(f"\nEverstep is up at {plane.address}/\n{login}\nLogs: {plane.home / 'logs'}   Stop: Ctrl-C")
        while True:
            supervisor.pump(1.0)

    return supervised(args, work)


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    """Where one control plane lives. `environment` is what each of its processes gets."""

    home: Path
    port: int
    environment: Mapping[str, str]
    broker_socket: Path | None
    """None if somebody else runs the broker."""

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"


def supervised(args: argparse.Namespace, work: Callable[[Supervisor, ControlPlane], None]) -> int:
    """Check the place, hold it for ourselves, do the work, and stop everything however it ends."""
    home = _checked_home(args.home)
    with (
        _lock_home(home),
        _marked_as_supervised(home),
        Supervisor(logs=home / "logs", say=say, hold_file=home / HOLD_FILE) as supervisor,
    ):
        try:
            work(supervisor, _plane(home, _checked_port(args.port)))
        except StopWanted:
            say("\nStopping the control plane ...")
    say("Stopped.")
    return 0


def bring_up(supervisor: Supervisor, plane: ControlPlane, *, bootstrap: Sequence[str]) -> str:
    """Start the control plane; returns what `manage.py bootstrap` printed: the log-in, if there is one to tell."""
    if plane.broker_socket:
        say("Starting the broker ...")
        supervisor.start(broker_service(home=plane.home, path=plane.broker_socket, environment=plane.environment))
    say("Preparing the database ...")
    supervisor.run_once(_manage(plane, "migrate", "--no-input", limit_s=120))
    login = supervisor.run_once(_manage(plane, "bootstrap", "--server", plane.address, *bootstrap))
    say("Starting web, worker and beat ...")
    supervisor.start(_web(plane), _worker(plane), _beat(plane))
    return login.strip()


def say(text: str) -> None:
    print(text, flush=True)


def _checked_home(home: Path) -> Path:
    """The folder, made and absolute. Raises `SupervisorError` if it cannot hold what we write."""
    home = home.absolute()
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SupervisorError(f"Cannot make the folder {home}: {error}. Choose another one with --home.") from error
    if not os.access(home, os.W_OK):
        raise SupervisorError(f"The folder {home} cannot be written to. Choose another one with --home.")
    free = shutil.disk_usage(home).free
    if free < LEAST_FREE_BYTES:
        raise SupervisorError(
            f"No disk: {home} has {free / 1e6:.0f} MB free, at least {LEAST_FREE_BYTES / 1e6:.0f} MB are needed. "
            "Free some, or choose another folder with --home."
        )
    return home


def _lock_home(home: Path) -> TextIO:
    """Hold the folder for this process; the kernel gives it back when we die."""
    path = home / "run" / "supervisor.lock"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as busy:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise SupervisorError(
            f"Everstep already runs on {home} (process {owner}). Stop it first, or choose another folder with --home."
        ) from busy
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


@contextlib.contextmanager
def _marked_as_supervised(home: Path) -> Iterator[None]:
    """Say, as long as we run, that somebody is there who can hold services down for a drill."""
    marker = home / MARKER_FILE
    marker.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        marker.unlink(missing_ok=True)


def _checked_port(port: int) -> int:
    """The port, or a free one for 0. Raises `SupervisorError` if somebody listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise SupervisorError(
                f"Port {port} on {HOST} cannot be used ({error.strerror}): "
                "another program may listen there. Choose another one with --port."
            ) from error
        return int(probe.getsockname()[1])


def _plane(home: Path, port: int) -> ControlPlane:
    environment = {
        **os.environ,
        "EVERSTEP_HOME": str(home),
        "DJANGO_SETTINGS_MODULE": "dashboard.settings",
        "PYTHONUNBUFFERED": "1",
    }
    broker_url = external_broker(environment)
    broker_socket = None if broker_url else socket_path(home)
    environment["EVERSTEP_REDIS_URL"] = broker_url or f"unix://{broker_socket}"
    return ControlPlane(home=home, port=port, environment=environment, broker_socket=broker_socket)


def _manage(plane: ControlPlane, *arguments: str, limit_s: float = 60) -> Service:
    return Service(
        name=arguments[0],
        argv=[sys.executable, "-m", "django", *arguments],
        environment=plane.environment,
        working_directory=plane.home,
        ready_limit_s=limit_s,
    )


def _web(plane: ControlPlane) -> Service:
    argv = [sys.executable, "-m", "uvicorn", "dashboard.asgi:application", "--host", HOST, "--port", str(plane.port)]
    argv += ["--ws", "websockets-sansio", "--ws-per-message-deflate", "false", "--no-access-log"]
    argv += ["--timeout-graceful-shutdown", "2", "--lifespan", "on"]
    return Service(
        name="web",
        argv=argv,
        environment=plane.environment,
        working_directory=plane.home,
        check=lambda: _answers(f"{plane.address}/readyz"),
        stage=1,
    )


def _worker(plane: ControlPlane) -> Service:
    argv = [sys.executable, "-m", "celery", "-A", "dashboard.celery", "worker", "--pool", "prefork", "-c", "2"]
    argv += ["-Q", "recovery,default", "--loglevel", "INFO"]
    # Gossip, mingle and heartbeats are for talk among workers; alone they only cost start-up time.
    argv += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    return Service(name="worker", argv=argv, environment=plane.environment, working_directory=plane.home, stage=1)


def _beat(plane: ControlPlane) -> Service:
    argv = [sys.executable, "-m", "celery", "-A", "dashboard.celery", "beat", "--loglevel", "INFO"]
    argv += ["--schedule", str(plane.home / "run" / "beat-schedule"), "--pidfile", ""]
    return Service(name="beat", argv=argv, environment=plane.environment, working_directory=plane.home, stage=1)


def _answers(url: str) -> str:
    """An empty string if a GET answers 200, else what happened."""
    try:
        with urllib.request.urlopen(url, timeout=3):  # noqa: S310  (our own loopback address)
            return ""
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except OSError as error:
        return f"{url} does not answer: {error}"
