"""A database that was restored from a backup learns from its agents what really runs, and stops nothing healthy."""

from __future__ import annotations

import logging
import time

import pytest

from agents.protocol.messages import AssignmentPhase, HighestGeneration, LaunchSpec, SeenPhase
from recovery import fencing, jobs, queries
from recovery.models import GenerationRow, IncidentRow, Job, Node, ShareRow, Stray
from recovery.orders import order_for
from recovery.store.timelines import first_broken_link
from recovery.strays import settle_strays
from recovery.sweep import sweep
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC, advance

pytestmark = [pytest.mark.django_db, pytest.mark.job_trains]


def launch(node_rank: int, **changes: object) -> LaunchSpec:
    given = {
        "argv": SPEC["argv"],
        "working_directory": "/tmp",
        "environment": {},
        "run_id": "run-lost",
        "node_rank": node_rank,
        "node_count": 2,
        "ranks_per_node": 1,
        "first_rank": node_rank,
        "world_size": 2,
        "master_address": "127.0.0.1",
        "master_port": 20002,
        "checkpoint_directory": "/tmp/checkpoints",
        "parent_generation": 1,
        "parent_step": 20,
        **changes,
    }
    return LaunchSpec(**given)  # type: ignore[arg-type]


def come_back(fleet: ToldFleet, job: Job, name: str, *, newest: int = 2) -> None:
    highest = [HighestGeneration(job=job.id, generation=newest, plan_id=f"plan-{newest}")]
    fleet.connect(name, highest=highest)


def says_it_runs(fleet: ToldFleet, name: str, node_rank: int, number: int = 2, **changes: object) -> None:
    fleet.report(
        name, number, f"plan-{number}", SeenPhase.RUNNING,
        launch=launch(node_rank, **changes), boot_id=f"boot-{name}", keeps_lease=True,
    )  # fmt: skip


def wanted(fleet: ToldFleet, name: str) -> dict[int, AssignmentPhase]:
    order = order_for(fleet.nodes[name].row.pk)
    return {one.generation: one.phase for one in order.assignments}


