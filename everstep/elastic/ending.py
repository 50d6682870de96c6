"""How a runner ends: once, for the first reason that there is, with every exit reported and the reason last.

Elastic's run, a signal and the lease may each end it, from threads of their own and at the same time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from everstep.elastic.journal import Journal
from everstep.elastic.watch import RankWatch

REPORT_LIMIT_S = 5.0
"""How long exits of killed ranks may take to be reported before the runner ends without them."""
TELL_LIMIT_S = 0.2
"""How long a kill waits for its reason to be written down first."""
FORCE_LIMIT_S = REPORT_LIMIT_S + 2.0
"""A disk that hangs must not keep the runner: ranks that are left die with it."""


class Ending:
    """The end of this process; whoever claims it first writes it."""

    def __init__(self, journal: Journal, watch: RankWatch) -> None:
        self._journal = journal
        self._watch = watch
        self._claim = threading.Lock()

    def come_to(self, *, reason: str, detail: str) -> None:
        """All ranks have ended by themselves, or elastic has given up. Called from the main thread."""
        if not self._claim.acquire(blocking=False):
            threading.Event().wait()  # another thread is ending this process
        self._watch.kill_all()
        self._watch.wait_until_reported(REPORT_LIMIT_S)
        self._journal.write("runner_ended", reason=reason, detail=detail)

    def force(self, *, reason: str, detail: str, exit_code: int, tell: Callable[[], None] | None = None) -> None:
        """Kill the ranks and end the process, whatever the main thread is doing. Returns only if it ends anyway.

        `tell` writes an event that belongs before the exits of the ranks; a disk that hangs does not delay the kill.
        """
        if not self._claim.acquire(blocking=False):
            return
        threading.Thread(target=_exit_later, args=(exit_code,), daemon=True).start()
        if tell is not None:
            telling = threading.Thread(target=tell, daemon=True)
            telling.start()
            telling.join(TELL_LIMIT_S)
        deadline = time.monotonic() + REPORT_LIMIT_S
        self._watch.kill_all()
        while not self._watch.wait_until_reported(0.1) and time.monotonic() < deadline:
            self._watch.kill_all()  # a rank may have been started after the first round
        self._journal.write("runner_ended", reason=reason, detail=detail)
        os._exit(exit_code)


def _exit_later(exit_code: int) -> None:
    time.sleep(FORCE_LIMIT_S)
    os._exit(exit_code)
