"""How old the last good checkpoint may become while a job trains: beyond that, a human is told.

A failed save never stops training, and so it could fail for a day before anybody looks. The sweep asks; the job page
and the API show the same numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

RULE_VERSION = "last-good-1"

INTERVALS = 3.0
AT_LEAST_S = 1800.0
"""Half an hour: by default a page comes after the later of three intervals and this."""
_GAPS = 10
"""Of the newest saves: their median is the interval that the job really keeps."""


@dataclass(frozen=True, kw_only=True)
class LastGood:
    """`age_s` is training time that a fault would cost now: since the newest usable save, or since training began."""

    saved_at: float | None
    age_s: float
    limit_s: float
    interval_s: float | None
    """What the job really keeps between saves; None if it has made fewer than two."""

    @property
    def too_old(self) -> bool:
        return self.age_s > self.limit_s

    @property
    def reason(self) -> str:
        """Why the limit is what it is."""
        if self.interval_s is not None and self.limit_s == INTERVALS * self.interval_s:
            return f"{INTERVALS:.0f} times the {self.interval_s:.0f} s between its saves"
        return "as the job asks" if self.limit_s != AT_LEAST_S else f"the default of {AT_LEAST_S / 60:.0f} minutes"


def judge_last_good(
    *, usable_saved_at: Sequence[float], saved_at: Sequence[float], training_since: float, wanted_limit_s: float | None,
    now: float,
) -> LastGood:  # fmt: skip
    """`saved_at` are the saves of the present generation, `usable_saved_at` those of the lineage that may be trusted.

    Both in any order. `training_since` is when the present generation made its first step: while nothing trained,
    nothing was lost.
    """
    newest = max(usable_saved_at, default=None)
    gaps = [after - before for before, after in pairwise(sorted(saved_at)[-_GAPS - 1 :])]
    interval_s = statistics.median(gaps) if gaps else None
    default_s = max(AT_LEAST_S, INTERVALS * (interval_s or 0.0))
    return LastGood(
        saved_at=newest,
        age_s=max(0.0, now - max(newest or 0.0, training_since)),
        limit_s=default_s if wanted_limit_s is None else wanted_limit_s,
        interval_s=interval_s,
    )
