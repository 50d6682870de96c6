"""Too many nodes silent at once: one incident of the control plane, no job stopped, and a person who re-arms it."""

from __future__ import annotations

import pytest

from agents.protocol.messages import AssignmentPhase
from recovery import fencing, jobs, queries
from recovery.breaker import advance_breaker, rearm_breaker
from recovery.errors import CommandRefused, NotFound
from recovery.incidents import command_incident
from recovery.models import GenerationRow, IncidentRow, Job, Node, TimelineEntry
from recovery.store.timelines import first_broken_link
from recovery.sweep import sweep
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC, advance, run_generation

pytestmark = pytest.mark.django_db

NAMES = [f"gpu-{number:02}" for number in range(1, 21)]


def train(fleet: ToldFleet, job: Job) -> GenerationRow:
    advance(job)
    row = run_generation(fleet, job, 1)
    for rank, name in enumerate(row.plan["nodes"]):
        fleet.start(name, 1, rank)
        fleet.train(name, 1, rank, range(1, 31))
    fleet.save(row.plan["nodes"][0], 1, 20)
    advance(job)
    return row


@pytest.fixture
def pair() -> tuple[Job, Job]:
    made = [jobs.submit_job({**SPEC, "nodes": count}, owner="tests") for count in (2, 1)]
    return made[0], made[1]


@pytest.fixture
def fleet(pair: tuple[Job, Job]) -> ToldFleet:
    """Twenty nodes; one job on two of them, another one on a third."""
    fleet = ToldFleet.of(pair[0].id, *NAMES)
    train(fleet, pair[0])
    fleet.job = pair[1].id
    train(fleet, pair[1])
    fleet.job = pair[0].id
    return fleet


def sweep_often() -> None:
    for _ in range(3):
        sweep()


def test_all_agents_cut_at_once_are_one_incident_and_no_job_is_stopped(pair: tuple[Job, Job], fleet: ToldFleet) -> None:
    fleet.fall_silent(*NAMES, for_s=45)
    sweep_often()
    incident = IncidentRow.objects.get()
    assert (incident.kind, incident.state, incident.job) == ("control_plane", "breaker_open", None)
    assert list(GenerationRow.objects.values_list("wanted", flat=True)) == [AssignmentPhase.RUN.value] * 2
    assert {job.state for job in Job.objects.all()} == {"running"}
    shown = queries.get_incident(incident.pk)
    assert (shown.job, len(shown.nodes), shown.fleet_size, shown.needs_human) == (None, 20, 20, True)
    assert (shown.still_silent, shown.cause_sentence.startswith("20 of 20 nodes")) == (tuple(NAMES), True)
    assert shown.phases == ()
    assert queries.overview().control_plane.breaker == incident.pk
    assert "page" in TimelineEntry.objects.values_list("kind", flat=True)

    fleet.silent.clear()
    fleet.beat()
    sweep_often()
    incident.refresh_from_db()
    assert (incident.state, incident.ended) == ("contact_restored", False)
    rearm_breaker(incident.pk, by="alice")
    sweep_often()
    incident.refresh_from_db()
    assert (incident.state, incident.ended, incident.body["rearmed_by"]) == ("rearmed", True, "alice")
    assert IncidentRow.objects.count() == 1
    assert {job.state for job in Job.objects.all()} == {"running"}
    assert first_broken_link(incident.pk) is None


def test_breaker_is_not_stepped_over_by_the_jobs_whose_nodes_are_silent(
    pair: tuple[Job, Job], fleet: ToldFleet
) -> None:
    """Before the sweep comes: each job looks for itself, and none may believe what the breaker does not."""
    fleet.fall_silent(*NAMES, for_s=45)
    for job in pair:
        advance(job)
    assert not IncidentRow.objects.exists()
    advance_breaker()
    advance_breaker()
    assert IncidentRow.objects.count() == 1


def test_silence_that_lasts_is_looked_at_on_its_own_once_the_breaker_is_rearmed(
    pair: tuple[Job, Job], fleet: ToldFleet
) -> None:
    fleet.fall_silent(*NAMES, for_s=45)
    sweep_often()
    plane = IncidentRow.objects.get()
    fleet.silent -= set(NAMES) - {"gpu-03"}  # the node of the job on one node
    fleet.beat()
    sweep_often()
    assert queries.get_incident(plane.pk).still_silent == ("gpu-03",)
    assert IncidentRow.objects.count() == 1
    rearm_breaker(plane.pk, by="alice")
    sweep_often()
    opened = IncidentRow.objects.get(kind="job")
    assert (opened.job_id, opened.state) == (pair[1].id, "waiting_for_fence")
    assert Job.objects.get(pk=pair[0].id).state == "running"


def test_rank_that_dies_while_the_breaker_is_open_is_acted_on(pair: tuple[Job, Job], fleet: ToldFleet) -> None:
    fleet.fall_silent(*NAMES[5:], for_s=45)
    sweep_often()
    assert queries.overview().control_plane.breaker is not None
    fleet.die("gpu-02", 1, 1)
    advance(pair[0])
    assert IncidentRow.objects.get(kind="job").state == "stopping"


def test_attestation_is_taken_while_the_breaker_is_open(pair: tuple[Job, Job], fleet: ToldFleet) -> None:
    """The breaker doubts silence; somebody who stood before the machine does not."""
    fleet.fall_silent(*NAMES, for_s=45)
    sweep_often()
    fencing.attest_power_off("gpu-03", confirm="gpu-03", statement="", by="alice")
    fleet.silent.discard("gpu-20")
    fleet.silent.discard("gpu-19")
    fleet.beat()
    sweep_often()
    incident = IncidentRow.objects.get(kind="job")
    assert incident.job_id == pair[1].id
    assert GenerationRow.objects.get(job=pair[1], number=2).plan["nodes"] == ["gpu-19"]
    assert Job.objects.get(pk=pair[0].id).state == "running"


def test_rearm_fits_an_open_incident_of_the_control_plane_only(pair: tuple[Job, Job], fleet: ToldFleet) -> None:
    fleet.fall_silent(*NAMES, for_s=45)
    sweep_often()
    plane = IncidentRow.objects.get()
    with pytest.raises(CommandRefused, match="all that can be asked is `rearm`"):
        command_incident(plane.pk, kind="close", by="alice")
    rearm_breaker(plane.pk, by="alice")
    with pytest.raises(CommandRefused, match="re-armed already"):
        rearm_breaker(plane.pk, by="alice")
    with pytest.raises(NotFound):
        rearm_breaker("inc_none", by="alice")
    Node.objects.update(last_heard_at=1.0)
    fleet.silent.clear()
    fleet.beat()
    fleet.die("gpu-02", 1, 1)
    of_job = IncidentRow.objects.get(kind="job")
    with pytest.raises(CommandRefused, match="is a job's"):
        rearm_breaker(of_job.pk, by="alice")
