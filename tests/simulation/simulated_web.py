"""The web process of the simulation: it hears agents, writes down whom it heard, and grants leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from virtual_time import VirtualTime

from recovery.domain.silence import OBSERVER_GONE_AFTER_S, ObserverView

BEAT_S = 1.0
GRANT_S = 3.0
GRANT_SLACK_S = 1.0
LAG_COUNTS_FOR_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Caller:
    """One agent whose heartbeats arrive."""

    node: str
    sent_at: float
    """The newest of them."""


@dataclass
class SimulatedWeb:
    """`callers` are the agents that can be heard right now; `record` takes (node, heard_at, observer) into the rows;
    `grant` tells a node's agent that its heartbeat of that moment was answered with a grant.
    """

    time: VirtualTime
    callers: Callable[[], Iterable[Caller]]
    record: Callable[[str, float, str], None]
    grant: Callable[[str, float], None]
    up: bool = True
    database_up: bool = True
    stalled_until: float = 0.0
    rows: dict[str, ObserverView] = field(default_factory=dict)
    """Every observer that there was, as its row stands."""
    name: str = ""
    since: float = 0.0
    _count: int = 0
    _taken_at: float = 0.0
    """When the newest record was taken that succeeded."""
    _held_under: dict[str, float] = field(default_factory=dict)
    """Per node: when it was last recorded under the present name; a lease is granted only for a while after."""
    _lags: list[tuple[float, float]] = field(default_factory=list)

    def start(self) -> None:
        self.up = True
        self._begin_anew()
        self._taken_at = self.time.now

    def stop(self) -> None:
        self.up = False

    def stall(self, seconds: float) -> None:
        """The loop stands still: nothing is heard, nothing written."""
        self.stalled_until = max(self.stalled_until, self.time.now + seconds)
        self.time.after(seconds, lambda: self._note_lag(seconds))

    @property
    def listens(self) -> bool:
        return self.up and self.time.now >= self.stalled_until

    def beat(self) -> None:
        """Once a second."""
        now = self.time.now
        if not self.listens:
            return
        if now - self._taken_at > OBSERVER_GONE_AFTER_S:
            self._begin_anew()
        heard = [caller for caller in self.callers() if caller.sent_at >= self.since]
        if self.database_up:
            lags = [lag_s for at, lag_s in self._lags if now - at <= LAG_COUNTS_FOR_S]
            self.rows[self.name] = ObserverView(
                name=self.name, since=self.since, beat_at=now, lag_s=max(lags, default=0.0)
            )
            self._taken_at = now
            for caller in heard:
                self.record(caller.node, caller.sent_at, self.name)
                self._held_under[caller.node] = now
        for caller in heard:
            if now - self._held_under.get(caller.node, -1e9) <= GRANT_S:
                self.grant(caller.node, caller.sent_at)

    def _begin_anew(self) -> None:
        self._count += 1
        self.name, self.since = f"web-{self._count}", self.time.now
        self._held_under.clear()

    def _note_lag(self, seconds: float) -> None:
        self._lags.append((self.time.now, seconds))
        del self._lags[:-10]


def contact_bounds(
    rows: dict[str, ObserverView], *, observer: str, last_heard_at: float | None, now: float
) -> tuple[float | None, float]:
    """The last moment that can have renewed a lease of a node, and the moment up to which that is known."""
    own = rows.get(observer)
    if own is None or last_heard_at is None:
        return None, now
    if now - own.beat_at <= OBSERVER_GONE_AFTER_S:
        return last_heard_at, own.beat_at
    return max(last_heard_at, own.beat_at + GRANT_S + GRANT_SLACK_S), now
