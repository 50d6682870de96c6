"""`make silence`: days of heartbeats in virtual time, judged by the real rule exactly as the server records them.

Messages are lost, agents, the web process and its database pause, connections break, and the web process restarts; in
between nodes really die. No node that lives may ever be called lost, dead ones must be found soon, and the breaker
must stay shut throughout.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from recovery.domain.breaker import BreakerState, ControlPlaneIncident, step_breaker
from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.silence import Contact, ObserverView, Silence, SilenceLimits, judge_silence

__all__ = ["SilenceLimits", "judge_silence", "percentile", "simulate"]

DAY_S = 86_400
LOSS = 0.01
PAUSE_S = 2.0
PAUSES_PER_DAY = 40
"""Of each agent, of the web process's loop, and of the database."""
BREAKS_PER_DAY = 20
"""Connections of each node that end; a new one is there within the first pauses of an agent that tries again."""
WEB_RESTARTS_PER_DAY = 4
RECONNECT_CAP_S = 30.0
"""An agent's longest pause between two tries."""
SILENCES_PER_NODE_DAY = 12
LAG_COUNTS_FOR_S = 10
LOOK_EVERY_S = 2
DETECT_P99_LIMIT_S = 15.0
_DEATH_S = (60.0, 600.0)
_QUIET_S = 900.0
"""Between two deaths of one node, so that each begins from contact."""


@dataclass
class Spans:
    """Spans of time that do not overlap, oldest first."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, begin: float, end: float) -> None:
        if not self.ends or begin > self.ends[-1]:
            self.begins.append(begin)
            self.ends.append(end)

    def end_around(self, at: float) -> float | None:
        """When the span ends that holds a moment; None if none does."""
        index = bisect_right(self.begins, at) - 1
        return self.ends[index] if index >= 0 and at < self.ends[index] else None


@dataclass
class SimulatedNode:
    """One node's truth, and its row as the server has it."""

    pauses: Spans
    breaks: Spans
    deaths: Spans
    phase_s: float
    reconnected_at: float = 0.0
    heard_at: float | None = None
    """In the memory of the web process."""
    heard_before: float | None = None
    """The word before it: one that comes just after a record is no part of that record."""
    row_heard_at: float | None = None
    row_observer: str = ""


@dataclass
class Tally:
    """What came of it."""

    heartbeats: int = 0
    looks: int = 0
    false_lost: int = 0
    found_after_s: list[float] = field(default_factory=list)
    missed: int = 0
    openings: int = 0
    """Times that the breaker opened; nodes die here one by one, so that it never should."""

    @property
    def detect_p99_s(self) -> float:
        return percentile(self.found_after_s, 0.99)

    @property
    def passed(self) -> bool:
        quiet = self.false_lost == 0 and self.openings == 0
        return quiet and self.missed == 0 and self.detect_p99_s <= DETECT_P99_LIMIT_S


@dataclass
class Breaker:
    """The breaker as the sweep looks at it; an operator re-arms it once all are back."""

    current: ControlPlaneIncident | None = None
    rearmed_at: float = 0.0
    openings: int = 0

    def look(self, views: list[NodeView], now: float) -> None:
        fleet = FleetSnapshot(nodes=tuple(views), breaker_open=self.current is not None, rearmed_at=self.rearmed_at)
        opened = self.current is None
        self.current = step_breaker(self.current, fleet, fresh_id="inc", now=now).incident
        self.openings += opened and self.current is not None
        if self.current is not None and self.current.state is BreakerState.CONTACT_RESTORED:
            self.rearmed_at = now
            self.current = None


def random_spans(rng: random.Random, *, length_s: float, count: float, shortest_s: float, longest_s: float) -> Spans:
    spans = Spans()
    for begin in sorted(rng.uniform(60.0, length_s) for _ in range(round(count))):
        spans.add(begin, begin + rng.uniform(shortest_s, longest_s))
    return spans


def random_deaths(rng: random.Random, *, length_s: float, count: float) -> Spans:
    spans, at = Spans(), rng.uniform(120.0, length_s / max(1.0, count))
    while at < length_s - _DEATH_S[1]:
        spans.add(at, at + rng.uniform(*_DEATH_S))
        at = spans.ends[-1] + _QUIET_S + rng.expovariate(count / length_s)
    return spans


