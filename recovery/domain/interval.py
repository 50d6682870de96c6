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
    fleet = (
        f"{inputs.failures} failure{'' if inputs.failures == 1 else 's'} in {inputs.node_hours:.0f} node-hours of the "
        f"fleet and a prior of one in {PRIOR_NODE_HOURS:.0f} mean one in {mtbf_s / 3600:.1f} h on {inputs.nodes} "
        f"node{'' if inputs.nodes == 1 else 's'}"
    )
    if not inputs.save_cost_s or not inputs.step_time_s:
        missing = "save" if not inputs.save_cost_s else "step"
        reason = f"no {missing} of this job was measured yet: the script measures its own; {fleet}"
        return IntervalChoice(inputs=inputs, mtbf_s=mtbf_s, interval_s=None, steps=None, reason=reason)
    best_s = daly_interval_s(inputs.save_cost_s, mtbf_s)
    interval_s = min(best_s, LONGEST_S)
    steps = max(1, round(interval_s / inputs.step_time_s))
    capped = "" if interval_s == best_s else f", cut to {LONGEST_S / 60:.0f} minutes"
    return IntervalChoice(
        inputs=inputs,
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        steps=steps,
        reason=f"a save holds training up for {inputs.save_cost_s:.3g} s and a step takes {inputs.step_time_s:.3g} s; "
        f"{fleet}: saving each {best_s:.0f} s{capped} costs least, that is each {steps} steps",
    )


def daly_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between the end of one save and the start of the next."""
    if save_cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = save_cost_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * save_cost_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_cost_s
