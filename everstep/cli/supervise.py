"""A small process supervisor: start, check, restart with back-off, stop in order. Called by `everstep up` and `demo`.

Children get a death signal from the kernel, so that they go even when this process is killed with SIGKILL. The signal
is tied to the *thread* that started the child: everything here runs in the main thread, driven by `Supervisor.pump`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from everstep.cli.hold import Hold, read_hold
from everstep.errors import EverstepError

LOG_LIMIT_BYTES = 20_000_000
FIRST_BACK_OFF_S = 0.25
LONGEST_BACK_OFF_S = 10.0
HOLD_EVERY_S = 0.2
"""How often a drill's wish to hold services down is looked for."""
STEADY_AFTER_S = 30.0
"""A service that ran this long starts again without delay of earlier failures."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCHED = (*_STOP_SIGNALS, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class SupervisorError(EverstepError):
    """A child could not be started or did not become ready; the text says which, and where its log is."""


class StopWanted(Exception):
    """A stop signal arrived: SIGINT, SIGTERM or SIGHUP."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """One child process. `check` returns an empty string once it is ready, else what is missing."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    working_directory: Path
    check: Callable[[], str] = lambda: ""
    ready_limit_s: float = 60.0
    stop_limit_s: float = 8.0
    longest_back_off_s: float = LONGEST_BACK_OFF_S
    stage: int = 0
    """Services are stopped from the highest stage to the lowest; those of one stage together."""


@dataclass
class _Child:
    service: Service
    process: subprocess.Popen[bytes]
    started_at: float
    was_ready: bool = False
    back_off_s: float = FIRST_BACK_OFF_S
    restart_at: float | None = None

    @property
    def ended(self) -> bool:
        return _has_ended(self.process)


