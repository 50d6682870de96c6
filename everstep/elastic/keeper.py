"""The runner's lease keeper: a thread that looks at contact and progress, and says when the lease has run out.

It belongs to the runner and not to the agent, since the agent may be what died. After a stop of the whole process its
next look is the first thing that it does, and it judges by the gap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set

from everstep.elastic.lease import Expired, Held, judge, longest_limit_ns
from everstep.elastic.lease_files import LeaseFiles, LeasePaths, boottime_ns
from everstep.errors import LeaseUnusable

LOOK_INTERVAL_S = 0.25


class LeaseKeeper:
    """Keeps the lease of `rank_count` ranks, by local rank.

    ended: the local ranks that have exited. on_expiry is called once, from the keeper's thread; the ranks are then to
    be killed at once.
    """

    def __init__(
        self,
        paths: LeasePaths,
        *,
        rank_count: int,
        ended: Callable[[], Set[int]],
        on_expiry: Callable[[Expired], None],
    ) -> None:
        """Raises `LeaseUnusable`."""
        self._files = LeaseFiles(paths)
        self._rank_count = rank_count
        self._ended = ended
        self._on_expiry = on_expiry
        if len(self._files.ranks()) < rank_count:
            raise LeaseUnusable(f"{paths.progress} has too few slots for {rank_count} ranks of 16 bytes each.")
        now_ns, contact_ns = boottime_ns(), self._files.contact_ns()
        self._held = Held(
            # Where no heartbeat has been answered yet, the runner's own start is the first sign.
            sign_ns=contact_ns if 0 < contact_ns <= now_ns else now_ns,
            limit_ns=longest_limit_ns(self._files.ranks()[:rank_count], self._files.terms),
        )

    def start(self) -> None:
        """Take the first look here, so that ranks find a judgement, and go on in a thread."""
        if self._look():
            threading.Thread(target=self._keep, name="lease-keeper", daemon=True).start()

    def _keep(self) -> None:
        while self._look():
            time.sleep(LOOK_INTERVAL_S)

    def _look(self) -> bool:
        """Whether the lease holds. The clock is read last: what was written meanwhile is not from the future."""
        self._files.take_raised_terms()
        ended = self._ended()
        ranks = [rank for local, rank in enumerate(self._files.ranks()[: self._rank_count]) if local not in ended]
        contact_ns = self._files.contact_ns()
        verdict = judge(self._held, contact_ns=contact_ns, ranks=ranks, terms=self._files.terms, now_ns=boottime_ns())
        if isinstance(verdict, Expired):
            self._on_expiry(verdict)
            return False
        self._held = verdict
        self._files.write_kept(verdict)
        return True
