"""Ingest, engine, machine and rows together, told by a fleet without processes: each story of a killed rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agents.protocol.messages import AssignmentPhase, SeenPhase
from recovery import engine, jobs
from recovery.drill_outcomes import settle_drill
from recovery.drills import trigger_drill
from recovery.incidents import command_incident
from recovery.models import Drill, GenerationRow, IncidentRow, Job, Node, StepRow, TimelineEntry
from recovery.orders import order_for
from recovery.store.timelines import first_broken_link
from tests.fakes.interleaving import happens_before
from tests.fakes.told_fleet import DIGEST, ToldFleet

pytestmark = pytest.mark.django_db(transaction=True)

SPEC = {
    "name": "tiny",
    "argv": ["/usr/bin/python3", "train.py"],
    "working_directory": "/tmp",
    "checkpoint_directory": "/tmp/checkpoints",
    "nodes": 2,
    "total_steps": 100,
}


def run_generation(fleet: ToldFleet, job: Job, number: int) -> GenerationRow:
    """Play prepare and run of the newest generation on its nodes, up to the order to run."""
    row = GenerationRow.objects.get(job=job, number=number)
    for rank, name in enumerate(row.plan["nodes"]):
        port = {"master_port": 20001} if rank == 0 else {}
        fleet.report(name, number, row.plan_id, SeenPhase.PREPARED, **port)
    advance(job)
    row.refresh_from_db()
    assert row.wanted == AssignmentPhase.RUN.value
    return row


def advance(job: Job) -> None:
    incident = IncidentRow.objects.filter(job=job, ended=False).first()
    if incident:
        engine.advance_incident(incident.pk)
    else:
        engine.advance_job(job.id)


def running(fleet: ToldFleet, job: Job) -> GenerationRow:
    advance(job)
    row = run_generation(fleet, job, 1)
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.start(name, 1, rank)
        fleet.train(name, 1, rank, range(1, 31))
    fleet.save("gpu-01", 1, 20)
    advance(job)
    job.refresh_from_db()
    assert job.state == "running"
    return row


def kill_and_fence(fleet: ToldFleet, job: Job, row: GenerationRow) -> IncidentRow:
    fleet.die("gpu-02", 1, 1)
    advance(job)
    for name in row.plan["nodes"]:
        fleet.report(name, 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    return IncidentRow.objects.get(job=job)


def replay(
    fleet: ToldFleet,
    job: Job,
    *,
    live: dict[str, str] | None = None,
    shift: float = 0.0,
    unmoved: Sequence[str] = (),
) -> IncidentRow:
    row = run_generation(fleet, job, 2)
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.start(name, 2, rank, step=20, live=live)
        fleet.train(name, 2, rank, range(21, 33), shift=shift, unmoved=unmoved)
    advance(job)
    advance(job)
    return IncidentRow.objects.get(job=job)


def test_killed_rank_recovers_with_bit_equal_receipt(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    incident = kill_and_fence(fleet, job, row)
    assert incident.state == "placing"
    incident = replay(fleet, job)
    assert incident.state == "recovered", list(TimelineEntry.objects.values_list("text", flat=True))
    receipt = incident.receipt
    assert receipt["verdict"]["kind"] == "bit-equal"
    assert (receipt["verdict"]["steps_lost"], receipt["verdict"]["steps_compared"]) == (10, 10)
    assert receipt["generation"] == 2
    assert receipt["detect_s"] >= 0
    assert first_broken_link(incident.pk) is None
    job.refresh_from_db()
    assert job.state == "running"


def test_steps_that_are_told_while_the_verdict_is_read_do_not_shorten_the_comparison(
    job: Job, fleet: ToldFleet
) -> None:
    kill_and_fence(fleet, job, running(fleet, job))
    row = run_generation(fleet, job, 2)
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.start(name, 2, rank, step=20)
        fleet.train(name, 2, rank, range(21, 28))
    advance(job)
    assert IncidentRow.objects.get(job=job).state == "verifying"

    def tell_the_rest() -> None:
        for rank, name in enumerate(row.plan["nodes"]):
            fleet.train(name, 2, rank, range(28, 33))

    with happens_before("SELECT", StepRow, tell_the_rest, number=2):
        advance(job)
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert incident.state == "recovered"
    assert (incident.receipt["verdict"]["steps_lost"], incident.receipt["verdict"]["steps_compared"]) == (10, 10)


def test_no_run_order_before_every_old_node_is_fenced(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    second = GenerationRow.objects.get(job=job, number=2)
    for name in second.plan["nodes"]:
        fleet.report(name, 2, second.plan_id, SeenPhase.PREPARED, master_port=20001)
    fleet.report("gpu-02", 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    second.refresh_from_db()
    assert second.wanted == "prepare"
    fleet.report("gpu-01", 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    second.refresh_from_db()
    assert second.wanted == "run"


def test_forgotten_optimizer_rolls_back_once_and_then_pages(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    fleet.save("gpu-01", 1, 10)
    kill_and_fence(fleet, job, row)
    incident = replay(fleet, job, live={**DIGEST, "optimizer": "fresh"})
    assert incident.state == "stopping"
    texts = " ".join(TimelineEntry.objects.values_list("text", flat=True))
    assert "the optimizer was not restored" in texts
    assert "Rolling back once" in texts


def test_frozen_weights_are_named_though_digests_and_losses_are_equal(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    kill_and_fence(fleet, job, row)
    incident = replay(fleet, job, unmoved=["model"])
    assert incident.state == "escalated"
    assert "the weights are frozen" in incident.receipt["verdict"]["findings"][0]


def test_broken_continuity_without_older_checkpoint_pages_with_a_receipt(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    kill_and_fence(fleet, job, row)
    incident = replay(fleet, job, shift=0.01)
    assert incident.state == "escalated"
    assert incident.receipt["verdict"]["kind"] == "broken"
    assert GenerationRow.objects.get(job=job, number=2).broken_continuity


def test_job_that_ends_by_itself_succeeds_without_incident_when_one_rank_ends_first(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    fleet.finish("gpu-01", 1, 0)
    fleet.report("gpu-01", 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    job.refresh_from_db()
    assert job.state == "running"
    fleet.finish("gpu-02", 1, 1)
    advance(job)
    job.refresh_from_db()
    assert job.state == "succeeded"
    assert not IncidentRow.objects.exists()
    assert Node.objects.filter(claimed_by=job).exists()
    fleet.report("gpu-02", 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    assert not Node.objects.filter(claimed_by=job).exists()


def test_case_r41_exit_code_0_before_the_last_step_is_an_incident(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    fleet.die("gpu-02", 1, 1, signal=None, exit_code=0)
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert incident.body["cause"]["kind"] == "early_exit"


def test_case_r29_exit_code_7_is_told_with_code_and_rank(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    fleet.die("gpu-01", 1, 0, signal=None, exit_code=7)
    advance(job)
    assert TimelineEntry.objects.filter(text__contains="Rank 0 on gpu-01 exited with code 7").exists()


def test_thousand_copies_of_one_death_make_one_incident(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    fleet.nodes["gpu-02"].seq -= 1
    for _ in range(1000):
        fleet.die("gpu-02", 1, 1)
        fleet.nodes["gpu-02"].seq -= 1
    assert IncidentRow.objects.count() == 1
    assert TimelineEntry.objects.count() == 1


def test_foreign_facts_are_refused(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    fleet.die("gpu-03", 1, 1)
    fleet.die("gpu-01", 1, 1)
    assert not IncidentRow.objects.exists()


def test_stop_asked_for_during_recovery_cancels_the_incident(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    kill_and_fence(fleet, job, row)
    jobs.stop_job(job.id, by="tests")
    advance(job)
    second = GenerationRow.objects.get(job=job, number=2)
    assert second.wanted == "stop"
    incident = IncidentRow.objects.get(job=job)
    assert incident.state == "cancelled"
    job.refresh_from_db()
    assert job.state == "stopped"


def test_pause_holds_and_resume_goes_on(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    incident = kill_and_fence(fleet, job, row)
    command_incident(incident.pk, kind="pause", by="tests")
    advance(job)
    incident.refresh_from_db()
    assert incident.state == "paused"
    command_incident(incident.pk, kind="resume", by="tests")
    advance(job)
    assert replay(fleet, job).state == "recovered"


def test_drill_takes_the_path_of_a_real_fault_and_passes_by_its_promise(job: Job, fleet: ToldFleet) -> None:
    from agents.protocol.messages import FaultReport, FaultState

    row = running(fleet, job)
    drill = trigger_drill(kind="kill-rank", job_id=job.id, requested_by="tests")
    node = fleet.nodes["gpu-02"]
    assert order_for(node.row.pk).faults[0].drill == drill.id
    node.tell(FaultReport(drill=drill.id, state=FaultState.APPLIED, at=1.0))
    kill_and_fence(fleet, job, row)
    incident = replay(fleet, job)
    settle_drill(drill.id)
    drill.refresh_from_db()
    assert (drill.state, drill.result["passed"]) == ("passed", True)
    assert incident.drill_id == drill.id
    assert not order_for(node.row.pk).faults


def interpose(monkeypatch: pytest.MonkeyPatch, happening: Callable[[], object]) -> None:
    """Let something happen once, between a decision and its save."""
    real, happened = engine.step, []

    def step(*arguments: Any) -> Any:
        outcome = real(*arguments)
        if not happened:
            happened.append(True)
            happening()
        return outcome

    monkeypatch.setattr(engine, "step", step)


def test_command_given_while_a_step_is_decided_is_obeyed(
    job: Job, fleet: ToldFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    incident = IncidentRow.objects.get(job=job)
    interpose(monkeypatch, lambda: command_incident(incident.pk, kind="pause", by="tests"))
    advance(job)
    incident.refresh_from_db()
    assert incident.state == "paused"


def test_death_told_while_recovery_is_decided_is_not_covered_up(
    job: Job, fleet: ToldFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = running(fleet, job)
    kill_and_fence(fleet, job, row)
    second = run_generation(fleet, job, 2)
    for rank, name in enumerate(second.plan["nodes"]):
        fleet.start(name, 2, rank, step=20)
        fleet.train(name, 2, rank, range(21, 33))
    advance_once = engine._advance_incident_once
    incident = IncidentRow.objects.get(job=job)
    while incident.state != "verifying":
        advance_once(incident.pk, None)
        incident.refresh_from_db()
    interpose(monkeypatch, lambda: fleet.die("gpu-02", 2, 1))
    advance(job)
    incident.refresh_from_db()
    assert incident.state != "recovered"


def test_decision_about_a_job_that_is_older_than_its_incident_is_not_saved(
    job: Job, fleet: ToldFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance(job)
    row = run_generation(fleet, job, 1)
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.start(name, 1, rank)
        fleet.train(name, 1, rank, range(1, 3))
    real = engine.step_job

    def step_job(*arguments: Any) -> Any:
        outcome = real(*arguments)
        monkeypatch.setattr(engine, "step_job", real)
        fleet.die("gpu-02", 1, 1)
        return outcome

    monkeypatch.setattr(engine, "step_job", step_job)
    engine.advance_job(job.id)
    job.refresh_from_db()
    assert job.state == "recovering"


def test_drill_fails_if_recovery_had_to_roll_back_from_a_broken_resume(job: Job, fleet: ToldFleet) -> None:
    row = running(fleet, job)
    fleet.save("gpu-01", 1, 10)
    drill = trigger_drill(kind="kill-rank", job_id=job.id, requested_by="tests")
    Drill.objects.update(state="applied", applied_at=1.0)
    kill_and_fence(fleet, job, row)
    replay(fleet, job, live={**DIGEST, "optimizer": "fresh"})
    second = GenerationRow.objects.get(job=job, number=2)
    for name in second.plan["nodes"]:
        fleet.report(name, 2, second.plan_id, SeenPhase.STOPPED)
    advance(job)
    third = run_generation(fleet, job, 3)
    assert third.plan["parent"] == {"generation": 1, "step": 10}
    for rank, name in enumerate(third.plan["nodes"]):
        fleet.start(name, 3, rank, step=10)
        fleet.train(name, 3, rank, range(11, 33))
    advance(job)
    assert IncidentRow.objects.get(job=job).state == "recovered"
    settle_drill(drill.id)
    drill.refresh_from_db()
    assert drill.state == "failed"
    assert "Generation 2 resumed with broken continuity" in " ".join(drill.result["reasons"])
