"""The progress line: where an incident stands, and how long each phase took."""

from __future__ import annotations

from typing import Any

from dashboard.views.progress import progress_of
from recovery.queries import IncidentSummary, Phase


def incident(state: str, *phases: tuple[str, float], ended: bool = False, **more: Any) -> IncidentSummary:
    """An incident that stood in each of the phases for the given seconds, one after the other; the limit is 60 s."""
    at, made = 1000.0, []
    for index, (name, seconds) in enumerate(phases):
        last = index == len(phases) - 1
        ended_at = None if last and not ended else at + seconds
        made.append(
            Phase(
                state=name, started_at=at, ended_at=ended_at, seconds=seconds, limit_s=60.0, over_limit=seconds > 60.0
            )
        )
        at += seconds
    values: dict[str, Any] = dict.fromkeys(IncidentSummary.__dataclass_fields__)
    return IncidentSummary(**values | {"state": state, "ended": ended, "phases": tuple(made)} | more)


def standings(shown: IncidentSummary) -> list[str]:
    return [step.standing for step in progress_of(shown)]


def test_done_steps_lie_before_the_one_that_is_now() -> None:
    shown = incident("placing", ("detected", 0.1), ("stopping", 0.4), ("placing", 1.0))
    assert standings(shown) == ["done", "done", "now", "ahead", "ahead", "ahead"]


def test_recovered_incident_is_done_to_the_end() -> None:
    phases = [(name, 1.0) for name in ("detected", "stopping", "placing", "launching", "verifying")]
    assert standings(incident("recovered", *phases, ended=True)) == ["done"] * 6


def test_incident_beside_the_line_is_held_where_it_left_it() -> None:
    shown = incident("escalated", ("detected", 0.1), ("stopping", 0.4), ("placing", 1.0), ("escalated", 90.0))
    assert standings(shown) == ["done", "done", "held", "ahead", "ahead", "ahead"]


def test_incident_that_ended_unrecovered_has_nothing_ahead() -> None:
    shown = incident("cancelled", ("detected", 0.1), ("stopping", 0.4), ("placing", 1.0), ended=True)
    assert standings(shown) == ["done", "done", "ended", "skipped", "skipped", "skipped"]


def test_second_attempt_adds_its_time_and_is_counted() -> None:
    shown = incident("stopping", ("detected", 0.1), ("stopping", 0.4), ("placing", 1.0), ("stopping", 0.6))
    stopping = progress_of(shown)[1]
    assert (stopping.times, stopping.seconds) == (2, 1.0)
    assert stopping.started_at == 1001.5


def test_phase_over_its_limit_is_flagged() -> None:
    shown = incident("stopping", ("detected", 0.1), ("stopping", 61.0))
    assert [step.over_limit for step in progress_of(shown)] == [False, True, False, False, False, False]


def test_ended_incident_counts_no_time_on() -> None:
    shown = incident("closed_by_operator", ("detected", 0.1), ("stopping", 5.0), ended=True)
    assert all(step.started_at is None for step in progress_of(shown))
