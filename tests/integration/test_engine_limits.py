"""What ends by a limit, and what must not: steps that fail, absences of the control plane, launches out of sight."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.messages import StepReport, StepReports
from recovery import absence, engine
from recovery.domain.incident import Incident
from recovery.models import Claim, GenerationRow, IncidentRow, Job, Node, TimelineEntry
from recovery.store import from_json, situations, to_json
from recovery.sweep import sweep_if_due
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import advance, kill_and_fence, replay, run_generation, running

pytestmark = pytest.mark.django_db(transaction=True)


def launching(fleet: ToldFleet, job: Job) -> IncidentRow:
    row = running(fleet, job)
    kill_and_fence(fleet, job, row)
    run_generation(fleet, job, 2)
    return IncidentRow.objects.get(job=job, state="launching")


def make_overdue(row: IncidentRow, *, by_s: float = 10.0) -> None:
    incident = from_json(IncidentRow.objects.get(pk=row.pk).body, Incident)
    past = (incident.deadline_at or 0.0) - time.time() + by_s
    moved = replace(incident, deadline_at=(incident.deadline_at or 0.0) - past, state_since=incident.state_since - past)
    IncidentRow.objects.filter(pk=row.pk).update(body=to_json(moved), deadline_at=moved.deadline_at)


# --- Attempts -----------------------------------------------------------------------------------------------------


def test_crowd_of_workers_at_one_moment_counts_as_one_attempt(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    seen = [IncidentRow.objects.get(job=job) for _ in range(6)]
    assert [engine._count_attempt(row) for row in seen] == [True, False, False, False, False, False]
    assert IncidentRow.objects.get(job=job).advance_attempts == 1


def test_facts_that_overtake_a_step_again_and_again_do_not_page(
    job: Job, fleet: ToldFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    real = engine.step
    told: list[int] = []

    def step(*arguments: Any) -> Any:
        outcome = real(*arguments)
        if len(told) < 2 * engine.MAX_ADVANCE_ATTEMPTS:
            told.append(1)
            fleet.die("gpu-02", 1, 1)
        return outcome

    monkeypatch.setattr(engine, "step", step)
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert (incident.state, incident.advance_attempts) == ("stopping", 0)


def test_step_that_raises_every_time_pages_instead_of_hanging(
    job: Job, fleet: ToldFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    monkeypatch.setattr(engine, "step", lambda *_: 1 / 0)
    for _ in range(engine.MAX_ADVANCE_ATTEMPTS):
        with pytest.raises(ZeroDivisionError):
            engine.advance_incident(IncidentRow.objects.get(job=job).pk)
    monkeypatch.undo()
    advance(job)
    assert IncidentRow.objects.get(job=job).state == "escalated"


# --- Absence ------------------------------------------------------------------------------------------------------


def test_deadline_that_passed_while_nobody_looked_stops_nothing(job: Job, fleet: ToldFleet) -> None:
    incident = launching(fleet, job)
    absence.note_presence()
    make_overdue(incident)
    Claim.objects.filter(name="presence").update(last_done_at=time.time() - 600)
    assert sweep_if_due()
    incident.refresh_from_db()
    assert (incident.state, GenerationRow.objects.get(job=job, number=2).wanted) == ("launching", "run")
    assert (incident.deadline_at or 0) > time.time() + absence.RECONNECT_S


def test_first_launch_whose_limit_passed_while_nobody_looked_goes_on(job: Job, fleet: ToldFleet) -> None:
    advance(job)
    run_generation(fleet, job, 1)
    absence.note_presence()
    Job.objects.filter(pk=job.pk).update(state_since=time.time() - 600)
    Claim.objects.filter(name="presence").update(last_done_at=time.time() - 590)
    assert sweep_if_due()
    job.refresh_from_db()
    assert (job.state, job.launch_attempts) == ("launching", 0)
    assert job.state_since <= time.time()


def test_deadline_that_passes_while_somebody_looks_is_kept(job: Job, fleet: ToldFleet) -> None:
    incident = launching(fleet, job)
    absence.note_presence()
    make_overdue(incident)
    assert sweep_if_due()
    assert GenerationRow.objects.get(job=job, number=2).wanted == "stop"


# --- Out of sight -------------------------------------------------------------------------------------------------


def test_launch_out_of_sight_is_given_time_and_then_paged_but_not_stopped(job: Job, fleet: ToldFleet) -> None:
    incident = launching(fleet, job)
    make_overdue(incident)
    fleet.fall_silent("gpu-01", "gpu-02", for_s=60)
    advance(job)
    incident.refresh_from_db()
    assert incident.state == "launching"
    assert TimelineEntry.objects.filter(text__contains="no contact with gpu-01 and gpu-02").exists()
    body = from_json(incident.body, Incident)
    IncidentRow.objects.filter(pk=incident.pk).update(body=to_json(replace(body, deadline_at=time.time() - 1)))
    advance(job)
    incident.refresh_from_db()
    assert incident.state == "escalated"
    assert GenerationRow.objects.get(job=job, number=2).wanted == "run"


def test_launch_that_only_a_lost_node_holds_up_is_planned_anew_without_it(job: Job, fleet: ToldFleet) -> None:
    incident = launching(fleet, job)
    make_overdue(incident)
    fleet.fall_silent("gpu-02", for_s=60)
    advance(job)
    assert GenerationRow.objects.get(job=job, number=2).wanted == "stop"
    assert GenerationRow.objects.get(job=job, number=3).plan["nodes"] == ["gpu-01", "gpu-03"]
    incident.refresh_from_db()
    assert incident.body["attempt"] == 0, "no fault of the job"


def test_first_launch_out_of_sight_waits_and_says_so(job: Job, fleet: ToldFleet) -> None:
    advance(job)
    run_generation(fleet, job, 1)
    Job.objects.filter(pk=job.pk).update(state_since=time.time() - 600)
    fleet.fall_silent("gpu-01", "gpu-02", for_s=15)
    advance(job)
    job.refresh_from_db()
    assert (job.state, "gpu-01" in job.reason, job.launch_attempts) == ("launching", True, 0)
    fleet.silent.clear()
    fleet.beat()
    advance(job)
    job.refresh_from_db()
    assert job.launch_attempts == 1


# --- Verdicts and claims ------------------------------------------------------------------------------------------


def test_loss_that_is_no_number_any_more_is_broken_and_stopped(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    kill_and_fence(fleet, job, row)
    incident = replay(fleet, job, shift=float("nan"))
    assert incident.state == "escalated"
    assert "Continuity is broken" in incident.body["escalation"]
    assert incident.receipt["verdict"]["kind"] == "broken"
    second = GenerationRow.objects.get(job=job, number=2)
    assert (second.broken_continuity, second.wanted) == (True, "stop")


def test_replay_too_long_to_compare_in_full_still_recovers(
    job: Job, fleet: ToldFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(situations, "COMPARE_AT_MOST_STEPS", 3)
    row = running(fleet, job)
    kill_and_fence(fleet, job, row)
    incident = replay(fleet, job)
    assert incident.state == "recovered"
    assert (incident.receipt["verdict"]["steps_lost"], incident.receipt["verdict"]["steps_compared"]) == (10, 3)


def test_running_job_gives_back_nodes_of_a_launch_that_failed(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    Node.objects.filter(name="gpu-03").update(claimed_by=job)
    advance(job)
    assert set(Node.objects.filter(claimed_by=job).values_list("name", flat=True)) == {"gpu-01", "gpu-02"}


def test_report_without_steps_does_not_take_back_progress(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    stranger = StepReport(rank=0, step=99, at=time.time())
    fleet.nodes["gpu-02"].tell(StepReports(job=job.id, generation=1, steps=[stranger]))
    job.refresh_from_db()
    assert job.last_step == 30
