"""When a run saves: each so many steps, or `auto`, which follows what a save costs and how often machines fail.

`Run` asks `due` at each step and tells what saves and steps took. Under an agent the server may hand the number of
steps down (EVERSTEP_SAVE_EVERY), chosen with the failures that its fleet has really had; that overrides the script.
Alone, `auto` assumes one failure per node in `DEFAULT_MTBF_S`.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Literal

from everstep.errors import UsageError

SAVE_EVERY = "EVERSTEP_SAVE_EVERY"
AUTO: Literal["auto"] = "auto"

DEFAULT_MTBF_S = 3600.0 * 6300.0
"""Between failures of one node: 419 unexpected interruptions in 54 days on 2,048 nodes ("The Llama 3 Herd of Models",
2024, section 3.3.4). The job's is this over its number of nodes."""
LONGEST_S = 3600.0
"""However rare failures are, no more than an hour of work is put at risk."""
BEFORE_MEASURED = 100
"""Steps between saves until both a save and a few steps were measured."""
_REMEMBERED = 20


class SaveInterval:
    """Every rank holds one; what it computes from measurements is rank 0's and shared by `agree`."""

    def __init__(
        self,
        save_every: int | Literal["auto"],
        *,
        nodes: int = 1,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises `UsageError` for what is neither a number of steps nor `auto`."""
        wanted: int | str = environment.get(SAVE_EVERY) or save_every
        self.measures = wanted == AUTO
        if isinstance(wanted, bool) or not isinstance(wanted, int | str):
            raise UsageError(f"save_every is {wanted!r}: give a whole number of steps, or {AUTO!r}.")
        try:
            self.steps = BEFORE_MEASURED if self.measures else int(wanted)
        except ValueError as err:
            raise UsageError(f"save_every is {wanted!r}: give a whole number of steps, or {AUTO!r}.") from err
        if self.steps < 1:
            raise UsageError(f"save_every is {wanted!r}: give at least 1 step, or {AUTO!r}.")
        self._mtbf_s = DEFAULT_MTBF_S / max(1, nodes)
        self._last_saved = 0
        self._step_times: deque[float] = deque(maxlen=_REMEMBERED)
        self._save_costs: deque[float] = deque(maxlen=_REMEMBERED)

    def begin(self, step: int) -> None:
        """Training goes on after `step`, which is saved."""
        self._last_saved = step

    def due(self, step: int) -> bool:
        """Whether the interval ends with this step."""
        return step - self._last_saved >= self.steps if self.measures else step % self.steps == 0

    def made(self, step_time_s: float) -> None:
        """A step took so long."""
        if self.measures:
            self._step_times.append(step_time_s)

    def saved(self, step: int, *, blocked_s: float) -> None:
        """A save at this step held training up for so long. `best_steps` takes it into account."""
        self._last_saved = step
        if self.measures:
            self._save_costs.append(blocked_s)

    def best_steps(self) -> int:
        """Steps between saves that cost least by this rank's measurements; the present number while there are none."""
        if not self.measures or not self._save_costs or not self._step_times:
            return self.steps
        best_s = min(daly_interval_s(statistics.median(self._save_costs), self._mtbf_s), LONGEST_S)
        return max(1, round(best_s / max(statistics.median(self._step_times), 1e-6)))


def daly_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves (Daly 2006; Young's sqrt(2 * cost * MTBF) where saves are cheap)."""
    if save_cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = save_cost_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * save_cost_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_cost_s
