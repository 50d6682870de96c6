"""Reads for pages and API, on a real database."""

from __future__ import annotations

import time

import pytest

from recovery import queries
from recovery.errors import NotFound
from recovery.models import Claim, FenceAction, Node
from recovery.queries import NodeState, Position
from recovery.queries.positions import topic_positions
from tests.integration.api_rows import (
    T0,
    add_entries,
    make_control_plane_incident,
    make_drill,
    make_generation,
    make_incident,
    make_job,
    make_node,
    make_observer,
    make_story,
)

pytestmark = pytest.mark.django_db

NOW = T0 + 1000


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, NodeState.READY),
        ({"cordoned": True}, NodeState.CORDONED),
        ({"unhealthy_reason": "GPU 3 fell off the bus.", "cordoned": True}, NodeState.UNHEALTHY),
        ({"session": ""}, NodeState.UNKNOWN),
        ({"last_heard_at": NOW - 60, "unhealthy_reason": "old news"}, NodeState.UNKNOWN),
        ({"revoked": True}, NodeState.UNKNOWN),
        ({"session": "", "last_heard_at": None, "connected_since": None}, NodeState.NEVER_JOINED),
    ],
)
def test_node_state_says_what_is_known_and_no_more(fields: dict[str, object], state: NodeState) -> None:
    make_node("gpu-01", now=NOW, **fields)
    node = queries.get_node("gpu-01", now=NOW)
    assert node.state is state
    assert node.spare == (state is NodeState.READY)
    assert (node.reason == "") == (state is NodeState.READY)


def test_unknown_node_says_since_when() -> None:
    make_node("gpu-01", now=NOW, last_heard_at=NOW - 60)
    assert queries.get_node("gpu-01", now=NOW).since == NOW - 60


def test_claimed_node_is_busy_and_no_spare() -> None:
    make_node("gpu-01", now=NOW, claimed_by=make_job())
    make_node("gpu-02", now=NOW)
    seen = queries.overview(now=NOW)
    assert queries.get_node("gpu-01", now=NOW).state is NodeState.BUSY
    assert seen.spare_nodes == ("gpu-02",)


def test_gpu_values_carry_their_age_and_missing_ones_stay_unknown() -> None:
    sample = {"uuid": "GPU-1", "index": 0, "at": NOW - 30, "temperature_c": 61.0}
    make_node("gpu-01", now=NOW, gpus=[sample], facts={"gpu_count": 2})
    node = queries.get_node("gpu-01", now=NOW)
    assert (node.gpus[0].age_s, node.gpus[0].stale, node.gpus[0].temperature_c) == (30, True, 61.0)
    assert node.gpus[0].power_w is None
    assert (node.gpus_seen, node.gpus_expected) == (1, 2)


def test_phases_follow_from_the_timeline_and_an_end_is_no_phase() -> None:
    make_story()
    incident = queries.get_incident("inc_a", now=NOW)
    phases = [(phase.state, round(phase.seconds, 3)) for phase in incident.phases]
    assert phases == [("detected", 0.1), ("stopping", 0.4), ("placing", 0.2), ("launching", 4.8), ("verifying", 6.0)]
    assert all(phase.ended_at is not None for phase in incident.phases)
    assert (incident.entries_count, incident.verdict, incident.deadline_at) == (8, "bit-equal", None)


def test_open_phase_counts_until_now() -> None:
    incident = make_incident(make_job())
    add_entries(incident, (0, "state", "Opened.", {"to": "detected"}), (5, "state", "Stopping.", {"to": "stopping"}))
    seen = queries.get_incident("inc_a", now=T0 + 9)
    assert (seen.phases[1].ended_at, seen.phases[1].seconds) == (None, 4.0)


def test_phase_over_its_limit_is_flagged() -> None:
    incident = make_incident(make_job())
    add_entries(incident, (0, "state", "Opened.", {"to": "detected"}), (31, "state", "Stopping.", {"to": "stopping"}))
    phases = queries.get_incident("inc_a", now=T0 + 40).phases
    assert [(phase.limit_s, phase.over_limit) for phase in phases] == [(30.0, True), (60.0, False)]


def test_timeline_goes_on_after_a_seq_and_says_where_it_ends() -> None:
    make_story()
    part = queries.incident_timeline("inc_a", after_seq=3, limit=2)
    assert ([entry.seq for entry in part.items], part.last_seq) == ([4, 5], 8)
    assert queries.incident_timeline("inc_a", after_seq=8).items == ()


def test_steps_repeated_after_a_rollback_are_in_both_generations_and_once_in_the_canonical_curve() -> None:
    make_story()
    raw = queries.job_metrics("job_a")
    assert [(one.generation, one.parent_step, len(one.points)) for one in raw.series] == [(1, None, 154), (2, 100, 60)]
    curve = queries.job_metrics("job_a", canonical=True)
    assert [point.step for point in curve.points] == list(range(1, 161))
    assert [point.generation for point in curve.points] == [1] * 100 + [2] * 60


def test_canonical_curve_drops_lost_steps_before_they_are_made_again() -> None:
    assert queries.canonical_cuts({1: None, 2: 100, 4: 80}) == {4: None, 2: 80, 1: 80}


def test_metrics_page_by_limit_and_name_a_rank() -> None:
    make_story()
    part = queries.job_metrics("job_a", generation=1, rank=1, after_step=100, limit=50)
    assert (part.series[0].points[0].step, len(part.points), part.more) == (101, 50, True)
    rest = queries.job_metrics("job_a", generation=1, rank=1, after_step=150, limit=50)
    assert (len(rest.points), rest.more) == (4, False)


