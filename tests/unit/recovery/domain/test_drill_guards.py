"""A drill starts from a steady state, breaks one node at a time, and makes nobody wait who has not said so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recovery.domain.drill_guards import DrillScene, DrillWish, OtherDrill, why_not
from recovery.domain.drill_kinds import KINDS, PromiseKind, Target
from recovery.domain.instructions import JobState
from recovery.domain.silence import Contact
from tests.unit.recovery.domain.domain_scenes import fleet, generation, job, node, plan, situation, stopping

NODE_KINDS = [kind for kind in KINDS.values() if kind.target is Target.NODE]
TAKING = [kind.name for kind in NODE_KINDS if kind.takes_node]


def scene(**changes: Any) -> DrillScene:
    """A job that trains on gpu-01 and gpu-02, with gpu-03 as a spare."""
    base = DrillScene(situation=situation(generation(1), job=job(state=JobState.RUNNING)), supervised=True)
    return replace(base, **changes)


def wish(name: str, **changes: Any) -> DrillWish:
    kind = KINDS[name]
    hit = None if kind.target is Target.SERVER else "gpu-02"
    base = DrillWish(kind=kind, node=hit, protocol=2 if hit else 0, duration_s=kind.duration_s)
    return replace(base, **changes)


def guard(asked: DrillWish, at: DrillScene) -> str | None:
    refusal = why_not(asked, at)
    return refusal.guard if refusal else None


def alone(name: str = "gpu-02") -> DrillScene:
    """The job has this node only."""
    made = generation(1, of=plan(nodes=(name,)))
    return scene(situation=situation(made, job=job(state=JobState.RUNNING, node_count=1)))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_may_be_done_in_a_steady_state(name: str) -> None:
    assert guard(wish(name), scene()) is None


@pytest.mark.parametrize("name", KINDS)
def test_no_kind_may_be_done_in_an_unsteady_state(name: str) -> None:
    for state in (JobState.PENDING, JobState.LAUNCHING, JobState.RECOVERING, JobState.SUCCEEDED):
        at = scene(situation=situation(generation(1), job=job(state=state)))
        assert guard(wish(name), at) == "steady_state"
    assert guard(wish(name), scene(open_incident="Incident inc_a of the control plane")) == "open_incident"
    running = job(state=JobState.RUNNING)
    assert guard(wish(name), scene(situation=situation(stopping(generation(1)), job=running))) == "steady_state"
    assert guard(wish(name), scene(situation=situation(generation(1, ranks=()), job=running))) == "steady_state"


@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.lasts])
def test_durations_have_limits(name: str) -> None:
    longest = KINDS[name].longest_s
    for wrong in (0.0, 0.9, longest + 1, float("nan")):
        assert guard(wish(name, duration_s=wrong), scene()) == "duration"
    assert guard(wish(name, duration_s=1.0), scene()) is None
    assert guard(wish(name, duration_s=longest), scene()) is None


def test_the_server_is_held_down_for_two_minutes_at_most() -> None:
    assert KINDS["server-down"].longest_s == 120.0


@pytest.mark.parametrize("name", ["kill-rank", "restart-agent"])
def test_what_is_done_in_a_moment_has_no_duration(name: str) -> None:
    assert guard(wish(name, duration_s=5.0), scene()) == "duration"


@pytest.mark.parametrize("name", KINDS)
def test_one_drill_at_a_time_on_a_job(name: str) -> None:
    other = OtherDrill(id="drl_a", kind=KINDS["kill-rank"], job="job-1")
    assert guard(wish(name), scene(others=(other,))) == "overlap"


@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.target is not Target.RANK])
def test_one_node_at_a_time_in_the_whole_fleet(name: str) -> None:
    elsewhere = OtherDrill(id="drl_a", kind=KINDS["partition"], job="job-2")
    assert guard(wish(name), scene(others=(elsewhere,))) == "size"
    assert guard(wish("kill-rank"), scene(others=(elsewhere,))) is None
    rank_only = replace(elsewhere, kind=KINDS["kill-rank"])
    assert guard(wish(name), scene(others=(rank_only,))) is None


def test_the_server_is_not_taken_down_where_nobody_starts_it_again() -> None:
    assert guard(wish("server-down"), scene(supervised=False)) == "supervised"
    assert guard(wish("partition"), scene(supervised=False)) is None


@pytest.mark.parametrize("name", [kind.name for kind in NODE_KINDS])
def test_an_old_agent_is_asked_for_nothing_that_it_cannot_undo(name: str) -> None:
    assert guard(wish(name, protocol=1), scene()) == "agent"
    assert guard(wish("kill-rank", protocol=1), scene()) is None


@pytest.mark.parametrize("name", [kind.name for kind in NODE_KINDS])
def test_a_node_that_is_silent_already_is_left_alone(name: str) -> None:
    silent = fleet(node("gpu-01"), node("gpu-02", contact=Contact.SUSPECT), node("gpu-03"))
    at = scene(situation=situation(generation(1), job=job(state=JobState.RUNNING), fleet=silent))
    assert guard(wish(name), at) == "steady_state"


@pytest.mark.parametrize("name", TAKING)
def test_the_only_node_of_a_job_is_taken_only_by_who_knows_that_it_waits(name: str) -> None:
    assert guard(wish(name), alone()) == "would_wait"
    assert guard(wish(name, allow_waiting=True), alone()) is None


@pytest.mark.parametrize("name", TAKING)
def test_a_node_is_taken_only_where_the_job_could_go_on_without_it(name: str) -> None:
    no_spare = fleet(node("gpu-01"), node("gpu-02"), node("gpu-03", claimed_by="job-2"))
    running = job(state=JobState.RUNNING)
    assert guard(wish(name), scene(situation=situation(generation(1), job=running, fleet=no_spare))) == "would_wait"
    shrinks = replace(running, min_nodes=1)
    assert guard(wish(name), scene(situation=situation(generation(1), job=shrinks, fleet=no_spare))) is None


def test_a_single_node_is_cut_off_only_for_less_time_than_pages_a_human() -> None:
    assert guard(wish("partition", duration_s=20.0), alone()) is None
    assert guard(wish("partition", duration_s=30.0), alone()) == "would_wait"
    assert guard(wish("partition", duration_s=30.0, allow_waiting=True), alone()) is None
    assert guard(wish("restart-agent"), alone()) is None


def test_every_kind_that_the_wire_knows_is_a_drill_and_the_server_is_one_more() -> None:
    assert {kind.name for kind in KINDS.values() if kind.promise is PromiseKind.UNHARMED} == {
        "restart-agent",
        "partition",
        "server-down",
    }
    assert len(KINDS) == 7
