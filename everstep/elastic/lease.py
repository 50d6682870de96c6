"""The lease of one node's ranks: how long they may go on without contact and without progress. Pure judgement.

The runner judges it for its ranks four times a second, and each rank judges it by the same function before it reports
or publishes anything. A lease is never renewed by asking: each *sign*, contact with the server or progress of a rank,
prolongs it, if it comes in time. A sign that comes too late proves that nobody was looking meanwhile (a frozen node, a
stopped runner), and that the server may have counted this node out: then it is over, whatever happens afterwards.

All moments are nanoseconds of CLOCK_BOOTTIME, which also counts while a machine is suspended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

EXIT_CODE = 76
"""Of a rank or runner that ended itself because its lease had run out."""

STEPS_OF_SETUP = 3
"""A rank that has finished fewer steps has the limit of its setup, since its pace is not known."""

NS = 1_000_000_000

SLACK_NS = NS // 2
"""How much later than the limit a sign may seem to come: between two looks only the last of several is seen. A quarter
of the margin that the server adds to the limit before it counts a node out."""


class Phase(IntEnum):
    """What a rank is doing, as the number that stands in its slot of the progress file."""

    SETUP = 0
    COMPILE = 1
    STEP = 2
    SAVE = 3
    EVALUATION = 4

    @property
    def word(self) -> str:
        """The phase's name on the wire."""
        return self.name.lower()


class Terms(NamedTuple):
    """The longest silence in each phase, in seconds; indexed by `Phase`. The defaults are the wire's."""

    setup_s: float = 600.0
    compile_s: float = 1800.0
    step_s: float = 15.0
    save_s: float = 30.0
    evaluation_s: float = 30.0

    @classmethod
    def parse(cls, text: bytes) -> Terms:
        """From the content of lease.json. A field that is not there has its default. Raises `ValueError`."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"lease terms are a JSON {type(content).__name__}, not an object")
        terms = cls(**{name: float(content[name]) for name in cls._fields if name in content})
        if not all(math.isfinite(limit_s) and limit_s > 0 for limit_s in terms):
            raise ValueError(f"lease terms must be positive numbers of seconds, not {terms}")
        return terms

    def raised_to(self, other: Terms) -> Terms:
        """Terms only rise: the server counts on no less than what it has once granted."""
        return Terms(*map(max, self, other))


class Progress(NamedTuple):
    """One rank's slot: when it last finished a step or began a phase, which phase, and steps of this generation."""

    at_ns: int
    phase: int
    steps: int


class Held(NamedTuple):
    """The lease holds: the newest sign that came in time, and how long the silence after it may be."""

    sign_ns: int
    limit_ns: int


class Expired(NamedTuple):
    """The lease has run out: after a sign there was silence for longer than the limit of the phase that is named."""

    silent_ns: int
    limit_ns: int
    phase: str = ""

    def __str__(self) -> str:
        return (
            f"The lease has run out: no contact with the server and no progress for {self.silent_ns / NS:.1f} s; "
            f"{self.limit_ns / NS:.1f} s are allowed" + (f" in phase {self.phase}" if self.phase else "")
        )


def judge(held: Held, *, contact_ns: int, ranks: Sequence[Progress], terms: Terms, now_ns: int) -> Held | Expired:
    """The lease after a look at contact and progress, made at `now_ns`.

    held: the outcome of an earlier look. ranks: slots of the node's living ranks; without any, the limit is that of
    the setup. Up to the newest progress the earlier look's limit counts, since a rank may have left a longer phase by
    it; from there on the limit of what ranks do now. Signs from the future count for nothing.
    """
    limit_ns = longest_limit_ns(ranks, terms)
    progress_ns = max([rank.at_ns for rank in ranks], default=0)
    sign_ns = held.sign_ns
    allowed_ns = held.limit_ns if progress_ns > sign_ns else limit_ns
    for moment_ns in sorted((contact_ns, progress_ns)):
        if not sign_ns < moment_ns <= now_ns:
            continue
        if moment_ns - sign_ns > allowed_ns + SLACK_NS:
            return Expired(moment_ns - sign_ns, allowed_ns, _phase_of(allowed_ns, ranks, terms))
        sign_ns = moment_ns
        if moment_ns >= progress_ns:
            allowed_ns = limit_ns
    if now_ns - sign_ns > allowed_ns:
        return Expired(now_ns - sign_ns, allowed_ns, _phase_of(allowed_ns, ranks, terms))
    return Held(sign_ns=sign_ns, limit_ns=limit_ns)


def longest_limit_ns(ranks: Iterable[Progress], terms: Terms) -> int:
    """The longest silence that any of these ranks may have: they wait for each other."""
    return int(NS * max([_limit_s(rank, terms) for rank in ranks], default=terms.setup_s))


def _limit_s(rank: Progress, terms: Terms) -> float:
    return terms[_judged_as(rank)]


def _judged_as(rank: Progress) -> Phase:
    """The phase whose limit a rank has."""
    _, phase, steps = rank
    if steps < STEPS_OF_SETUP:
        return Phase.COMPILE if phase == Phase.COMPILE and steps == 0 else Phase.SETUP
    return Phase(phase) if Phase.STEP <= phase <= Phase.EVALUATION else Phase.STEP


def _phase_of(limit_ns: int, ranks: Iterable[Progress], terms: Terms) -> str:
    """What to call a limit: by the phase of a rank that has it, else by those that have it, which ranks have left."""
    now = {_judged_as(rank) for rank in ranks}
    having = [phase for phase in Phase if int(NS * terms[phase]) == limit_ns]
    return " or ".join(phase.word for phase in having if phase in now or not now.intersection(having))
