"""What nodes say to hold in memory becomes rows, and a plan goes on from it: ingest, engine and orders."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agents.protocol.messages import AssignmentPhase, SeenPhase, SnapshotKept
from recovery import engine, jobs
from recovery.models import GenerationRow, IncidentRow, Job, Node, SnapshotRow, TimelineEntry
from recovery.orders import order_for
from tests.fakes.told_fleet import ToldFleet

pytestmark = pytest.mark.django_db(transaction=True)

SPEC: dict[str, Any] = {
    "name": "tiny",
    "argv": ["/usr/bin/python3", "train.py"],
    "working_directory": "/tmp",
    "checkpoint_directory": "/tmp/checkpoints",
    "nodes": 2,
    "total_steps": 100,
    "memory_every": 4,
    "memory_partner": True,
}


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


def keep(fleet: ToldFleet, row: GenerationRow, step: int, *, copies: bool = False) -> None:
    """Every rank tells of its part, with its partner's part where there are copies."""
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.nodes[name].tell(
            SnapshotKept(
                job=fleet.job, generation=row.number, rank=rank, step=step, at=time.time(), world_size=2,
                copy_of=1 - rank if copies else None,
            )
        )  # fmt: skip


def running(fleet: ToldFleet, job: Job, *, copies: bool = False) -> GenerationRow:
    """Generation 1, saved to disk at steps 0 and 10, kept in memory at 12 and 16, at step 18."""
    advance(job)
    row = launch(fleet, job, 1)
    fleet.save(row.plan["nodes"][0], 1, 0)
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.train(name, 1, rank, range(1, 19))
    fleet.save(row.plan["nodes"][0], 1, 10)
    keep(fleet, row, 12, copies=copies)
    keep(fleet, row, 16, copies=copies)
    advance(job)
    return row


def next_plan(fleet: ToldFleet, job: Job, row: GenerationRow) -> dict[str, Any]:
    """The plan after rank 1 has died."""
    fleet.die("gpu-02", row.number, 1)
    advance(job)
    advance(job)
    plan: dict[str, Any] = GenerationRow.objects.get(job=job, number=row.number + 1).plan
    return plan


def launch_of(name: str) -> Any:
    order = order_for(Node.objects.get(name=name).pk)
    return order.assignments[-1].launch


def test_dead_rank_goes_on_from_memory_and_the_order_says_so(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    environment = launch_of("gpu-01").environment
    assert (environment["EVERSTEP_MEMORY_EVERY"], environment["EVERSTEP_MEMORY_PARTNER"]) == ("4", "1")
    assert not launch_of("gpu-01").parent_in_memory
    plan = next_plan(fleet, job, row)
    assert (plan["parent"], plan["parent_in_memory"]) == ({"generation": 1, "step": 16}, True)
    launched = launch_of("gpu-01")
    assert (launched.parent_generation, launched.parent_step, launched.parent_in_memory) == (1, 16, True)
    told = " ".join(TimelineEntry.objects.values_list("text", flat=True))
    assert "from step 16 of generation 1, in memory" in told


def test_snapshot_that_was_not_there_is_not_tried_again(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job)
    next_plan(fleet, job, row)
    for name in row.plan["nodes"]:
        fleet.report(name, 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    second = GenerationRow.objects.get(job=job, number=2)
    for rank, name in enumerate(second.plan["nodes"]):
        port = {"master_port": 20001} if rank == 0 else {}
        fleet.report(name, 2, second.plan_id, SeenPhase.PREPARED, **port)
    advance(job)
    fleet.die("gpu-02", 2, 1, detail="everstep.errors.CheckpointMissing: There is no complete checkpoint at /tmp")
    assert not SnapshotRow.objects.filter(job=job).exists()
    advance(job)
    for name in second.plan["nodes"]:
        fleet.report(name, 2, second.plan_id, SeenPhase.STOPPED)
    for _ in range(3):
        advance(job)
    third = GenerationRow.objects.get(job=job, number=3).plan
    assert (third["parent"], third["parent_in_memory"]) == ({"generation": 1, "step": 10}, False)


def test_node_may_remove_what_is_not_needed_any_more(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    node = Node.objects.get(name="gpu-01")
    assert order_for(node.pk).memory_of == [job.id]
    assert order_for(Node.objects.get(name="gpu-03").pk).memory_of == []
    jobs.stop_job(job.id, by="tests")
    advance(job)
    for name in ("gpu-01", "gpu-02"):
        fleet.report(name, 1, GenerationRow.objects.get(job=job, number=1).plan_id, SeenPhase.STOPPED)
    advance(job)
    before, node = node.revision, Node.objects.get(name="gpu-01")
    assert Job.objects.get(pk=job.pk).state == "stopped"
    assert order_for(node.pk).memory_of == [] and node.revision > before


def test_only_the_newest_parts_are_remembered_and_older_generations_forgotten(fleet: ToldFleet, job: Job) -> None:
    row = running(fleet, job, copies=True)
    keep(fleet, row, 17)
    keep(fleet, row, 18)
    steps = SnapshotRow.objects.filter(job=job, node__name="gpu-01", rank=0).values_list("step", flat=True)
    assert sorted(steps) == [16, 17, 18]
    assert SnapshotRow.objects.filter(job=job, node__name="gpu-01", rank=1).exists(), "the partner's"
    next_plan(fleet, job, row)
    for name in row.plan["nodes"]:
        fleet.report(name, 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    second = launch(fleet, job, 2)
    keep(fleet, second, 20)
    assert {generation for (generation,) in SnapshotRow.objects.values_list("generation_number")} == {2}


def test_node_without_a_share_of_the_generation_is_not_believed(fleet: ToldFleet, job: Job) -> None:
    running(fleet, job)
    said = SnapshotKept(job=job.id, generation=1, rank=0, step=90, at=time.time(), world_size=1)
    fleet.nodes["gpu-03"].tell(said)
    assert not SnapshotRow.objects.filter(node__name="gpu-03").exists()


def test_what_is_told_of_before_a_reboot_is_not_in_memory_any_more(fleet: ToldFleet, job: Job) -> None:
    """The outbox survives a reboot, the memory does not."""
    row = running(fleet, job)
    fleet.report("gpu-02", 1, row.plan_id, SeenPhase.RUNNING, boot_id="boot-gpu-02")
    fleet.connect("gpu-02", boot="another")
    keep(fleet, row, 17)
    told = SnapshotRow.objects.filter(step=17).values_list("node__name", flat=True)
    assert list(told) == ["gpu-01"]
