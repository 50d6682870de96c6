"""Watches ranks and the runner's own signals from a thread, so that neither waits for torch elastic.

Elastic looks at its workers every 50 ms and stops their siblings before it tells anyone; a rank's death must be
reported at once, and a TERM must be obeyed also while the main thread is blocked in a rendezvous.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from everstep.elastic.journal import Journal

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TAIL_BYTES = 4096


class RankWatch:
    """Reports exits of ranks as they happen, and calls `on_signal` when the runner is told to end, once it is started.

    Made in the main thread, which is where Python delivers signals; from then on none is lost.
    """

    def __init__(self, journal: Journal, *, log_directory: Path) -> None:
        self._journal = journal
        self._log_directory = log_directory
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, tuple[int, Popen[bytes]]] = {}
        self._exited: set[int] = set()
        self._lock = threading.Lock()
        self._all_gone = threading.Event()
        self._all_gone.set()
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        # The wake-up descriptor gets each signal's number even when elastic puts its own handlers in place of these.
        for number in ENDING_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def start(self, *, on_signal: Callable[[int], None]) -> None:
        """Begin to watch, in a thread."""
        threading.Thread(target=self._watch, args=(on_signal,), name="rank-watch", daemon=True).start()

    def add(self, rank: int, process: Popen[bytes]) -> None:
        """Watch a rank that was just started, and report its start."""
        self._journal.write("rank_started", rank=rank, pid=process.pid)
        with self._lock:
            self._processes[rank] = (os.pidfd_open(process.pid), process)
            self._all_gone.clear()
            self._selector.register(self._processes[rank][0], selectors.EVENT_READ, rank)

    def exited(self) -> frozenset[int]:
        """Ranks that were started and have ended."""
        with self._lock:
            return frozenset(self._exited)

    def kill_all(self) -> None:
        """SIGKILL each rank that is left, with the session that elastic gave it."""
        with self._lock:
            for _, process in self._processes.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    def wait_until_reported(self, limit_s: float) -> bool:
        """Whether every exit has been reported within `limit_s`."""
        return self._all_gone.wait(limit_s)

    def _watch(self, on_signal: Callable[[int], None]) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake_read:
                    _obey(os.read(self._wake_read, 64), on_signal)
                else:
                    self._report_exit(key.data)

    def _report_exit(self, rank: int) -> None:
        with self._lock:
            fd, process = self._processes.pop(rank)
            self._exited.add(rank)
            self._selector.unregister(fd)
        exit_code, killed_by = _exit_status(fd, process)
        os.close(fd)
        detail = _last_line(self._log_directory / f"rank-{rank}.log") if exit_code else ""
        self._journal.write(
            "rank_exited", rank=rank, pid=process.pid, exit_code=exit_code, signal=killed_by, detail=detail
        )
        with self._lock:
            if not self._processes:
                self._all_gone.set()


def _obey(numbers: bytes, on_signal: Callable[[int], None]) -> None:
    for number in numbers:
        if number in ENDING_SIGNALS:
            # On a thread of its own: the watch goes on reporting the exits that the handler causes and awaits.
            threading.Thread(target=on_signal, args=(number,), daemon=True).start()
            return


def _exit_status(fd: int, process: Popen[bytes]) -> tuple[int | None, int | None]:
    """(exit code, None) or (None, signal). Elastic may reap the rank first; then its Popen knows."""
    try:
        result = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        result = None
    if result is not None:
        return (result.si_status, None) if result.si_code == os.CLD_EXITED else (None, result.si_status)
    deadline = time.monotonic() + 1.0
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(0.005)
    code = process.returncode
    if code is None:
        return None, None
    return (code, None) if code >= 0 else (None, -code)


def _last_line(path: Path) -> str:
    """The last line that says something, of a failed rank's output; for a traceback, the error itself."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:1000] for line in reversed(lines) if line.strip()), "")
