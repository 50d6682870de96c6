"""Makes a failing schedule short: drops what is not needed while the same rule is still violated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from schedules import Schedule

Fails = Callable[[Schedule], bool]
"""Whether a schedule still violates the rule in question."""


def shorten(schedule: Schedule, fails: Fails) -> Schedule:
    """A schedule that fails as the given one does, and of which no single part can be left out."""
    while True:
        smaller = next((candidate for candidate in _simpler(schedule) if fails(candidate)), None)
        if smaller is None:
            return schedule
        schedule = smaller


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Candidates, the boldest first: no noise, half of the events, one job, one event or one spare node fewer."""
    if schedule.noise:
        yield replace(schedule, noise=0.0)
    if schedule.operator_retries:
        yield replace(schedule, operator_retries=False)
    events = schedule.events
    size = len(events) // 2
    while size > 1:
        for start in range(0, len(events), size):
            yield replace(schedule, events=events[:start] + events[start + size :])
        size //= 2
    if len(schedule.jobs) > 1:
        for job in schedule.jobs:
            rest = tuple(other for other in schedule.jobs if other is not job)
            yield replace(schedule, jobs=rest, events=tuple(event for event in events if event.job != job.id))
    for index in range(len(events)):
        yield replace(schedule, events=events[:index] + events[index + 1 :])
    for node in schedule.nodes:
        yield replace(schedule, nodes=tuple(other for other in schedule.nodes if other is not node))