def simulate(*, seed: int, nodes: int, days: float) -> Tally:
    """Run `nodes` for `days` and judge each of them every two seconds."""
    rng = random.Random(f"silence:{seed}")
    length_s = days * DAY_S
    pauses_of_one = {"length_s": length_s, "count": PAUSES_PER_DAY * days, "shortest_s": 0.2, "longest_s": PAUSE_S}
    fleet = [
        SimulatedNode(
            pauses=random_spans(rng, **pauses_of_one),
            breaks=random_spans(
                rng, length_s=length_s, count=BREAKS_PER_DAY * days, shortest_s=0.05, longest_s=PAUSE_S
            ),
            deaths=random_deaths(rng, length_s=length_s, count=SILENCES_PER_NODE_DAY * days),
            phase_s=rng.random(),
        )
        for _ in range(nodes)
    ]
    web = Web(
        loop=random_spans(rng, **pauses_of_one),
        database=random_spans(rng, **pauses_of_one),
        down=random_spans(rng, length_s=length_s, count=WEB_RESTARTS_PER_DAY * days, shortest_s=3.0, longest_s=30.0),
    )
    tally, breaker = Tally(), Breaker()
    found: dict[tuple[int, float], float] = {}
    for second in range(int(length_s)):
        web.begin_second(float(second), fleet, rng)
        for node in fleet:
            web.hear(node, second + node.phase_s, rng, tally)
        web.record(float(second) + 0.999, fleet)
        if second % LOOK_EVERY_S:
            continue
        now = second + 1.0
        views = []
        for index, node in enumerate(fleet):
            tally.looks += 1
            judged = judge_silence(
                last_heard_at=node.row_heard_at, observer=node.row_observer, observers=web.rows, now=now
            )
            views.append(_view(f"gpu-{index:02}", node, judged))
            if judged.contact is not Contact.LOST:
                continue
            dead_until = node.deaths.end_around(now)
            if dead_until is not None:
                found.setdefault((index, dead_until), now)
            elif node.deaths.end_around(now - RECONNECT_CAP_S) is None:  # not one that is just coming back
                tally.false_lost += 1
        breaker.look(views, now)
    tally.openings = breaker.openings
    for index, node in enumerate(fleet):
        for begin, end in zip(node.deaths.begins, node.deaths.ends, strict=True):
            if (index, end) in found:
                tally.found_after_s.append(found[index, end] - begin)
            else:
                tally.missed += 1
    return tally


def _view(name: str, node: SimulatedNode, judged: Silence) -> NodeView:
    return NodeView(
        name=name,
        address=name,
        health=NodeHealth.HEALTHY,
        slots=1,
        contact=judged.contact,
        last_heard_at=node.row_heard_at,
        silent_s=judged.silent_s,
    )


class Web:
    """The web process as an observer: what it hears, and what it writes down once a second."""

    def __init__(self, *, loop: Spans, database: Spans, down: Spans) -> None:
        self.rows: list[ObserverView] = []
        self._loop, self._database, self._down = loop, database, down
        self._lives = 0
        self._up = False
        self._since = 0.0
        self._lag: list[tuple[float, float]] = []

    def begin_second(self, at: float, fleet: list[SimulatedNode], rng: random.Random) -> None:
        up = self._down.end_around(at) is None
        if up and not self._up:
            self._lives += 1
            self._since, self._lag = at, []
            for node in fleet:
                node.heard_at = node.heard_before = None
                node.reconnected_at = at + rng.uniform(0.0, RECONNECT_CAP_S)
        self._up = up

    def hear(self, node: SimulatedNode, at: float, rng: random.Random, tally: Tally) -> None:
        if node.deaths.end_around(at) is not None:
            node.reconnected_at = node.deaths.end_around(at) or at
            return
        broken_until = node.breaks.end_around(at)
        if broken_until is not None:
            node.reconnected_at = max(node.reconnected_at, broken_until)
        paused = node.pauses.end_around(at) is not None
        if not self._up or at < node.reconnected_at or paused:
            return
        tally.heartbeats += 1
        if rng.random() < LOSS:
            return
        arrived = at + rng.uniform(0.001, 0.05)
        node.heard_before = node.heard_at
        node.heard_at = max(arrived, self._loop.end_around(arrived) or 0.0)

    def record(self, at: float, fleet: list[SimulatedNode]) -> None:
        """Write whom it heard with its own beat; late, if its loop or the database stood still, and then it says so."""
        if not self._up:
            return
        late_until = max(self._loop.end_around(at) or at, self._database.end_around(at) or at)
        if late_until > at:
            return  # the next one that gets through tells by how much it was late
        name = f"web-{self._lives}"
        stood_still_s = max(
            (end - max(begin, at - 1.0 - PAUSE_S)
             for spans in (self._loop, self._database)
             for begin, end in _just_ended(spans, at)),
            default=0.0,
        )  # fmt: skip
        self._lag = [(when, late_s) for when, late_s in self._lag if at - when <= LAG_COUNTS_FOR_S]
        self._lag.append((at, stood_still_s))
        lag_s = max(late_s for _, late_s in self._lag)
        others = [row for row in self.rows if row.name != name]
        self.rows = [*others[-3:], ObserverView(name=name, since=self._since, beat_at=at, lag_s=lag_s)]
        for node in fleet:
            heard = [word for word in (node.heard_before, node.heard_at) if word is not None and word <= at]
            if heard:
                node.row_heard_at, node.row_observer = heard[-1], name


def _just_ended(spans: Spans, at: float) -> list[tuple[float, float]]:
    index = bisect_right(spans.begins, at) - 1
    if index >= 0 and at - 1.0 - PAUSE_S <= spans.ends[index] <= at:
        return [(spans.begins[index], spans.ends[index])]
    return []


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--days", type=float, default=1.0)
    arguments = parser.parse_args()
    tally = simulate(seed=arguments.seed, nodes=arguments.nodes, days=arguments.days)
    line = {
        "node_days": arguments.nodes * arguments.days,
        "heartbeats": tally.heartbeats,
        "looks": tally.looks,
        "false_lost": tally.false_lost,
        "breaker_openings": tally.openings,
        "silences": len(tally.found_after_s) + tally.missed,
        "missed": tally.missed,
        "detect_p50_s": round(percentile(tally.found_after_s, 0.5), 2),
        "detect_p99_s": round(tally.detect_p99_s, 2),
        "detect_max_s": round(max(tally.found_after_s, default=0.0), 2),
        "seed": arguments.seed,
    }
    print(json.dumps(line))
    return 0 if tally.passed else 1


if __name__ == "__main__":
    sys.exit(main())
