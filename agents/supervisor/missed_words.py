"""What a rank said while nobody listened: the end of its own log, read back to what is known.

A run asks for it when a rank or the run has ended, and when an agent finds a run that an earlier life of it began.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from agents.sensors.rank_reports import RankReport, StepSaid, parse_log_line
from agents.supervisor.events import LineTail, size_of

_FIRST_LOOK_BYTES = 1 << 20
"""Enough for what a socket's queue refused; a long absence takes several looks, each twice as far back."""
FARTHEST_BYTES = 64 << 20
"""No log is read farther back: days of steps, and what the agent can hold."""


class Missed(NamedTuple):
    """Reports, oldest first. `whole`: nothing was left out between what is known and the first of them."""

    reports: list[RankReport]
    whole: bool


def missed_words(
    path: Path, *, job: str, generation: int, rank: int, known_step: int, farthest_bytes: int = FARTHEST_BYTES
) -> Missed:
    """Whatever the rank's log says after the step that is known; nothing where there is no log."""
    look_bytes = min(_FIRST_LOOK_BYTES, farthest_bytes)
    while True:
        reports, reached = _read(path, look_bytes, job=job, generation=generation, rank=rank, known_step=known_step)
        if reached or look_bytes >= size_of(path):
            return Missed(reports, True)
        if look_bytes >= farthest_bytes:
            return Missed(reports, False)
        look_bytes = min(2 * look_bytes, farthest_bytes)


def _read(
    path: Path, look_bytes: int, *, job: str, generation: int, rank: int, known_step: int
) -> tuple[list[RankReport], bool]:
    found: list[RankReport] = []
    for line in reversed(LineTail.of_end(path, look_bytes).lines()):
        said = parse_log_line(line, job=job)
        if said is None or said.rank != rank or said.generation != generation:
            continue
        if isinstance(said, StepSaid) and said.step <= known_step:
            # A rank's reports come in order: what it said before this step is known too.
            return found[::-1], True
        found.append(said)
    return found[::-1], False