def test_thinned_metrics_say_so() -> None:
    make_story()
    thinned = queries.job_metrics("job_a", max_points=50)
    assert thinned.every == 5
    assert {point.step % 5 for point in thinned.points} == {0}
    assert queries.job_metrics("job_a", max_points=1000).every == 1


def test_job_shows_its_newest_generation_its_checkpoint_and_its_open_incident() -> None:
    job, _ = make_story()
    make_incident(job, "inc_b", opened_at=T0 + 50)
    seen = queries.get_job("job_a")
    assert (seen.nodes, seen.open_incident, seen.last_checkpoint_step) == (("gpu-01", "gpu-03"), "inc_b", 100)
    assert [(one.number, one.reached_step, one.parent_step) for one in seen.generations] == [
        (1, 154, None),
        (2, 160, 100),
    ]
    assert seen.generations[1].first_step_at == T0 + 3
    assert (seen.incidents_count, seen.last_checkpoint and seen.last_checkpoint.directory) == (2, "/c/1/100")


@pytest.mark.parametrize(
    ("state", "needs_human"), [("verifying", False), ("escalated", True), ("waiting_for_fence", True)]
)
def test_job_needs_a_human_as_long_as_its_open_incident_does(state: str, needs_human: bool) -> None:
    job = make_job("job_a", state="recovering")
    incident = make_incident(job, "inc_b", state=state)
    assert [one.needs_human for one in queries.list_jobs()] == [needs_human]
    incident.ended = True
    incident.save()
    assert [one.needs_human for one in queries.list_jobs()] == [False]


def test_checkpoints_go_on_after_a_position() -> None:
    make_story()
    assert [one.step for one in queries.job_checkpoints("job_a")] == [100, 50]
    assert [one.step for one in queries.job_checkpoints("job_a", after=(1, 100))] == [50]


def test_lists_go_on_after_a_position_also_among_equal_times() -> None:
    for name in "abc":
        make_job(f"job_{name}")
    make_job("job_old", submitted_at=T0 - 1)
    first = queries.list_jobs(limit=2)
    rest = queries.list_jobs(after=Position(at=first[-1].submitted_at, id=first[-1].id))
    assert [job.id for job in (*first, *rest)] == ["job_c", "job_b", "job_a", "job_old"]


def test_overview_counts_and_tells_whether_the_control_plane_works() -> None:
    job, _ = make_story()
    make_incident(job, "inc_b", opened_at=T0 + 50, state="escalated")
    make_drill(job, Node.objects.get(name="gpu-02"))
    Claim.objects.create(name="sweep", holder="w", until=0, last_done_at=NOW - 3)
    Node.objects.update(last_heard_at=NOW)
    make_observer(NOW)
    seen = queries.overview(now=NOW)
    assert [incident.id for incident in seen.open_incidents] == ["inc_b"]
    assert (seen.incidents_needing_human, seen.jobs_by_state) == (1, {"running": 1})
    assert (seen.nodes_by_state["busy"], seen.nodes_by_state["ready"], seen.spare_nodes) == (2, 1, ("gpu-02",))
    assert (seen.control_plane.last_sweep_age_s, seen.control_plane.ok) == (3, True)
    assert seen.control_plane.agents_connected == 3
    assert seen.last_drill and seen.last_drill.id == "drl_a"
    assert seen.last_incident and seen.last_incident.id == "inc_b"


def test_control_plane_that_never_swept_is_not_ok() -> None:
    assert not queries.overview().control_plane.ok


def test_number_of_queries_does_not_grow_with_rows(django_assert_num_queries: object) -> None:
    reads = {
        queries.overview: 16,
        queries.list_jobs: 16,
        queries.list_nodes: 4,
        queries.list_incidents: 3,
        queries.list_drills: 2,
    }
    job, _ = make_story()
    make_drill(job, Node.objects.get(name="gpu-02"))
    make_incident(job, "inc_open")
    silent = make_node("silent-0", last_heard_at=time.time() - 60)
    make_generation(make_job("job_silent_0"), 1, [silent])
    for more in range(2):
        for read, count in reads.items():
            with django_assert_num_queries(count):  # type: ignore[operator]
                read()
        other = make_job(f"job_more_{more}")
        make_incident(other, f"inc_more_{more}")
        make_drill(other, make_node(f"more-{more}"), f"drl_more_{more}")
        silent = make_node(f"silent-{more + 1}", last_heard_at=time.time() - 60)
        make_generation(make_job(f"job_silent_{more + 1}"), 1, [silent])
        make_control_plane_incident(f"inc_plane_{more}", ended=more > 0)


@pytest.mark.parametrize(
    "read",
    [queries.get_node, queries.get_job, queries.get_incident, queries.incident_timeline, queries.get_drill],
)
def test_what_does_not_exist_is_not_found(read: object) -> None:
    with pytest.raises(NotFound, match="nothing-here"):
        read("nothing-here")  # type: ignore[operator]


def test_receipt_that_is_not_issued_yet_is_not_found() -> None:
    make_incident(make_job())
    with pytest.raises(NotFound, match="no receipt yet"):
        queries.incident_receipt("inc_a")


def test_fleet_has_moved_when_a_node_falls_silent_is_quarantined_or_fenced() -> None:
    node = make_node("gpu-01", now=NOW)
    marks = [topic_positions(["fleet"], now=NOW)["fleet"].mark]
    for change in ({"last_heard_at": NOW - 60}, {"quarantine_reason": "stuck"}):
        Node.objects.update(**change)
        marks.append(topic_positions(["fleet"], now=NOW)["fleet"].mark)
    FenceAction.objects.create(id="fen_a", node=node, kind="provider", state="requested", requested_at=NOW)
    marks.append(topic_positions(["fleet"], now=NOW)["fleet"].mark)
    assert len(set(marks)) == 4
