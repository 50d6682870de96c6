"""Saves that are asked for: by an operator or a notice of maintenance through the agent, or by SIGTERM.

`Run` asks `due` after each step and saves when it says so; then `leave_if_told` ends a run that SIGTERM has reached.
All ranks must save at the same step though the wish reaches them at different times, so about once a second, at a step
that all know beforehand, one small reduction tells all what any of them has heard. In between, `due` is a comparison.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from everstep.ranks import Team

SAVE_REQUEST = "save-request"
"""In the run's directory, written by the agent: a number that rises with each wish."""
LOOK_EVERY_S = 1.0
MOST_STEPS = 1000
"""Between two looks, however fast steps seem."""
TERM_LIMIT_S = 25.0
"""From SIGTERM to the end, saved or not: torch elastic and Kubernetes kill after 30 s."""
TERM_EXIT_CODE = 128 + signal.SIGTERM


class SaveRequests:
    """One rank's part in saves that are asked for."""

    def __init__(
        self, run_directory: Path | None, *, look_every_s: float = LOOK_EVERY_S, term_limit_s: float = TERM_LIMIT_S
    ) -> None:
        self._path = None if run_directory is None else run_directory / SAVE_REQUEST
        self._look_every_s = look_every_s
        self._term_limit_s = term_limit_s
        self._team: Team | None = None
        self._served = self._asked()
        """What stood there before this run began was asked of an earlier one."""
        self._next_look = 0
        self._looked = (0, 0.0)
        self._told_to_end = False
        self._all_end = False

    @property
    def all_end(self) -> bool:
        """Every rank ends after the save that is due: it has to be on disk before."""
        return self._all_end

    def begin(self, team: Team, *, step: int) -> None:
        """Training goes on after `step`. Call on every rank, in the main thread."""
        self._team = team
        self._looked = (step, time.monotonic())
        self._next_look = step + 1
        self._listen_to_term()

    def due(self, step: int) -> bool:
        """Whether all ranks save now, after `step`, since one of them was asked to. The same answer on every rank."""
        if step < self._next_look or self._team is None:
            return False
        served, asked, ends, gap = self._team.greatest(
            self._served, self._asked(), int(self._told_to_end), self._gap(step) if self._team.leads else 0
        )
        self._next_look = step + gap
        self._looked = (step, time.monotonic())
        self._served = max(served, asked)
        self._all_end = bool(ends)
        return asked > served or self._all_end

    def leave_if_told(self) -> None:
        """End this rank, once its state is saved, if SIGTERM has reached any rank. Raises `SystemExit`."""
        if self._all_end:
            raise SystemExit(TERM_EXIT_CODE)

    def _asked(self) -> int:
        """The number that the agent has written; 0 if there is none."""
        if self._path is None:
            return 0
        try:
            return max(0, min(int(self._path.read_bytes()), 2**62))
        except (OSError, ValueError):
            return 0

    def _gap(self, step: int) -> int:
        """Steps until the next look, by the pace since the last one."""
        before, at = self._looked
        elapsed_s = max(time.monotonic() - at, 1e-6)
        return max(1, min(round(self._look_every_s * max(1, step - before) / elapsed_s), MOST_STEPS))

    # --- SIGTERM --------------------------------------------------------------------------------------------------

    def _listen_to_term(self) -> None:
        """Take SIGTERM as a wish, unless the script has a handler of its own.

        The main thread may be deep in a collective that never ends, where Python runs no handler: the wake-up
        descriptor tells a thread, which ends the process at the limit.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        if (taken := signal.set_wakeup_fd(write, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)
            os.close(read)
            os.close(write)
            return
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._await_term, args=(read,), name="everstep-term", daemon=True).start()

    def _await_term(self, read: int) -> None:
        while signal.SIGTERM not in os.read(read, 64):
            continue
        self._told_to_end = True
        time.sleep(self._term_limit_s)
        with contextlib.suppress(OSError):
            os.write(2, f"No save came within {self._term_limit_s:.0f} s of SIGTERM: this rank ends.\n".encode())
        os._exit(TERM_EXIT_CODE)
