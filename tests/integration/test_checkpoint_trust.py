"""Facts about saves and losses become the ledger, and the ledger decides what is loaded: ingest, sweep and engine."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agents.protocol.messages import (
    AssignmentPhase,
    CheckpointRehashed,
    CheckpointSaved,
    SaveInTrouble,
    SaveTroubleKind,
    SeenPhase,
    StepReport,
    StepReports,
)
from recovery import checkpoints, engine, jobs
from recovery.errors import CommandRefused
from recovery.models import CheckpointRow, GenerationRow, IncidentRow, Job, SaveTrouble, TimelineEntry
from recovery.orders import order_for
from recovery.queries.saving import job_saving
from tests.fakes.told_fleet import ToldFleet

pytestmark = pytest.mark.django_db(transaction=True)

SPEC = {
    "name": "tiny",
    "argv": ["/usr/bin/python3", "train.py"],
    "working_directory": "/tmp",
    "checkpoint_directory": "/tmp/checkpoints",
    "nodes": 2,
    "total_steps": 100,
}
NAN = float("nan")


@pytest.fixture
def job() -> Job:
    return jobs.submit_job(SPEC, owner="tests")


def advance(job: Job) -> None:
    incident = IncidentRow.objects.filter(job=job, ended=False).first()
    if incident:
        engine.advance_incident(incident.pk)
    else:
        engine.advance_job(job.id)


def launch(fleet: ToldFleet, job: Job, number: int) -> GenerationRow:
    """Play prepare and run of a generation, until its ranks enter their training loop."""
    row = GenerationRow.objects.get(job=job, number=number)
    for rank, name in enumerate(row.plan["nodes"]):
        port = {"master_port": 20001} if rank == 0 else {}
        fleet.report(name, number, row.plan_id, SeenPhase.PREPARED, **port)
    advance(job)
    row.refresh_from_db()
    assert row.wanted == AssignmentPhase.RUN.value
    step = row.plan["parent"]["step"] if row.plan["parent"] else 0
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.start(name, number, rank, step=step)
    return row


def train(fleet: ToldFleet, row: GenerationRow, steps: range, *, loss: float | None = None) -> None:
    for rank, name in enumerate(row.plan["nodes"]):
        reports = [
            StepReport(
                rank=rank, step=s, at=time.time(), loss=5.0 / s if loss is None else loss, learning_rate=1e-3,
                span_start=8 * (s - 1), span_stop=8 * s,
            )
            for s in steps
        ]  # fmt: skip
        fleet.nodes[name].tell(StepReports(job=fleet.job, generation=row.number, steps=reports))


def running(fleet: ToldFleet, job: Job) -> GenerationRow:
    """Generation 1 with saves at steps 0, 10, 20 and 30, of 35 sane steps."""
    advance(job)
    row = launch(fleet, job, 1)
    fleet.save(row.plan["nodes"][0], 1, 0)
    for first in (1, 11, 21):
        train(fleet, row, range(first, first + 10))
        fleet.save(row.plan["nodes"][0], 1, first + 9)
    train(fleet, row, range(31, 36))
    advance(job)
    checkpoints.look_after_checkpoints(job.id)
    return row


def stopped(fleet: ToldFleet, job: Job, row: GenerationRow) -> None:
    for name in row.plan["nodes"]:
        fleet.report(name, row.number, row.plan_id, SeenPhase.STOPPED)
    advance(job)


def ledger(job: Job) -> dict[tuple[int, int], tuple[str, str]]:
    return {
        (row.generation_number, row.step): (row.integrity, row.health) for row in CheckpointRow.objects.filter(job=job)
    }


def told(incident: IncidentRow) -> list[str]:
    return list(TimelineEntry.objects.filter(incident=incident).values_list("text", flat=True))


def test_checkpoints_become_clean_once_ten_sane_steps_follow(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    assert {step: health for (_, step), (_, health) in ledger(job).items()} == {
        0: "clean", 10: "clean", 20: "clean", 30: "unknown",
    }  # fmt: skip


def test_a_spike_after_a_save_leaves_it_unknown_with_the_reason(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    train(fleet, row, range(36, 41), loss=90.0)
    checkpoints.look_after_checkpoints(job.id)
    found = CheckpointRow.objects.get(job=job, step=30)
    assert (found.health, "loss 90 at step 36" in found.health_reason) == ("unknown", True)


def test_rehashing_raises_integrity_and_damage_ends_it(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    said: dict[str, Any] = {"job": job.id, "generation": 1, "rank": 0, "at": time.time()}
    fleet.nodes["gpu-01"].tell(
        CheckpointRehashed(step=20, ok=True, **said),
        CheckpointRehashed(step=30, ok=False, reason="__0_0.distcp differs from its hash", **said),
    )
    assert ledger(job)[1, 20] == ("rehashed", "clean")
    assert ledger(job)[1, 30] == ("damaged", "unknown")
    fleet.nodes["gpu-01"].tell(CheckpointRehashed(step=30, ok=True, **said))
    assert ledger(job)[1, 30] == ("damaged", "unknown")
    fleet.die("gpu-02", 1, 1)
    advance(job)
    advance(job)
    plan = GenerationRow.objects.get(job=job, number=2).plan
    assert plan["parent"] == {"generation": 1, "step": 20}
    assert "passing over step 30 of generation 1: damaged" in plan["parent_reason"]


def test_a_checkpoint_that_a_rank_finds_damaged_while_it_loads_is_not_tried_again(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    stopped(fleet, job, row)
    second = GenerationRow.objects.get(job=job, number=2)
    for rank, name in enumerate(second.plan["nodes"]):
        port = {"master_port": 20001} if rank == 0 else {}
        fleet.report(name, 2, second.plan_id, SeenPhase.PREPARED, **port)
    advance(job)
    detail = "everstep.errors.CheckpointDamaged: step-00000030/__1_0.distcp is not what its manifest says."
    fleet.die(second.plan["nodes"][1], 2, 1, signal=None, exit_code=1, detail=detail)
    advance(job)
    for name in second.plan["nodes"]:
        fleet.report(name, 2, second.plan_id, SeenPhase.STOPPED)
    advance(job)
    assert GenerationRow.objects.get(job=job, number=3).plan["parent"] == {"generation": 1, "step": 20}


def test_a_lost_loss_opens_an_incident_that_rolls_back_to_the_newest_clean_checkpoint(
    fleet: ToldFleet, job: Job
) -> None:
    row = running(fleet, job)
    train(fleet, row, range(36, 38), loss=NAN)
    advance(job)
    assert not IncidentRow.objects.filter(job=job).exists()
    train(fleet, row, range(38, 39), loss=NAN)
    advance(job)
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert incident.body["cause"]["kind"] == "loss_not_finite"
    stopped(fleet, job, row)
    plan = GenerationRow.objects.get(job=job, number=2).plan
    assert plan["parent"] == {"generation": 1, "step": 20}
    assert "preferred to step 30 of generation 1" in plan["parent_reason"]
    assert any("lost its loss" in text for text in told(incident))


def test_a_loss_that_is_not_finite_for_two_steps_only_is_let_pass(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    train(fleet, row, range(36, 38), loss=float("inf"))
    train(fleet, row, range(38, 40))
    train(fleet, row, range(40, 42), loss=float("inf"))
    advance(job)
    assert not IncidentRow.objects.filter(job=job).exists()


def test_case_R08_nan_three_steps_after_a_load_twice_quarantines_both_and_pages(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    stopped(fleet, job, row)
    second = launch(fleet, job, 2)
    assert second.plan["parent"] == {"generation": 1, "step": 30}
    train(fleet, second, range(31, 33))
    train(fleet, second, range(33, 36), loss=NAN)
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    checkpoints.look_after_checkpoints(job.id)
    assert ledger(job)[1, 30][1] == "tainted"
    stopped(fleet, job, second)
    third = launch(fleet, job, 3)
    assert third.plan["parent"] == {"generation": 1, "step": 20}
    train(fleet, third, range(21, 23))
    train(fleet, third, range(23, 26), loss=NAN)
    advance(job)
    incident.refresh_from_db()
    assert incident.state == "escalated"
    checkpoints.look_after_checkpoints(job.id)
    assert {step for (_, step), (_, health) in ledger(job).items() if health == "tainted"} == {20, 30}
    # A human who tries again gets the newest that is left, never one of those.
    from recovery.incidents import command_incident

    command_incident(incident.pk, kind="retry", by="tests")
    advance(job)
    stopped(fleet, job, third)
    assert GenerationRow.objects.get(job=job, number=4).plan["parent"] == {"generation": 1, "step": 10}


def test_case_R35_each_attempt_has_a_run_id_of_its_own(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    stopped(fleet, job, row)
    second = launch(fleet, job, 2)
    fleet.die("gpu-02", 2, 1)
    advance(job)
    stopped(fleet, job, second)
    third = launch(fleet, job, 3)
    assert len({second.plan["run_id"], third.plan["run_id"]}) == 2
    assert second.plan["run_id"].startswith("run_")


def test_case_R47_nan_at_the_same_step_after_a_roll_back_pages_instead_of_rolling_back_for_ever(
    fleet: ToldFleet, job: Job
) -> None:
    row = running(fleet, job)
    train(fleet, row, range(36, 39), loss=NAN)
    advance(job)
    advance(job)
    stopped(fleet, job, row)
    second = launch(fleet, job, 2)
    train(fleet, second, range(21, 36))
    train(fleet, second, range(36, 39), loss=NAN)
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert incident.state == "escalated"
    assert "lost again" in incident.body["escalation"]
    assert "generation 1 had lost it at step 36 too" in incident.body["escalation"]
    assert not GenerationRow.objects.filter(job=job, number=3).exists()


def test_case_R47_a_roll_back_that_gets_past_the_bad_step_is_recovered(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    train(fleet, row, range(36, 39), loss=NAN)
    advance(job)
    advance(job)
    stopped(fleet, job, row)
    second = launch(fleet, job, 2)
    train(fleet, second, range(21, 60))
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert incident.state == "recovered", told(incident)
    assert incident.receipt is not None
    assert incident.receipt["verdict"]["kind"] == "bit-equal"
    checkpoints.look_after_checkpoints(job.id)
    assert ledger(job)[1, 20] == ("test_loaded", "resumed_from")


def test_a_failed_save_is_counted_and_told_and_leaves_the_last_good_one(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    said: dict[str, Any] = {"job": job.id, "generation": 1, "rank": 0, "at": time.time()}
    fleet.nodes["gpu-01"].tell(
        SaveInTrouble(step=40, kind=SaveTroubleKind.FAILED, attempt=1, reason="No space left on device", **said),
        SaveInTrouble(step=40, kind=SaveTroubleKind.FAILED, attempt=2, reason="No space left on device", **said),
        SaveInTrouble(step=40, kind=SaveTroubleKind.FAILED, attempt=2, reason="No space left on device", **said),
        SaveInTrouble(step=50, kind=SaveTroubleKind.SKIPPED, reason="step 40 is still being written", **said),
    )
    job.refresh_from_db()
    assert (job.saves_failed, job.saves_skipped) == (2, 1)
    assert SaveTrouble.objects.filter(job=job).count() == 3
    assert max(step for _, step in ledger(job)) == 30
    fleet.die("gpu-02", 1, 1)
    fleet.nodes["gpu-01"].tell(SaveInTrouble(step=60, kind=SaveTroubleKind.FAILED, reason="read-only", **said))
    assert "The save of step 60 failed: read-only" in told(IncidentRow.objects.get(job=job))


def test_case_R11_slow_store_is_told_and_neither_stops_the_job_nor_costs_a_node(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    nodes = row.plan["nodes"]

    def saved(step: int, save_time_s: float) -> None:
        fleet.nodes["gpu-01"].tell(
            CheckpointSaved(
                job=job.id, generation=1, step=step, at=time.time(), directory=f"/c/{step}", size_bytes=1,
                world_size=2, save_time_s=save_time_s, blocked_s=0.1,
            )
        )  # fmt: skip

    for step in (40, 50, 60):
        saved(step, 4.0)
    assert not SaveTrouble.objects.filter(job=job).exists()
    saved(70, 47.0)
    saved(70, 47.0)  # told twice
    trouble = SaveTrouble.objects.get(job=job)
    assert (trouble.kind, trouble.step) == ("slow", 70)
    assert "storage is slow" in trouble.reason
    advance(job)
    checkpoints.look_after_checkpoints(job.id)
    job.refresh_from_db()
    row.refresh_from_db()
    assert not IncidentRow.objects.filter(job=job).exists()
    assert (job.state, row.wanted, row.plan["nodes"]) == ("running", AssignmentPhase.RUN.value, nodes)
    assert job_saving(job.id).troubles[0].kind == "slow"
    fleet.die("gpu-02", 1, 1)
    saved(80, 50.0)
    sentences = told(IncidentRow.objects.get(job=job))
    assert any(text.startswith("The save of step 80 was slow: it took 50.0 s") for text in sentences)


def test_orders_pin_the_newest_of_each_class_for_the_ranks(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    said: dict[str, Any] = {"job": job.id, "generation": 1, "rank": 0, "at": time.time()}
    fleet.nodes["gpu-01"].tell(CheckpointRehashed(step=10, ok=True, **said))
    before = order_for(fleet.nodes["gpu-01"].row.pk)
    checkpoints.look_after_checkpoints(job.id)
    order = order_for(fleet.nodes["gpu-01"].row.pk)
    assert before.assignments[0].keep == ["1:20"]
    assert order.assignments[0].keep == ["1:10", "1:20"]
    assert order.revision > before.revision


def test_a_request_to_save_rises_and_reaches_the_nodes(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    before = order_for(fleet.nodes["gpu-01"].row.pk)
    checkpoints.request_save(job.id, by="anna", reason="before the upgrade")
    after = order_for(fleet.nodes["gpu-01"].row.pk)
    assert (before.assignments[0].save_request, after.assignments[0].save_request) == (0, 1)
    assert after.revision > before.revision
    job.refresh_from_db()
    assert checkpoints.saved_since_request(job) is None
    fleet.save("gpu-01", 1, 36)
    assert checkpoints.saved_since_request(job) == 36


def test_a_notice_of_maintenance_saves_what_runs_on_the_node(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    assert checkpoints.request_saves_on("gpu-02", by="anna", reason="new cables") == [job.id]
    assert checkpoints.request_saves_on("gpu-03", by="anna", reason="new cables") == []
    job.refresh_from_db()
    assert (job.save_request, job.save_request_reason) == (1, "gpu-02: new cables")


def test_only_a_running_job_can_be_asked_to_save(job: Job) -> None:
    with pytest.raises(CommandRefused, match="only a running job"):
        checkpoints.request_save(job.id, by="anna")


def test_pages_once_when_the_last_good_checkpoint_is_too_old(
    fleet: ToldFleet, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    row = running(fleet, job)
    long_ago = time.time() - 7200.0
    CheckpointRow.objects.filter(job=job).update(saved_at=long_ago)
    row.ranks.update(first_step_at=long_ago)
    for _ in range(2):
        checkpoints.look_after_checkpoints(job.id)
    pages = [record for record in caplog.records if "page: job" in record.message]
    assert len(pages) == 1
    assert "limit is 1800 s" in pages[0].message
    fleet.save("gpu-01", 1, 36)
    checkpoints.look_after_checkpoints(job.id)
    job.refresh_from_db()
    assert job.last_good_paged_at is None


def test_an_operator_can_absolve_a_tainted_checkpoint_but_not_what_a_broken_generation_saved(
    fleet: ToldFleet, job: Job
) -> None:
    row = running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    stopped(fleet, job, row)
    second = launch(fleet, job, 2)
    train(fleet, second, range(31, 33))
    train(fleet, second, range(33, 36), loss=NAN)
    fleet.save("gpu-01", 2, 36)
    advance(job)
    checkpoints.look_after_checkpoints(job.id)
    assert (ledger(job)[1, 30][1], ledger(job)[2, 36][1]) == ("tainted", "tainted")
    checkpoints.absolve(job.id, generation=1, step=30, by="anna")
    checkpoints.look_after_checkpoints(job.id)
    assert ledger(job)[1, 30][1] == "unknown"
    with pytest.raises(CommandRefused, match="stays tainted"):
        checkpoints.absolve(job.id, generation=2, step=36, by="anna")
