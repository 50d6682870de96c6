"""One drill of any kind on a running system, judged by what it promises."""

from __future__ import annotations

import sys
from typing import Any

from demo_check.recovered import FAULTS, check_recovered
from demo_check.system import RunningSystem
from demo_check.unharmed import DURATIONS_S, check_unharmed
from demo_check.witness import Witness

KINDS = (*FAULTS, *DURATIONS_S)
SCRIPT = ("--leave-child", "--save-every", "40")
"""More arguments for the job. Ranks leave a child behind, forked twice and in a session of its own, that a stop must
find. Saves are so far apart that a fault which was due after one is there before the next: a keeper takes a moment to
start.
"""


def check_drill(
    system: RunningSystem, witness: Witness, kind: str, *, result: dict[str, Any], duration_s: float | None = None
) -> list[str]:
    """Run a drill of one of `KINDS`. Fills `result`; returns what is wrong.

    `duration_s`: how long a fault lasts that the job should not notice.
    """
    if kind in FAULTS:
        return check_recovered(system, witness, kind, result=result, tell=tell)
    lasts_s = DURATIONS_S[kind] if duration_s is None else duration_s
    return check_unharmed(system, witness, kind, duration_s=lasts_s, result=result, tell=tell)


def tell(words: str) -> None:
    """Progress, for whoever watches."""
    print(words, file=sys.stderr, flush=True)
