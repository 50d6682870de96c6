"""How often a run keeps a snapshot in memory: each so many steps, or `auto`, as often as it hardly costs anything.

`Run` asks `due` at each step and tells what snapshots and steps took. Under an agent the server's word
(EVERSTEP_MEMORY_EVERY) overrides the script's.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Literal

from everstep.errors import UsageError
from everstep.save_interval import AUTO

MEMORY_EVERY = "EVERSTEP_MEMORY_EVERY"
OFF = "off"

MOST_COST = 0.01
"""Of the time of the steps between two snapshots: what training may be held up by one."""
BEFORE_MEASURED = 10
"""Steps between snapshots until both a snapshot and a few steps were measured."""
_REMEMBERED = 20


class MemoryInterval:
    """Every rank holds one; what it computes from measurements is rank 0's and shared by `agree` in `steps`."""

    def __init__(self, every: int | Literal["auto"] | None, *, environment: Mapping[str, str] = os.environ) -> None:
        """None: no snapshots. Raises `UsageError` for what is neither that, nor a number of steps, nor `auto`."""
        said = environment.get(MEMORY_EVERY)
        wanted: int | str | None = (None if said == OFF else said) if said else every
        self.measures = wanted == AUTO
        self.steps: int | None = None
        if wanted is not None:
            try:
                self.steps = BEFORE_MEASURED if self.measures else int(wanted)
            except ValueError as err:
                raise UsageError(f"memory_every is {wanted!r}: give a number of steps, {AUTO!r}, or None.") from err
            if self.steps < 1:
                raise UsageError(f"memory_every is {wanted!r}: give at least 1 step, {AUTO!r}, or None.")
        self._last = 0
        self._step_times: deque[float] = deque(maxlen=_REMEMBERED)
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._writing: deque[float] = deque(maxlen=_REMEMBERED)

    def begin(self, step: int) -> None:
        """Training goes on after `step`, which is saved."""
        self._last = step

    def stop(self) -> None:
        """No more snapshots."""
        self.steps = None
        self.measures = False

    def due(self, step: int) -> bool:
        """Whether the interval ends with this step."""
        if self.steps is None:
            return False
        return step - self._last >= self.steps if self.measures else step % self.steps == 0

    def made(self, step_time_s: float) -> None:
        """A step took so long."""
        if self.measures:
            self._step_times.append(step_time_s)

    def kept(self, step: int, *, blocked_s: float) -> None:
        """A snapshot was begun at this step, and held training up for so long."""
        self._last = step
        if self.measures:
            self._costs.append(blocked_s)

    def written(self, seconds: float) -> None:
        """So long after its copy a snapshot was complete: the next one cannot come sooner."""
        if self.measures:
            self._writing.append(seconds)

    def best_steps(self) -> int:
        """Steps between snapshots by this rank's measurements; the present number while there are none."""
        if self.steps is None:
            return 0
        if not self.measures or not self._costs or not self._step_times:
            return self.steps
        step_s = max(statistics.median(self._step_times), 1e-6)
        cheap = statistics.median(self._costs) / MOST_COST
        ready = statistics.median(self._writing) if self._writing else 0.0
        return max(1, math.ceil(max(cheap, ready) / step_s))
