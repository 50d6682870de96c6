"""A whole real system in a temporary home: `everstep demo` as its own process, started, found and stopped.

Used by the headless demo and by the slow tests.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from demo_check.rest import Rest, RestError
from demo_check.witness import parent_of, processes_of

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
START_LIMIT_S = 120.0
STOP_LIMIT_S = 45.0
ORDER_LIMIT_S = 30.0
LEISURELY = ("--step-time", "0.2", "--batch", "4")
"""More arguments for the job: fewer and lighter steps, for systems that others run beside."""
EVERSTEP = (sys.executable, "-m", "everstep.cli.main")
BLIND_EVERSTEP = (sys.executable, str(Path(__file__).with_name("blind_demo.py")))
"""The same with agents whose stop proof overlooks the children of ranks: a planted bug."""


class HarnessError(Exception):
    """The system did not do in time what the drill needs; the text says what, and where its logs are."""


class RunningSystem:
    """`everstep demo` on free ports. As a context manager it stops everything and keeps or removes its home."""

    def __init__(
        self,
        *,
        script: Sequence[str] = (),
        program: Sequence[str] = EVERSTEP,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
        keep: bool = False,
    ) -> None:
        self.home = home or Path(tempfile.mkdtemp(prefix="everstep-"))
        self._keep = keep
        self._log = self.home / "demo.log"
        argv = [*program, "demo", "--home", str(self.home), "--port", "0", *options, "--", *script]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                env=_clean_environment() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> RunningSystem:
        try:
            self.wait_until(self._is_up, what="everstep demo to say that it is running", limit_s=START_LIMIT_S)
            self.rest = Rest(self.home / "client.json")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._keep:
            print(f"Kept {self.home}", file=sys.stderr)
        else:
            shutil.rmtree(self.home, ignore_errors=True)

    @property
    def agents(self) -> Path:
        return self.home / "agents"

    def stop(self) -> None:
        """Ctrl-C, and what does not heed it is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def leftovers(self) -> dict[int, str]:
        """Processes of this system that are still there: pid -> command."""
        return processes_of(self.home)

    def kill_leftovers(self) -> None:
        for pid in self.leftovers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def service_pid(self, words: str) -> int | None:
        """The service whose command line holds the words: a direct child of `everstep demo`."""
        for pid, command in self.leftovers().items():
            if words in command and parent_of(pid) == self.process.pid:
                return pid
        return None

    def wait_until(self, done: Callable[[], T | None], *, what: str, limit_s: float, every_s: float = 0.2) -> T:
        """The first true answer of `done`. Raises `HarnessError` when time is up or the system ended."""
        limit = time.monotonic() + limit_s
        while not (answer := done()):
            if self.process.poll() is not None:
                raise HarnessError(f"everstep demo ended with code {self.process.returncode}:\n{self.log_end()}")
            if time.monotonic() > limit:
                raise HarnessError(f"Waited {limit_s:.0f} s in vain for {what}; logs are in {self.home / 'logs'}.")
            time.sleep(every_s)
        return answer

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])

    def _is_up(self) -> bool:
        return "Everstep is running." in self._log.read_text(errors="replace")


def steady_job(system: RunningSystem, *, least_saved_step: int = 1, steps_beyond: int = 1) -> dict[str, Any]:
    """The running job, once it has saved in its newest generation and gone on a little. Steps are not in a hurry."""

    def trained() -> dict[str, Any] | None:
        try:
            for known in system.rest.items("jobs?state=running"):
                job: dict[str, Any] = system.rest.get(f"jobs/{known['id']}")
                saved = job["last_checkpoint"]
                is_fresh = saved and saved["generation"] == job["generation"] and saved["step"] >= least_saved_step
                if is_fresh and not job["open_incident"] and job["last_step"] >= saved["step"] + steps_beyond:
                    return job
        except (OSError, RestError):
            return None
        return None

    return system.wait_until(trained, what="a job that trains and has saved", limit_s=90)


def order_drill(system: RunningSystem, body: dict[str, Any], *, key: str) -> dict[str, Any]:
    """Order a drill as soon as the system is steady enough for it: a busy machine's agents are late now and then."""
    refused: list[RestError] = []

    def ordered() -> dict[str, Any] | None:
        try:
            drill: dict[str, Any] = system.rest.post("drills", body, key=key)
        except RestError as error:
            if error.status != 409:
                raise
            refused.append(error)
            return None
        return drill

    try:
        return system.wait_until(ordered, what="a drill that no guard refuses", limit_s=ORDER_LIMIT_S, every_s=1.0)
    except HarnessError as error:
        raise refused[-1] if refused else error from error


def unix_seconds(moment: str) -> float:
    """RFC 3339 as the API writes it, as Unix seconds."""
    return datetime.fromisoformat(moment).timestamp()


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel sends SIGINT to this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


def _clean_environment() -> dict[str, str]:
    """Ours without what would point the system to another home, broker or database."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "DJANGO_"))}
    ours.pop("REDIS_URL", None)
    return ours