def wait_60_s(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(behind_since=time.time() - 61.0)


RUN, STOP = AssignmentPhase.RUN, AssignmentPhase.STOP


def test_generation_that_all_its_nodes_report_is_taken_over_and_nothing_of_it_is_stopped(
    job: Job, fleet: ToldFleet
) -> None:
    """Lost: generation 2 went from gpu-01 and gpu-02 to gpu-01 and gpu-03."""
    for name in ("gpu-01", "gpu-03"):
        come_back(fleet, job, name)
    job.refresh_from_db()
    assert (job.generation, job.behind_since is not None) == (2, True)
    says_it_runs(fleet, "gpu-01", 0)
    assert 2 not in wanted(fleet, "gpu-01"), "a generation that is not named is left alone"
    says_it_runs(fleet, "gpu-03", 1)
    sweep()
    job.refresh_from_db()
    assert (job.state, job.behind_since, job.generation) == ("running", None, 2)
    assert "found running and taken over" in job.reason
    row = GenerationRow.objects.get(job=job, number=2)
    assert row.lease is None, "its runners' terms are not known here"
    assert (row.adopted, row.wanted, row.plan["nodes"], row.master_port) == (True, "run", ["gpu-01", "gpu-03"], 20002)
    assert (row.plan["parent"], row.plan["run_id"]) == ({"generation": 1, "step": 20}, "run-lost")
    assert wanted(fleet, "gpu-01") == {1: STOP, 2: RUN}
    assert wanted(fleet, "gpu-03") == {2: RUN}
    assert wanted(fleet, "gpu-02") == {1: STOP}
    claimed = Node.objects.filter(claimed_by=job).values_list("name", flat=True)
    assert list(claimed) == ["gpu-01", "gpu-02", "gpu-03"], "gpu-02 is not proven empty of generation 1 yet"
    assert not Stray.objects.exists()
    assert not IncidentRow.objects.exists()
    assert queries.get_job(job.id).generations[-1].adopted


def test_job_trains_on_after_it_was_taken_over_and_its_next_fault_is_an_ordinary_one(
    job: Job, fleet: ToldFleet
) -> None:
    for rank, name in enumerate(("gpu-01", "gpu-03")):
        come_back(fleet, job, name)
        says_it_runs(fleet, name, rank)
    sweep()
    for rank, name in enumerate(("gpu-01", "gpu-03")):
        fleet.train(name, 2, rank, range(40, 50))
    sweep()
    job.refresh_from_db()
    assert (job.state, job.last_step) == ("running", 49)
    assert not IncidentRow.objects.exists()
    fleet.die("gpu-03", 2, 1)
    advance(job)
    incident = IncidentRow.objects.get()
    assert incident.body["broken_generation"] == 2
    assert wanted(fleet, "gpu-01")[2] is STOP


def test_nothing_is_concluded_while_one_of_its_nodes_is_unseen_and_a_human_is_paged(
    job: Job, fleet: ToldFleet, caplog: pytest.LogCaptureFixture
) -> None:
    come_back(fleet, job, "gpu-01")
    says_it_runs(fleet, "gpu-01", 0)
    fleet.die("gpu-02", 1, 1)
    for _ in range(2):
        sweep()
        advance(job)
    assert not IncidentRow.objects.exists(), "a death in generation 1 says nothing while generation 2 runs"
    assert GenerationRow.objects.filter(job=job).count() == 1
    assert 2 not in wanted(fleet, "gpu-01")
    assert wanted(fleet, "gpu-01")[1] is RUN
    wait_60_s(job)
    with caplog.at_level(logging.ERROR, logger="recovery.strays"):
        sweep()
        sweep()
    assert [record.message for record in caplog.records if record.message.startswith("page:")] == [
        f"page: job={job.id} Generation 2 runs on gpu-01; 1 of its 2 nodes are unseen. Bring them back, or stop the "
        "job. Until then nothing is done for this job."
    ]
    assert queries.get_job(job.id).reason.startswith("Generation 2 runs on gpu-01; 1 of its 2 nodes are unseen.")
    assert GenerationRow.objects.filter(job=job).count() == 1, "nothing is relaunched"
    says_it_runs(fleet, "gpu-03", 1)
    sweep()
    job.refresh_from_db()
    assert (job.behind_since, GenerationRow.objects.filter(job=job).count()) == (None, 2)


def test_older_stray_is_ordered_to_stop_and_the_newest_is_taken_over(job: Job, fleet: ToldFleet) -> None:
    """gpu-02 missed the end of generation 2; generation 3 runs elsewhere."""
    come_back(fleet, job, "gpu-01", newest=3)
    come_back(fleet, job, "gpu-03", newest=3)
    come_back(fleet, job, "gpu-02", newest=2)
    says_it_runs(fleet, "gpu-02", 1, 2)
    says_it_runs(fleet, "gpu-01", 0, 3)
    says_it_runs(fleet, "gpu-03", 1, 3)
    sweep()
    assert list(GenerationRow.objects.filter(wanted="run").values_list("number", flat=True)) == [3]
    revision = Node.objects.get(name="gpu-02").revision
    assert wanted(fleet, "gpu-02") == {1: STOP, 2: STOP}
    assert revision > 0
    fleet.report("gpu-02", 2, "plan-2", SeenPhase.STOPPED)
    assert wanted(fleet, "gpu-02") == {1: STOP}


def test_stray_of_a_job_that_has_ended_or_is_to_be_stopped_is_ordered_to_stop(job: Job, fleet: ToldFleet) -> None:
    for change in ({"state": "stopped", "stop_wanted": True}, {"state": "running", "stop_wanted": True}):
        Job.objects.filter(pk=job.pk).update(**change)
        come_back(fleet, job, "gpu-03")
        says_it_runs(fleet, "gpu-03", 0)
        assert wanted(fleet, "gpu-03") == {2: STOP}
        settle_strays(job.id)
        assert not GenerationRow.objects.filter(job=job, number=2).exists()


def test_stop_that_was_asked_for_comes_to_its_end_though_strays_run(job: Job, fleet: ToldFleet) -> None:
    for rank, name in enumerate(("gpu-01", "gpu-02")):
        come_back(fleet, job, name)
        says_it_runs(fleet, name, rank)
    jobs.stop_job(job.id, by="alice")
    sweep()
    assert wanted(fleet, "gpu-01") == {1: STOP, 2: STOP}
    plan_id = GenerationRow.objects.get().plan_id
    for name in ("gpu-01", "gpu-02"):
        fleet.report(name, 1, plan_id, SeenPhase.STOPPED)
    sweep()
    job.refresh_from_db()
    assert job.state != "stopped", "generation 2 is not proven gone"
    for name in ("gpu-01", "gpu-02"):
        fleet.report(name, 2, "plan-2", SeenPhase.STOPPED)
    wait_60_s(job)
    sweep()
    sweep()
    job.refresh_from_db()
    assert job.state == "stopped"


def test_nothing_is_launched_while_an_unseen_node_may_run_what_the_database_does_not_know(
    job: Job, fleet: ToldFleet
) -> None:
    """Generation 2 may run on gpu-03 alone, which has not come back; gpu-01 only remembers its number."""
    come_back(fleet, job, "gpu-01")
    fleet.fall_silent("gpu-03", for_s=200)
    wait_60_s(job)
    fleet.die("gpu-02", 1, 1)
    for _ in range(3):
        sweep()
    assert GenerationRow.objects.filter(job=job).count() == 1
    assert "may run on gpu-03, which cannot be seen" in queries.get_job(job.id).reason
    assert queries.get_node("gpu-03").fence_refusal == ""
    fencing.attest_power_off("gpu-03", confirm="gpu-03", statement="", by="alice")
    sweep()
    job.refresh_from_db()
    assert (job.behind_since, job.reason) == (None, "")
    advance(job)
    assert IncidentRow.objects.get().body["broken_generation"] == 1


def test_incident_that_was_restored_with_the_backup_does_not_stop_what_was_found_running(
    job: Job, fleet: ToldFleet
) -> None:
    fleet.die("gpu-02", 1, 1)
    advance(job)
    assert IncidentRow.objects.get().state == "stopping"
    planned = GenerationRow.objects.latest("number")
    assert (planned.number, planned.wanted) == (2, "prepare")
    for rank, name in enumerate(("gpu-01", "gpu-03")):
        come_back(fleet, job, name, newest=3)
        says_it_runs(fleet, name, rank, 3)
    for _ in range(3):
        sweep()
    incident = IncidentRow.objects.get()
    assert (incident.state, incident.ended) == ("cancelled", True)
    assert "restored from a backup" in incident.entries.latest("seq").text
    assert first_broken_link(incident.pk) is None
    assert wanted(fleet, "gpu-01") == {1: STOP, 2: STOP, 3: RUN}
    job.refresh_from_db()
    assert job.state == "running"


def test_lease_of_a_generation_that_was_taken_over_proves_nothing(job: Job, fleet: ToldFleet) -> None:
    """Its runners may hold longer terms than this database ever knew."""
    for rank, name in enumerate(("gpu-01", "gpu-03")):
        come_back(fleet, job, name)
        says_it_runs(fleet, name, rank)
    sweep()
    fleet.train("gpu-01", 2, 0, range(21, 30))
    fleet.fall_silent("gpu-03", for_s=4000)
    fleet.die("gpu-01", 2, 0, signal=None, exit_code=1, detail="Connection closed by peer")
    for _ in range(3):
        sweep()
    assert IncidentRow.objects.get().body["cause"]["kind"] == "node_lost"
    assert ShareRow.objects.get(generation__number=2, node__name="gpu-03").proof is None
    (waiting,) = [one for one in queries.get_incident(IncidentRow.objects.get().pk).waiting_for if one.node == "gpu-03"]
    assert waiting.lease_ends_at is None


def test_nodes_that_disagree_about_the_generation_are_not_taken_over(job: Job, fleet: ToldFleet) -> None:
    for rank, name in enumerate(("gpu-01", "gpu-03")):
        come_back(fleet, job, name)
        says_it_runs(fleet, name, rank, run_id=f"run-{rank}")
    sweep()
    assert not GenerationRow.objects.filter(job=job, number=2).exists()


def test_generation_on_a_node_of_another_job_is_not_taken_over(job: Job, fleet: ToldFleet) -> None:
    other = jobs.submit_job(SPEC, owner="tests")
    Node.objects.filter(name="gpu-03").update(claimed_by=other)
    for rank, name in enumerate(("gpu-01", "gpu-03")):
        come_back(fleet, job, name)
        says_it_runs(fleet, name, rank)
    wait_60_s(job)
    sweep()
    assert not GenerationRow.objects.filter(job=job, number=2).exists()
    assert Node.objects.get(name="gpu-03").claimed_by_id == other.id
    assert f"gpu-03 is held by job {other.id} here" in queries.get_job(job.id).reason


def test_database_goes_on_with_what_it_knows_once_nobody_runs_the_newer_generation(job: Job, fleet: ToldFleet) -> None:
    come_back(fleet, job, "gpu-01")
    sweep()
    job.refresh_from_db()
    assert job.behind_since is not None
    wait_60_s(job)
    sweep()
    job.refresh_from_db()
    assert (job.behind_since, job.generation) == (None, 2)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    for name in ("gpu-01", "gpu-02"):
        fleet.report(name, 1, GenerationRow.objects.get(number=1).plan_id, SeenPhase.STOPPED)
    advance(job)
    newest = GenerationRow.objects.filter(job=job).latest("number")
    assert newest.number == 3, "never a number that an agent has on disk"


def test_hello_with_a_number_that_no_job_ever_reaches_lifts_nothing(job: Job, fleet: ToldFleet) -> None:
    come_back(fleet, job, "gpu-01", newest=10**9)
    job.refresh_from_db()
    assert (job.generation, job.behind_since) == (1, None)


def test_node_that_reports_again_and_again_makes_one_stray(job: Job, fleet: ToldFleet) -> None:
    come_back(fleet, job, "gpu-01")
    for _ in range(3):
        says_it_runs(fleet, "gpu-01", 0)
    assert Stray.objects.count() == 1
    fleet.report("gpu-01", 2, "plan-2", SeenPhase.STOPPED)
    assert not Stray.objects.exists()
    assert not ShareRow.objects.filter(generation__number=2).exists()
