"""A job that is to be stopped on a node that died: rows, pages and API show whom it waits for, and a fence ends it."""

from __future__ import annotations

import logging

import pytest

from agents.protocol.messages import SeenPhase
from recovery import fencing, jobs, queries
from recovery.incidents import command_incident
from recovery.models import IncidentRow, Job, Node
from recovery.store.timelines import first_broken_link
from recovery.sweep import sweep
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC, advance

pytestmark = [pytest.mark.django_db, pytest.mark.job_trains]


@pytest.fixture
def job() -> Job:
    return jobs.submit_job({**SPEC, "nodes": 1}, owner="tests")


def pages(incident: str) -> list[str]:
    return [entry.text for entry in queries.incident_timeline(incident).items if entry.kind == "page"]


def test_somebody_is_told_of_a_stop_that_a_dead_node_holds_up_and_an_attestation_ends_it(
    job: Job, fleet: ToldFleet, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.stop_job(job.id, by="alice")
    sweep()
    fleet.fall_silent("gpu-01", for_s=20)
    sweep()
    assert queries.get_job(job.id).state == "stopping"
    assert not IncidentRow.objects.exists(), "it may answer in a moment"
    fleet.fall_silent("gpu-01", for_s=31)
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            sweep()
    (row,) = IncidentRow.objects.all()
    assert row.state == "waiting_for_fence"
    shown = queries.get_job(job.id)
    assert (shown.state, shown.open_incident) == ("stopping", row.pk)
    assert len(pages(row.pk)) == 1
    assert len([record for record in caplog.records if record.message.startswith("page:")]) == 1
    (waiting,) = queries.get_incident(row.pk).waiting_for
    assert (waiting.node, "attestation" in waiting.helps) == ("gpu-01", True)
    assert queries.overview().incidents_needing_human == 1
    fencing.attest_power_off("gpu-01", confirm="gpu-01", statement="pulled the plug", by="alice")
    sweep()
    row.refresh_from_db()
    job.refresh_from_db()
    assert (row.state, job.state) == ("cancelled", "stopped")
    assert not Node.objects.filter(claimed_by=job).exists()
    assert job.generations.count() == 1
    assert first_broken_link(row.pk) is None
    sweep()
    assert IncidentRow.objects.count() == 1


def test_job_whose_incident_was_closed_is_not_relaunched_by_a_later_fence(job: Job, fleet: ToldFleet) -> None:
    fleet.die("gpu-01", 1, 0)
    advance(job)
    first = IncidentRow.objects.get()
    command_incident(first.pk, kind="close", by="alice")
    advance(job)
    fleet.fall_silent("gpu-01", for_s=31)
    for _ in range(3):
        sweep()
    second = IncidentRow.objects.exclude(pk=first.pk).get()
    assert (second.state, len(pages(second.pk))) == ("waiting_for_fence", 1)
    fencing.attest_power_off("gpu-01", confirm="gpu-01", statement="", by="alice")
    for _ in range(2):
        sweep()
    job.refresh_from_db()
    second.refresh_from_db()
    assert (second.state, job.state) == ("cancelled", "stopped")
    assert not job.generations.exclude(wanted="stop").exists()


def test_node_that_comes_back_ends_the_stop_by_its_own_proof(job: Job, fleet: ToldFleet) -> None:
    jobs.stop_job(job.id, by="alice")
    sweep()
    fleet.fall_silent("gpu-01", for_s=31)
    for _ in range(2):
        sweep()
    fleet.connect("gpu-01")
    fleet.beat()
    fleet.report("gpu-01", 1, job.generations.get().plan_id, SeenPhase.STOPPED)
    sweep()
    job.refresh_from_db()
    assert (IncidentRow.objects.get().state, job.state) == ("cancelled", "stopped")
