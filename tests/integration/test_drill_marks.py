"""An incident is marked as a drill whichever of its dead ranks is heard of first."""

from __future__ import annotations

import pytest

from recovery import jobs
from recovery.drill_outcomes import settle_drill
from recovery.drills import trigger_drill
from recovery.models import Drill, IncidentRow, Job, TimelineEntry
from recovery.store.timelines import first_broken_link
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC, advance, running

pytestmark = pytest.mark.django_db(transaction=True)


def test_drill_is_found_though_a_rank_that_died_of_it_was_heard_of_first() -> None:
    job: Job = jobs.submit_job(SPEC, owner="tests")
    fleet = ToldFleet.of(job.id, "gpu-01", "gpu-02", "gpu-03")
    running(fleet, job)
    drill = trigger_drill(kind="kill-rank", job_id=job.id, rank=1, requested_by="tests")
    Drill.objects.update(state="applied", applied_at=1.0)
    fleet.die("gpu-01", 1, 0, signal=None, exit_code=1)
    assert IncidentRow.objects.get(job=job).drill is None
    fleet.die("gpu-02", 1, 1)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert (incident.drill_id, incident.body["drill"]) == (drill.id, drill.id)
    assert TimelineEntry.objects.filter(kind="drill").count() == 1
    assert first_broken_link(incident.pk) is None
    settle_drill(drill.id)
    drill.refresh_from_db()
    assert not drill.ended
