"""How often a job should save: the interval at which saving and losing work cost least together.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), which for saves that
are cheap against the time between failures is Young's sqrt(2 * cost * MTBF). A script without an agent computes the
same by itself (`everstep/save_interval.py`), with the prior alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RULE_VERSION = "interval-1"

PRIOR_NODE_HOURS = 6300.0
"""Between failures of one node, before a fleet has failures of its own to count: 419 unexpected interruptions in 54
days on 2,048 nodes of 8 GPUs ("The Llama 3 Herd of Models", 2024, section 3.3.4). It weighs as much as one failure."""

LONGEST_S = 3600.0
"""However rare failures are, no more than an hour of work is put at risk."""


@dataclass(frozen=True, kw_only=True)
class IntervalInputs:
    """What was measured. Costs and times in seconds; None where nothing is known yet."""

    save_cost_s: float | None
    """How long training stands still for one save."""
    step_time_s: float | None
    nodes: int
    failures: int
    """Of the whole fleet, drills left out."""
    node_hours: float
    """In which they happened."""


@dataclass(frozen=True, kw_only=True)
class IntervalChoice:
    """`steps` None: too little is measured; the script then measures for itself."""

    inputs: IntervalInputs
    mtbf_s: float
    """Between failures that stop this job, of all its nodes together."""
    interval_s: float | None
    steps: int | None
    reason: str


def choose_interval(inputs: IntervalInputs) -> IntervalChoice:
    """The interval for a job, with the sentence that says why."""
    rate_per_hour = (inputs.failures + 1) / (inputs.node_hours + PRIOR_NODE_HOURS)
    mtbf_s = 3600.0 / (rate_per_hour * max(1, inputs.nodes))
    expected = f"{_failure_rate(inputs, mtbf_s)} ({_evidence(inputs)})"
    if not inputs.save_cost_s or not inputs.step_time_s:
        missing = "save" if not inputs.save_cost_s else "step"
        reason = f"No {missing} of this job has been measured yet, so the script measures for itself. {expected}."
        return IntervalChoice(inputs=inputs, mtbf_s=mtbf_s, interval_s=None, steps=None, reason=reason)
    best_s = daly_interval_s(inputs.save_cost_s, mtbf_s)
    interval_s = min(best_s, LONGEST_S)
    steps = max(1, round(interval_s / inputs.step_time_s))
    time = f"{grouped(best_s)} s" if interval_s == best_s else f"{LONGEST_S / 60:.0f} min, the longest that is allowed"
    return IntervalChoice(
        inputs=inputs,
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        steps=steps,
        reason=f"A save holds training up for {inputs.save_cost_s:.3g} s, and a step takes {inputs.step_time_s:.3g} s. "
        f"{expected}. Least time is wasted by a save every {grouped(steps)} step{'' if steps == 1 else 's'} ({time}).",
    )


def _failure_rate(inputs: IntervalInputs, mtbf_s: float) -> str:
    hours = mtbf_s / 3600.0
    often = f"{grouped(hours)} h" if hours >= 10.0 else f"{hours:.1f} h"
    return f"With {grouped(inputs.nodes)} node{'' if inputs.nodes == 1 else 's'}, a failure is expected every {often}"


def _evidence(inputs: IntervalInputs) -> str:
    usual = f"usual is 1 in {grouped(PRIOR_NODE_HOURS)} node-hours"
    if not inputs.failures and inputs.node_hours < 1.0:
        return f"{usual}; this fleet has too little history to tell"
    counted = f"{grouped(inputs.failures) if inputs.failures else 'no'} failure{'' if inputs.failures == 1 else 's'}"
    hours = f"{grouped(inputs.node_hours)} node-hours" if inputs.node_hours >= 1.5 else "its first node-hour"
    return f"{usual}; this fleet had {counted} in {hours}"


def grouped(value: float) -> str:
    """A whole number with thin spaces between its thousands, as the pages write all others."""
    return f"{value:,.0f}".replace(",", "\u2009")


def daly_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between the end of one save and the start of the next."""
    if save_cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = save_cost_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * save_cost_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_cost_s
