"""A stop that an operator wants of a node that cannot be heard: somebody is told, and nothing is relaunched for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from domain_scenes import NOW, POLICY, fenced, fleet, generation, incident, job, leased, lost, node, proven, situation
from domain_scenes import plan as make_plan
from domain_scenes import stopping as ordered_to_stop

from recovery.domain.detection import find_fault
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.generations import GenerationView, ProofKind
from recovery.domain.incident import ENDS, TRANSITIONS, CauseKind, IncidentState
from recovery.domain.instructions import JobState, MarkJob, PageOperator, ReleaseNodes
from recovery.domain.machine import step
from recovery.domain.situation import Situation
from recovery.domain.timeline import EntryKind

S = IncidentState
OVERDUE_S = POLICY.unseen_s + 1


def alone() -> GenerationView:
    return ordered_to_stop(generation(1, of=make_plan(nodes=("gpu-01",))))


def silent(seconds: float = OVERDUE_S, **changes: Any) -> FleetSnapshot:
    gone = replace(lost("gpu-01", heard_at=NOW - seconds), silent_s=seconds)
    return replace(fleet(gone, node("gpu-02"), node("gpu-03")), **changes)


def wanted_stopped(view: GenerationView | None = None, **changes: Any) -> Situation:
    """By its owner's wish, or since its incident was closed; no incident is open."""
    state = {"job": job(state=JobState.STOPPING, stop_wanted=True), "fleet": silent(), **changes}
    return situation(view or alone(), **state)


@pytest.mark.parametrize("stop_wanted", [True, False])
def test_a_stop_that_a_silent_node_holds_up_is_told_after_30_s(stop_wanted: bool) -> None:
    world = wanted_stopped(job=job(state=JobState.STOPPING, stop_wanted=stop_wanted))
    fault = find_fault(world, NOW)
    assert fault is not None
    assert (fault.generation, fault.node, fault.rank) == (1, "gpu-01", None)
    assert fault.at == pytest.approx(NOW - OVERDUE_S)
    assert "no contact with gpu-01 for 31 s" in fault.sentence
    start = incident(S.DETECTED)
    outcome = step(start, world, NOW)
    assert outcome.incident.state is S.WAITING_FOR_FENCE
    assert outcome.incident.stop_ordered
    assert outcome.incident.cause is not None
    assert (outcome.incident.cause.kind, outcome.incident.cause.node) == (CauseKind.NODE_SILENT, "gpu-01")
    assert [type(one) for one in outcome.instructions] == [PageOperator]
    assert [entry.kind for entry in outcome.entries] == [EntryKind.FAULT, EntryKind.STATE, EntryKind.PAGE]
    assert "a fence provider or an operator's attestation" in outcome.entries[-1].text


@pytest.mark.parametrize("stop_wanted", [True, False])
def test_the_stop_is_done_once_the_fence_comes_and_nothing_is_relaunched(stop_wanted: bool) -> None:
    world = wanted_stopped(job=job(state=JobState.STOPPING, stop_wanted=stop_wanted))
    waiting = step(incident(S.DETECTED), world, NOW).incident
    assert step(waiting, world, NOW + 5) == step(waiting, world, NOW + 6), "paged once"
    assert step(waiting, world, NOW + 5).instructions == ()
    gone = proven(alone(), "gpu-01", at=NOW + 9, kind=ProofKind.ATTESTATION)
    done = step(waiting, replace(world, generations=(gone,)), NOW + 10)
    assert done.incident.state is S.CANCELLED
    assert [type(one) for one in done.instructions] == [MarkJob, ReleaseNodes]
    mark = done.instructions[0]
    assert isinstance(mark, MarkJob)
    assert mark.state is JobState.STOPPED


def test_it_is_told_again_each_hour() -> None:
    world = wanted_stopped()
    waiting = step(incident(S.DETECTED), world, NOW).incident
    again = step(waiting, world, NOW + 3601)
    assert [entry.kind for entry in again.entries] == [EntryKind.PAGE]


@pytest.mark.parametrize(
    "world",
    [
        wanted_stopped(fleet=silent(POLICY.unseen_s - 1)),
        wanted_stopped(fleet=fleet()),
        wanted_stopped(fleet=silent(breaker_open=True)),
        wanted_stopped(fenced(alone())),
        wanted_stopped(job=job(state=JobState.STOPPED)),
    ],
    ids=["silent for less", "in contact", "breaker open", "proven", "stopped"],
)
def test_nobody_is_told_where_nothing_is_held_up_by_a_silence(world: Situation) -> None:
    assert find_fault(world, NOW) is None


def test_a_lease_that_is_about_to_prove_it_is_waited_for() -> None:
    peer = proven(ordered_to_stop(leased(ago_s=40.0)), "gpu-02", at=NOW - 10)
    assert find_fault(wanted_stopped(peer), NOW) is None
    no_lease = replace(peer, lease=None)
    assert find_fault(wanted_stopped(no_lease), NOW) is not None


@pytest.mark.parametrize("state", sorted(set(S) - ENDS - {S.WAITING_FOR_FENCE}))
def test_an_open_incident_whose_job_is_to_be_stopped_tells_it_too(state: IncidentState) -> None:
    assert S.WAITING_FOR_FENCE in TRANSITIONS[state]
    outcome = step(incident(state), wanted_stopped(), NOW)
    assert outcome.incident.state is S.WAITING_FOR_FENCE


def test_ranks_that_our_own_stop_ended_are_no_cause() -> None:
    """Their end is known only by the node's proof."""
    base = alone()
    gone = tuple(replace(rank, exited_at=NOW, detail="gone without a report") for rank in base.ranks)
    outcome = step(incident(S.DETECTED), wanted_stopped(replace(fenced(base), ranks=gone), fleet=fleet()), NOW)
    assert outcome.incident.cause is None
    assert outcome.incident.state is S.CANCELLED
