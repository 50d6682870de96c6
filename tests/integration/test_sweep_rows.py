"""One sweep over many: what fails holds up nothing else, and what can never work is told to a human."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import F

from recovery import engine, jobs, sweep
from recovery.actuators import Conflict
from recovery.models import Claim, Job, Node
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC

pytestmark = pytest.mark.django_db(transaction=True)


def test_job_that_the_rows_forbid_to_go_on_pages_once_and_goes_on_when_they_allow_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = jobs.submit_job(SPEC, owner="tests")
    ToldFleet.of(job.id, "gpu-01", "gpu-02")
    tries = []

    def refuse(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise Conflict("a node of plan_x is no longer free and healthy")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(engine, "perform", refuse)
        engine.advance_job(job.id)
        engine.advance_job(job.id)
    assert len(tries) == 2 * engine.MAX_CONFLICTS
    assert [record.message for record in caplog.records if "page:" in record.message] == [
        f"page: job={job.id} It cannot go on: what was decided for it is refused each time "
        "(a node of plan_x is no longer free and healthy)."
    ]
    engine.advance_job(job.id)
    assert Job.objects.get(pk=job.pk).state == "placing"


def test_jobs_of_one_sweep_look_at_one_fleet_and_still_share_no_node() -> None:
    first, second = (jobs.submit_job({**SPEC, "nodes": 2}, owner="tests") for _ in range(2))
    ToldFleet.of(first.id, "gpu-01", "gpu-02", "gpu-03", "gpu-04")
    sweep.sweep()
    assert {Job.objects.get(pk=job.pk).state for job in (first, second)} == {"placing"}
    assert Node.objects.filter(claimed_by=first).count() == Node.objects.filter(claimed_by=second).count() == 2


def test_no_limit_runs_out_while_no_web_process_hears_agents() -> None:
    job = jobs.submit_job(SPEC, owner="tests")
    fleet = ToldFleet.of(job.id, "gpu-01", "gpu-02")
    engine.advance_job(job.id)
    assert sweep.sweep_if_due()
    deaf_s = 600.0
    fleet.forget_observers()
    Job.objects.update(state_since=F("state_since") - deaf_s)
    Claim.objects.update(last_done_at=F("last_done_at") - deaf_s)
    assert sweep.sweep_if_due()
    assert Job.objects.get(pk=job.id).launch_attempts == 0
    fleet.beat()
    Claim.objects.filter(name="sweep").update(last_done_at=None)
    assert sweep.sweep_if_due()
    after = Job.objects.get(pk=job.id)
    assert (after.state, after.launch_attempts) == ("placing", 0)


def test_sweep_whose_database_is_away_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(9):
        jobs.submit_job(SPEC, owner="tests")
    tried = []

    def away(identifier: str, **_: Any) -> None:
        tried.append(identifier)
        raise OperationalError("the server closed the connection")

    monkeypatch.setattr(engine, "advance_job", away)
    with pytest.raises(OperationalError):
        sweep.sweep()
    assert len(tried) == sweep.AWAY_AFTER_FAILURES


def test_job_that_cannot_be_advanced_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        jobs.submit_job(SPEC, owner="tests")
    tried = []

    def fail(identifier: str, **_: Any) -> None:
        tried.append(identifier)
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "advance_job", fail)
    sweep.sweep()
    assert len(tried) == 4