@dataclass
class Supervisor:
    """Keeps services running until `stop`. Use it as a context manager: leaving it stops all, whatever happened."""

    logs: Path
    say: Callable[[str], None]
    hold_file: Path | None = None
    """Where a drill may ask for services to be held down; see `hold`. One of an earlier start is over."""
    _hold: Hold | None = None
    _children: list[_Child] = field(default_factory=list)
    _old_mask: set[signal.Signals] = field(default_factory=set)

    def __enter__(self) -> Supervisor:
        self.logs.mkdir(parents=True, exist_ok=True)
        if self.hold_file is not None and self.hold_file.exists():
            self.say("A drill of an earlier start held services down: that is over.")
            self.hold_file.unlink()
        self._old_mask = {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)}
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            # A second Ctrl-C during the stop is not worth a traceback: it is taken out of the queue here.
            while signal.sigtimedwait(_WATCHED, 0) is not None:
                pass
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)

    def start(self, *services: Service) -> None:
        """Start services together and wait until all are ready. Raises `SupervisorError` or `StopWanted`."""
        fresh = [_Child(service, self._spawn(service), time.monotonic()) for service in services]
        self._children += fresh
        for child in fresh:
            self._await_ready(child)

    def run_once(self, service: Service) -> str:
        """Run a command to its end and return what it printed. Raises `SupervisorError` with its last lines."""
        path = self.logs / f"{service.name}.log"
        path.unlink(missing_ok=True)
        process = self._spawn(service)
        limit = time.monotonic() + service.ready_limit_s
        try:
            while not _has_ended(process):
                if time.monotonic() > limit:
                    raise SupervisorError(f"{service.name} took over {service.ready_limit_s:.0f} s; see {path}.")
                self.pump(0.1)
        finally:
            _kill_group(process)
        text = path.read_text(errors="replace")
        if process.returncode:
            raise SupervisorError(f"{service.name} ended with code {process.returncode}:\n{tail(path)}")
        return text

    def pump(self, timeout_s: float) -> None:
        """Wait up to `timeout_s`, restarting what died. Raises `StopWanted` on a stop signal."""
        info = signal.sigtimedwait(_WATCHED, timeout_s if self.hold_file is None else min(timeout_s, HOLD_EVERY_S))
        if info is not None and info.si_signo in _STOP_SIGNALS:
            raise StopWanted(signal.Signals(info.si_signo).name)
        if self.hold_file is not None:
            self._look_at_hold(self.hold_file)
        for child in self._children:
            if child.was_ready:
                self._look_after(child)

    def pid(self, name: str) -> int:
        """Process id of a running service, by name. Raises `KeyError`."""
        for child in self._children:
            if child.service.name == name:
                return child.process.pid
        raise KeyError(name)

    def stop(self) -> None:
        """Stop all, highest stage first: SIGTERM, then SIGKILL for whole process groups after the limit."""
        for stage in sorted({child.service.stage for child in self._children}, reverse=True):
            leaving = [child for child in self._children if child.service.stage == stage]
            for child in leaving:
                child.process.terminate()
            asked_at = time.monotonic()
            for child in leaving:
                while not child.ended and time.monotonic() - asked_at < child.service.stop_limit_s:
                    signal.sigtimedwait((signal.SIGCHLD,), 0.1)
                if not child.ended:
                    self.say(f"{child.service.name} did not stop in {child.service.stop_limit_s:.0f} s and is killed.")
                _kill_group(child.process)
        self._children.clear()

    def _spawn(self, service: Service) -> subprocess.Popen[bytes]:
        with _open_log(self.logs / f"{service.name}.log") as log:
            try:
                return subprocess.Popen(
                    list(service.argv),
                    cwd=service.working_directory,
                    env=dict(service.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A session of its own: Ctrl-C reaches us alone, and we stop the others in order.
                    start_new_session=True,
                    preexec_fn=_die_with_parent(os.getpid()),
                )
            except OSError as error:
                raise SupervisorError(f"Could not start {service.name} ({service.argv[0]}): {error}.") from error

    def _await_ready(self, child: _Child) -> None:
        service, path = child.service, self.logs / f"{child.service.name}.log"
        limit = time.monotonic() + service.ready_limit_s
        while missing := service.check():
            if child.ended:
                _kill_group(child.process)
                raise SupervisorError(
                    f"{service.name} ended ({_ending(child.process.returncode)}) before it was ready; "
                    f"the end of {path}:\n{tail(path)}"
                )
            if time.monotonic() > limit:
                raise SupervisorError(
                    f"{service.name} was not ready within {service.ready_limit_s:.0f} s ({missing}); see {path}."
                )
            self.pump(0.05)
        child.was_ready = True

    def _look_at_hold(self, path: Path) -> None:
        """Begin or end a hold, as the file says; without the file it is over."""
        asked = read_hold(path, now=time.time(), monotonic=time.monotonic(), say=self.say)
        if self._hold is None and asked is not None:
            self._hold = asked
            self.say(f"Drill {asked.drill} holds {', '.join(asked.roles)} down for {asked.left_s:.0f} s.")
            for child in self._children:
                if child.service.name in asked.roles and child.was_ready:
                    _kill_group(child.process)
                    child.restart_at, child.back_off_s = asked.ends_at, FIRST_BACK_OFF_S
        elif self._hold is not None and (asked is None or time.monotonic() >= self._hold.ends_at):
            self.say(f"Drill {self._hold.drill} is over: {', '.join(self._hold.roles)} start again.")
            for child in self._children:
                if child.service.name in self._hold.roles and child.restart_at is not None:
                    child.restart_at = time.monotonic()
            path.unlink(missing_ok=True)
            self._hold = None

    def _look_after(self, child: _Child) -> None:
        now = time.monotonic()
        if child.restart_at is None:
            if not child.ended:
                return
            _kill_group(child.process)
            if now - child.started_at > STEADY_AFTER_S:
                child.back_off_s = FIRST_BACK_OFF_S
            self.say(
                f"{child.service.name} ended ({_ending(child.process.returncode)}) and starts again "
                f"in {child.back_off_s:.2g} s; see {self.logs / child.service.name}.log."
            )
            child.restart_at = now + child.back_off_s
            child.back_off_s = min(child.back_off_s * 2, child.service.longest_back_off_s)
        elif now >= child.restart_at:
            child.process, child.started_at, child.restart_at = self._spawn(child.service), now, None


def tail(path: Path, *, lines: int = 12) -> str:
    """The last lines of a log, for an error message."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _open_log(path: Path) -> IO[bytes]:
    if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"


def _die_with_parent(parent: int) -> Callable[[], None]:
    """What a child does between fork and exec: ask for SIGTERM at our death, and take our signal mask off."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # we died before the call above took effect
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return prepare


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child is over, without reaping it: until `_kill_group` its number stays ours, group and all."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what a child left in its process group, for example pool processes of a killed worker; then reap it."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
