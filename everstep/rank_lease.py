"""A rank's own part in its node's lease: it looks for itself before it reports or publishes anything.

`Run` makes one where the runner gives it a lease. The runner kills its ranks when the lease has run out, but a node
that was frozen may wake a rank before its runner, and that rank could finish the step in hand from what it already has.
"""

from __future__ import annotations

import os
from typing import NoReturn

from everstep.elastic.lease import EXIT_CODE, NS, Expired, Held, Phase, Progress, judge, longest_limit_ns
from everstep.elastic.lease_files import LeaseFiles, LeasePaths, boottime_ns
from everstep.errors import LeaseUnusable
from everstep.rank_log import RankLog


class PublishingLease:
    """The lease as a node's writer sees it: it only looks, just before a manifest is put in place."""

    def __init__(self, paths: LeasePaths) -> None:
        """Opens its files for as long as the process lives. Raises `LeaseUnusable`."""
        self._files = LeaseFiles(paths)

    def check(self, *, held_ns: int) -> None:
        """Ends the process at once, with exit code 76, if the lease has run out.

        held_ns: when the rank that asks for the checkpoint last found it held.
        """
        ranks = self._files.ranks()
        mine = Held(sign_ns=held_ns, limit_ns=longest_limit_ns(ranks, self._files.terms))
        verdict = _judge(self._files, mine)
        if isinstance(verdict, Expired):
            os.write(2, f"{verdict}. This checkpoint is not published.\n".encode())
            os._exit(EXIT_CODE)


class RankLease:
    """The lease as one rank keeps it. Each call ends the process at once, with exit code 76, if it has run out."""

    def __init__(self, paths: LeasePaths, *, local_rank: int, log: RankLog) -> None:
        """The rank has begun its setup. Raises `LeaseUnusable`."""
        self._files = LeaseFiles(paths)
        self._local_rank = local_rank
        self._log = log
        if local_rank >= len(self._files.ranks()):
            raise LeaseUnusable(f"{paths.progress} has no slot for local rank {local_rank}.")
        kept = self._files.kept()
        self._sign_ns = kept.sign_ns if kept else boottime_ns()
        # Terms only rise: the shortest of now stays a safe measure.
        self._shortest_ns = int(NS * min(self._files.terms))
        self.advance(Phase.SETUP, steps=0)

    def check(self) -> int:
        """Before something is said or done that a rank of a generation that is over must not say or do.

        Returns the moment at which the lease held.
        """
        now_ns = boottime_ns()
        if now_ns - self._sign_ns <= self._shortest_ns:
            return now_ns  # no limit can have passed; the whole look costs ten times as much
        return self._look()

    def advance(self, phase: Phase, *, steps: int) -> None:
        """Check, then renew: a step of this generation is finished, its `steps`-th, or a phase begins."""
        # The moment of the check, not of the writing: a freeze in between then shows.
        self._sign_ns = self.check()
        self._files.write_progress(self._local_rank, Progress(self._sign_ns, phase, steps))

    def _look(self) -> int:
        mine = Held(sign_ns=self._sign_ns, limit_ns=longest_limit_ns(self._files.ranks(), self._files.terms))
        verdict = _judge(self._files, mine)
        if isinstance(verdict, Expired):
            self._end(verdict)
        return verdict

    def _end(self, expired: Expired) -> NoReturn:
        """The last line of the output is what the runner reports."""
        silent_s, limit_s = expired.silent_ns / NS, expired.limit_ns / NS
        self._log.write("lease_expired", silent_s=silent_s, limit_s=limit_s, phase=expired.phase)
        os.write(2, f"{expired}. This rank ends itself, since another generation may be running.\n".encode())
        os._exit(EXIT_CODE)


def _judge(files: LeaseFiles, mine: Held) -> int | Expired:
    """The moment at which the lease held, from what the files say and what the caller knows itself."""
    contact_ns, ranks = files.contact_ns(), files.ranks()
    # What the runner has seen meanwhile counts as if this process had: in a step it cannot look.
    held = max(mine, files.kept() or mine)
    now_ns = boottime_ns()
    verdict = judge(held, contact_ns=contact_ns, ranks=ranks, terms=files.terms, now_ns=now_ns)
    if isinstance(verdict, Expired) and files.take_raised_terms():
        verdict = judge(held, contact_ns=contact_ns, ranks=ranks, terms=files.terms, now_ns=now_ns)
    return verdict if isinstance(verdict, Expired) else now_ns
