"""Checkpoint now, notices of maintenance, absolution, the interval and the age of the last good one: API, page, CLI."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from everstep.cli.main import main
from recovery.access import create_api_token
from recovery.models import CheckpointRow, GenerationRow, IncidentRow, Job, Node, RankRow, SaveTrouble, StepRow
from recovery.orders import order_for
from recovery.store.save_intervals import save_every
from tests.integration.api_rows import T0, Caller, make_incident, make_job, make_node, make_story, make_user
from tests.integration.test_api_reads import assert_problem

pytestmark = pytest.mark.django_db


@pytest.fixture
def caller() -> Caller:
    return Caller()


def runnable(job: Job, **spec: Any) -> None:
    """Give a job what an order needs of its spec."""
    job.spec = {**job.spec, "environment": {"SEED": "1"}, "user": "", "stop_limit_s": 30.0, **spec}
    job.save(update_fields=["spec"])


def test_checkpoint_now_rises_the_number_in_the_nodes_orders(caller: Caller) -> None:
    job, _ = make_story()
    runnable(job)
    CheckpointRow.objects.filter(job=job).update(saved_at=time.time() - 60.0)
    node = Node.objects.get(name="gpu-03")
    before = order_for(node.pk)
    response = caller.post("/api/v1/jobs/job_a/actions", {"kind": "checkpoint", "reason": "before the upgrade"})
    assert response.status_code == 202
    after = order_for(node.pk)
    asked = {a.generation: a.save_request for a in after.assignments}
    assert (asked[2], after.revision > before.revision) == (1, True)
    saving = caller.get("/api/v1/jobs/job_a/saving").json()
    assert (saving["request"]["by"], saving["request"]["reason"]) == ("operator", "before the upgrade")
    make_job("job_b", state="pending")
    refused = caller.post("/api/v1/jobs/job_b/actions", {"kind": "checkpoint"})
    assert_problem(refused, status=409, kind="command_refused")


def test_a_notice_of_maintenance_asks_what_runs_there_to_save(caller: Caller) -> None:
    make_story()
    make_node("gpu-09")
    assert caller.post("/api/v1/nodes/gpu-03/maintenance", {"reason": "cables"}).json()["jobs"] == ["job_a"]
    assert caller.post("/api/v1/nodes/gpu-09/maintenance", {}).json()["jobs"] == []
    assert_problem(caller.post("/api/v1/nodes/none/maintenance", {}), status=404, kind="not_found")


def test_absolving_needs_a_tainted_checkpoint_that_is_named(caller: Caller) -> None:
    job, _ = make_story()
    CheckpointRow.objects.filter(job=job, step=50).update(health="tainted", health_reason="the loss was lost")
    body = {"kind": "absolve", "generation": 1, "step": 50}
    assert caller.post("/api/v1/jobs/job_a/actions", body).status_code == 202
    row = CheckpointRow.objects.get(job=job, step=50)
    assert (row.health, row.absolved_through) == ("unknown", 2)
    assert_problem(caller.post("/api/v1/jobs/job_a/actions", body), status=409, kind="command_refused")
    assert_problem(caller.post("/api/v1/jobs/job_a/actions", {"kind": "absolve"}), status=409, kind="command_refused")
    assert_problem(caller.post("/api/v1/jobs/job_a/actions", {**body, "step": 51}), status=404, kind="not_found")


def test_the_ledger_is_shown_with_its_reasons(caller: Caller, client: Client) -> None:
    job, _ = make_story()
    CheckpointRow.objects.filter(job=job, step=100).update(
        integrity="rehashed", integrity_reason="rank 0 read all of it", health="clean", health_reason="10 sane steps"
    )
    Job.objects.filter(pk=job.pk).update(pinned=["1:100"], saves_failed=1)
    SaveTrouble.objects.create(
        job=job, generation_number=2, rank=0, step=150, kind="failed", reason="ENOSPC <b>", at=T0
    )
    newest, oldest = caller.get("/api/v1/jobs/job_a/checkpoints").json()["items"]
    assert (newest["integrity"], newest["health"], newest["pinned"]) == ("rehashed", "clean", True)
    assert (oldest["integrity"], oldest["health"], oldest["pinned"]) == ("complete", "unknown", False)
    client.force_login(make_user("viewer"))
    page = client.get("/jobs/job_a").content.decode()
    for shown in ("Rehashed", "10 sane steps", "pinned", "ENOSPC &lt;b&gt;", "Checkpoint now", "1 failed, 0 skipped"):
        assert shown in page, shown
    assert client.post("/jobs/job_a/checkpoint").status_code == 302
    assert Job.objects.get(pk="job_a").save_request == 1


def test_an_old_last_good_checkpoint_is_told_on_the_page_and_in_the_api(caller: Caller, client: Client) -> None:
    job, _ = make_story()
    long_ago = time.time() - 7200.0
    RankRow.objects.filter(generation__job=job).update(first_step_at=long_ago)
    CheckpointRow.objects.filter(job=job).update(saved_at=long_ago)
    last = caller.get("/api/v1/jobs/job_a/saving").json()["last_good"]
    assert (last["too_old"], last["limit_s"]) == (True, 1800.0)
    client.force_login(make_user("viewer"))
    assert "The last good checkpoint is" in client.get("/jobs/job_a").content.decode()


def test_the_interval_is_shown_with_what_it_was_computed_from(caller: Caller) -> None:
    job, told = make_story()
    now = time.time()
    IncidentRow.objects.filter(pk=told.pk).update(opened_at=now - 100 * 86_400)  # too long ago to count
    CheckpointRow.objects.filter(job=job).update(save_time_s=3.0, blocked_s=0.5)
    StepRow.objects.filter(job=job).update(step_time_s=0.25)
    GenerationRow.objects.filter(job=job, number=1).update(run_ordered_at=now - 36_000, stop_ordered_at=now - 18_000)
    GenerationRow.objects.filter(job=job, number=2).update(run_ordered_at=now - 18_000)
    make_incident(make_job("job_c"), "inc_recent", opened_at=now - 60)
    make_incident(make_job("job_d"), "inc_false", opened_at=now - 60, state="false_alarm", ended=True)
    interval = caller.get("/api/v1/jobs/job_a/saving").json()["interval"]
    assert (interval["save_cost_s"], interval["step_time_s"]) == (0.5, 0.25)
    assert interval["failures"] == 1
    assert interval["node_hours"] == pytest.approx(20.0, abs=0.1)
    assert interval["steps"] == round(interval["interval_s"] / 0.25)
    assert "1 failure in 20 node-hours" in interval["reason"]


def test_an_interval_that_is_auto_goes_down_with_the_launch_once_it_was_measured() -> None:
    job, _ = make_story()
    assert save_every(job, now=time.time()) == ""
    job.spec["save_every"] = "auto"
    assert save_every(job, now=time.time()) == "auto"
    CheckpointRow.objects.filter(job=job).update(blocked_s=0.5)
    StepRow.objects.filter(job=job).update(step_time_s=0.25)
    told = save_every(job, now=time.time())
    assert told.isdecimal()
    row = GenerationRow.objects.get(job=job, number=2)
    row.plan = {**row.plan, "save_every": told}
    row.save()
    runnable(job)
    order = order_for(Node.objects.get(name="gpu-03").pk)
    launch = order.assignments[0].launch
    assert launch is not None
    assert launch.environment == {"SEED": "1", "EVERSTEP_SAVE_EVERY": told}


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_every": 0},
        {"save_every": "often"},
        {"last_good_limit_s": 0},
        {"memory_every": 0},
        {"memory_partner": "x"},
    ],
)
def test_a_spec_with_an_impossible_interval_is_refused(caller: Caller, wrong: dict[str, Any]) -> None:
    job = {"name": "tiny", "argv": ["/usr/bin/python3"], "working_directory": "/w", "checkpoint_directory": "/c"}
    assert_problem(caller.post("/api/v1/jobs", {**job, **wrong}), status=422, kind="validation")
    accepted = caller.post("/api/v1/jobs", {**job, "save_every": "auto", "last_good_limit_s": 600, "memory_every": 5})
    assert accepted.status_code == 201
    spec = Job.objects.get().spec
    assert (spec["save_every"], spec["last_good_limit_s"]) == ("auto", 600.0)
    assert (spec["memory_every"], spec["memory_partner"]) == (5, False)


@pytest.mark.django_db(transaction=True)
def test_the_command_line_asks_for_saves_and_shows_how_saving_goes(
    live_server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, _ = make_story()
    CheckpointRow.objects.filter(job=job, step=100).update(health="tainted")
    CheckpointRow.objects.filter(job=job).update(saved_at=time.time() - 60.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_SERVER", live_server.url)
    monkeypatch.setenv("EVERSTEP_TOKEN", create_api_token(user=make_user(), name="cli"))
    assert main(["job", "checkpoint", "job_a", "--reason", "cables"]) == 0
    assert "will save" in capsys.readouterr().out
    assert main(["node", "maintenance", "gpu-03", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == ["job_a"]
    assert main(["job", "absolve", "job_a", "1:100"]) == 0
    assert main(["job", "absolve", "job_a", "100"]) != 0
    capsys.readouterr()
    assert main(["job", "show", "job_a"]) == 0
    shown = capsys.readouterr().out
    assert "gpu-03: maintenance): not saved yet" in shown
    assert "save interval: " in shown
    assert Job.objects.get(pk="job_a").save_request == 2
