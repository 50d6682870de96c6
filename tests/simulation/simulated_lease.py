"""The lease of one generation's ranks on one node, as its runner keeps it: judged for real, on the node's own clock."""

from __future__ import annotations

from virtual_time import START

from everstep.elastic.lease import NS, Expired, Held, Phase, Progress, Terms, judge, longest_limit_ns
from recovery.domain.plan import LeaseLimits

LOOK_INTERVAL_S = 0.25
"""A runner looks this often."""
KILL_WITHIN_S = 1.2
"""On a busy node."""
_BOOTED_BEFORE_S = 1000.0


class NodeLease:
    """Looks are made at each sign and when the limit has passed: the others that a runner makes change nothing."""

    def __init__(self, *, now: float, drift: float, limits: LeaseLimits, contact_at: float) -> None:
        """drift: by how much the node's clock runs fast; 0.01 is one hundredth. contact_at: 0 where none is known.

        A runner that is started long after the last contact must find its lease run out.
        """
        self._drift = drift
        self._terms = Terms(
            setup_s=limits.setup_s,
            compile_s=limits.compile_s,
            step_s=limits.step_s,
            save_s=limits.save_s,
            evaluation_s=limits.evaluation_s,
        )
        self._contact_ns = self._ns(contact_at)
        self._mine = Progress(at_ns=0, phase=Phase.SETUP, steps=0)
        first_ns = self._contact_ns if contact_at else self._ns(now)
        self._held = Held(sign_ns=first_ns, limit_ns=longest_limit_ns([self._mine], self._terms))
        self.expired = False

    def contact(self, at: float) -> None:
        """The agent writes down when it sent a heartbeat that was answered with a grant."""
        self._contact_ns = max(self._contact_ns, self._ns(at))

    def progress(self, now: float, *, phase: Phase, steps: int) -> None:
        """A step is finished, or a phase begins."""
        self._mine = Progress(at_ns=self._ns(now), phase=phase, steps=steps)

    def holds(self, now: float) -> bool:
        """A look, by the runner or by a rank. Once expired, it stays so."""
        if not self.expired:
            verdict = judge(
                self._held, contact_ns=self._contact_ns, ranks=[self._mine], terms=self._terms, now_ns=self._ns(now)
            )
            if isinstance(verdict, Expired):
                self.expired = True
            else:
                self._held = verdict
        return not self.expired

    def looks_again_in_s(self, now: float) -> float:
        """Seconds until the limit has passed, if no sign comes before."""
        return max(0.0, (self._held.sign_ns + self._held.limit_ns - self._ns(now)) / NS / (1 + self._drift))

    def _ns(self, at: float) -> int:
        return int(((at - START) * (1 + self._drift) + _BOOTED_BEFORE_S) * NS)
