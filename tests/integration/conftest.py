"""The job and the nodes that most tests of rows begin with; a file that needs others defines them by these names."""

from __future__ import annotations

import pytest

from recovery import jobs
from recovery.models import Job
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC, running


@pytest.fixture
def job() -> Job:
    """On two nodes with one rank each, just submitted."""
    return jobs.submit_job(SPEC, owner="tests")


@pytest.fixture
def fleet(request: pytest.FixtureRequest, job: Job) -> ToldFleet:
    """Three nodes; with the mark `job_trains`, the job trains on gpu-01 and gpu-02, and gpu-03 is a spare."""
    fleet = ToldFleet.of(job.id, "gpu-01", "gpu-02", "gpu-03")
    if request.node.get_closest_marker("job_trains"):
        running(fleet, job)
    return fleet
