"""What the pages show of samples and of step time: the receipt's quote, and the split bar of a job."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from recovery import jobs
from recovery.models import IncidentRow, Job, StepRow
from tests.fakes.told_fleet import ToldFleet
from tests.integration.api_rows import RECEIPT
from tests.integration.test_recovery_pipeline import SPEC, kill_and_fence, replay, running

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def browser() -> Client:
    client = Client()
    client.force_login(get_user_model().objects.create_user("operator", is_staff=True))
    return client


@pytest.fixture
def incident() -> IncidentRow:
    job = jobs.submit_job(SPEC, owner="tests")
    fleet = ToldFleet.of(job.id, "gpu-01", "gpu-02", "gpu-03")
    kill_and_fence(fleet, job, running(fleet, job))
    return replay(fleet, job)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_receipt_shows_its_ledger_and_an_older_one_renders_without(browser: Client, incident: IncidentRow) -> None:
    url = f"/incidents/{incident.pk}"
    shown = text_of(browser.get(url, follow=True).content.decode())
    assert "256 samples in 32 steps" in shown and "none skipped and none repeated" in shown
    answer = browser.get(f"/api/v1/incidents/{incident.pk}/receipt").json()
    assert answer["samples"]["replayed"] == 80
    IncidentRow.objects.filter(pk=incident.pk).update(receipt=RECEIPT)
    older = text_of(browser.get(url, follow=True).content.decode())
    assert "Continuity is proven." in older and "none skipped" not in older
    assert "samples" not in browser.get(f"/api/v1/incidents/{incident.pk}/receipt").json()


def test_job_page_shows_where_time_goes_once_it_is_measured(browser: Client, incident: IncidentRow) -> None:
    job = Job.objects.get(pk=incident.job_id)
    url = f"/jobs/{job.id}"
    assert "Where a step" not in browser.get(url, follow=True).content.decode()
    StepRow.objects.filter(job=job).update(
        step_time_s=0.2, data_s=0.05, forward_backward_s=0.1, optimizer_s=0.05, memory_bytes=2**30
    )
    page = browser.get(url, follow=True).content.decode()
    assert 'class="split-forward_backward" x="25.0" width="50.0"' in page
    assert "Forward and backward 0.10 s, 50 %" in text_of(page)
    assert browser.get(f"/api/v1/jobs/{job.id}/samples").json()["skipped"] == 0
