from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.save_interval import DEFAULT_MTBF_S
from everstep.save_interval import daly_interval_s as alone_interval_s
from recovery.domain.interval import (
    LONGEST_S,
    PRIOR_NODE_HOURS,
    IntervalInputs,
    choose_interval,
    daly_interval_s,
)

INPUTS = IntervalInputs(save_cost_s=2.0, step_time_s=0.5, nodes=100, failures=9, node_hours=3700.0)


def waste(interval_s: float, save_cost_s: float, mtbf_s: float) -> float:
    """Wall time over work, by Daly's model without a restart: failures come at random, half done work is lost."""
    return mtbf_s * (math.exp((interval_s + save_cost_s) / mtbf_s) - 1.0) / interval_s


@given(
    save_cost_s=st.floats(0.01, 60.0),
    mtbf_s=st.floats(3600.0, 1e6),
    other=st.floats(0.2, 5.0).filter(lambda factor: abs(factor - 1.0) > 0.15),
)
def test_no_other_interval_wastes_less(save_cost_s: float, mtbf_s: float, other: float) -> None:
    best = daly_interval_s(save_cost_s, mtbf_s)
    assert waste(best, save_cost_s, mtbf_s) < waste(best * other, save_cost_s, mtbf_s)


def test_is_young_s_formula_where_saves_are_cheap() -> None:
    assert daly_interval_s(1.0, 1e6) == pytest.approx(math.sqrt(2e6), rel=1e-3)


def test_saves_that_cost_more_than_a_failure_are_made_once_per_failure() -> None:
    assert daly_interval_s(500.0, 200.0) == 200.0


def test_counts_the_fleet_s_failures_and_scales_with_the_job_s_nodes() -> None:
    found = choose_interval(INPUTS)
    assert found.mtbf_s == pytest.approx(3600.0 * (3700.0 + PRIOR_NODE_HOURS) / 10 / 100)
    assert found.interval_s == pytest.approx(daly_interval_s(2.0, found.mtbf_s))
    assert found.steps == round((found.interval_s or 0.0) / 0.5)
    assert found.reason == (
        "A save holds training up for 2 s, and a step takes 0.5 s. With 100 nodes, a failure is expected every 10 h "
        "(usual is 1 in 6\u2009300 node-hours; this fleet had 9 failures in 3\u2009700 node-hours). "
        "Least time is wasted by a save every 756 steps (378 s)."
    )


def test_without_failures_the_prior_counts() -> None:
    quiet = choose_interval(replace(INPUTS, failures=0, node_hours=0.0))
    assert quiet.mtbf_s == pytest.approx(3600.0 * PRIOR_NODE_HOURS / 100)


@pytest.mark.parametrize(
    ("node_hours", "failures", "words"),
    [
        (0.0, 0, "this fleet has too little history to tell"),
        (0.4, 1, "this fleet had 1 failure in its first node-hour"),
        (5000.0, 0, "this fleet had no failures in 5\u2009000 node-hours"),
    ],
)
def test_tells_a_young_fleet_from_one_without_failures(node_hours: float, failures: int, words: str) -> None:
    assert words in choose_interval(replace(INPUTS, failures=failures, node_hours=node_hours)).reason


def test_is_never_longer_than_an_hour_nor_shorter_than_a_step() -> None:
    rare = choose_interval(replace(INPUTS, nodes=1, save_cost_s=60.0, failures=0))
    assert rare.interval_s == LONGEST_S
    assert "(60 min, the longest that is allowed)" in rare.reason
    assert choose_interval(replace(INPUTS, step_time_s=1e4)).steps == 1


@pytest.mark.parametrize("missing", ["save_cost_s", "step_time_s"])
def test_chooses_nothing_before_the_job_was_measured(missing: str) -> None:
    found = choose_interval(replace(INPUTS, **{missing: None}))
    assert (found.steps, found.interval_s) == (None, None)
    assert "has been measured yet" in found.reason


@given(save_cost_s=st.floats(1e-4, 1e3), mtbf_s=st.floats(1.0, 1e8))
def test_a_script_alone_computes_the_same(save_cost_s: float, mtbf_s: float) -> None:
    assert alone_interval_s(save_cost_s, mtbf_s) == daly_interval_s(save_cost_s, mtbf_s)


def test_a_script_alone_assumes_the_prior_of_one_node() -> None:
    assert DEFAULT_MTBF_S == 3600.0 * PRIOR_NODE_HOURS
