"""The incident machine where the loss is lost: one roll-back, then a human."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import NOW, PARENT, fenced, generation, incident, plan, situation, training, verdict

from recovery.domain.generations import GenerationView
from recovery.domain.incident import CauseKind, Incident, IncidentState
from recovery.domain.instructions import IssueReceipt, PageOperator, StopGeneration
from recovery.domain.machine import step

S = IncidentState
PLAN = plan(2, parent=PARENT)


def lost(view: GenerationView, at: int, *, count: int = 3) -> GenerationView:
    ranks = tuple(replace(rank, nonfinite_since=at, nonfinite_count=count) for rank in view.ranks)
    return replace(view, ranks=ranks)


def second(**changes: object) -> GenerationView:
    return generation(2, of=PLAN, ranks=tuple(training(n, of=PLAN, last_step=45) for n in (0, 1)), **changes)


def planned(state: IncidentState, **changes: object) -> Incident:
    return incident(state, **{"plan": PLAN, "plans_made": 1, "reached_step": 50, **changes})


def test_detected_names_the_cause_stops_the_generation_and_counts_the_roll_back() -> None:
    outcome = step(incident(), situation(lost(generation(1), 48)), NOW)
    assert outcome.incident.state is S.STOPPING
    assert outcome.incident.cause is not None
    assert outcome.incident.cause.kind is CauseKind.LOSS_NOT_FINITE
    assert outcome.incident.rollbacks == 1
    assert outcome.instructions == (StopGeneration(job="job-1", generation=1),)


def test_detected_without_a_lasting_run_of_bad_losses_is_a_false_alarm() -> None:
    outcome = step(incident(), situation(lost(generation(1), 50, count=1)), NOW)
    assert outcome.incident.state is S.FALSE_ALARM


@pytest.mark.parametrize("state", [S.LAUNCHING, S.VERIFYING])
def test_the_first_loss_that_a_recovery_loses_rolls_it_back_once(state: IncidentState) -> None:
    outcome = step(planned(state), situation(fenced(generation(1)), lost(second(), 43)), NOW)
    assert (outcome.incident.state, outcome.incident.rollbacks) == (S.STOPPING, 1)
    assert outcome.incident.plan is None
    assert outcome.instructions == (StopGeneration(job="job-1", generation=2),)


@pytest.mark.parametrize("state", [S.LAUNCHING, S.VERIFYING])
def test_a_loss_lost_after_a_roll_back_pages_and_stops_the_job(state: IncidentState) -> None:
    judged = situation(fenced(generation(1)), lost(second(), 43), verdict=verdict(caught_up=False))
    outcome = step(planned(state, rollbacks=1), judged, NOW)
    assert outcome.incident.state is S.ESCALATED
    assert [type(one) for one in outcome.instructions] == [StopGeneration, IssueReceipt, PageOperator]


def test_a_new_incident_pages_at_once_where_the_generation_before_had_lost_it_at_the_same_step() -> None:
    lines = (fenced(lost(generation(1), 53)), lost(second(), 53))
    outcome = step(incident(broken_generation=2), situation(*lines), NOW)
    assert outcome.incident.state is S.ESCALATED
    assert "generation 1 had lost it at step 53 too" in outcome.incident.escalation


def test_a_new_incident_rolls_back_again_where_training_had_got_well_past_it() -> None:
    lines = (fenced(lost(generation(1), 53)), lost(second(), 64))
    outcome = step(incident(broken_generation=2), situation(*lines), NOW)
    assert outcome.incident.state is S.STOPPING


def test_deaths_that_the_stop_brings_do_not_change_the_cause() -> None:
    begun = step(incident(), situation(lost(generation(1), 48)), NOW).incident
    gone = fenced(lost(generation(1), 48))
    gone = replace(gone, ranks=tuple(replace(r, exited_at=NOW - 9, exit_code=1, detail="Error") for r in gone.ranks))
    outcome = step(begun, situation(gone), NOW + 1)
    assert outcome.incident.state is S.PLACING
    assert outcome.incident.cause == begun.cause
