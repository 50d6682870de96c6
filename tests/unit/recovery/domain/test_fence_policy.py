"""Whose word that a node is off is taken, and which nodes are switched off unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import (
    NOW,
    at_step,
    exited,
    fleet,
    incident,
    killed,
    leased,
    lost,
    node,
    proven,
    rank,
    situation,
    stopping,
)

from recovery.domain.fence_policy import (
    BACK_OFF_S,
    FenceCandidate,
    next_attempt_at,
    nodes_to_fence,
    why_not_fenced,
)
from recovery.domain.generations import ProofKind
from recovery.domain.incident import Cause, CauseKind, IncidentState
from recovery.domain.silence import Contact
from recovery.domain.witnesses import ProbeView

S = IncidentState


def candidate(
    contact: Contact,
    *,
    silent_s: float = 40.0,
    unproven: tuple[str, ...] = ("generation 1",),
    trains_on: tuple[str, ...] = (),
) -> str:
    return why_not_fenced(
        FenceCandidate(name="gpu-02", contact=contact, silent_s=silent_s, unproven=unproven, trains_on=trains_on)
    )


def test_word_is_taken_only_of_a_lost_node_on_which_something_may_run() -> None:
    assert candidate(Contact.LOST) == ""
    assert "is in contact" in candidate(Contact.SEEN)
    assert "heard 4 s ago" in candidate(Contact.SUSPECT, silent_s=4.2)
    assert "is not known" in candidate(Contact.UNOBSERVED)
    assert "Nothing waits for a proof" in candidate(Contact.LOST, unproven=())
    assert "llm-7 trains on" in candidate(Contact.LOST, trains_on=("llm-7",))


def test_provider_is_asked_at_once_then_with_growing_pauses_and_three_times_at_most() -> None:
    assert next_attempt_at(attempts=0, last_ended_at=None) == 0.0
    assert next_attempt_at(attempts=1, last_ended_at=NOW) == NOW + BACK_OFF_S
    assert next_attempt_at(attempts=2, last_ended_at=NOW) == NOW + 2 * BACK_OFF_S
    assert next_attempt_at(attempts=3, last_ended_at=NOW) is None


BROKEN = stopping(
    leased(
        ranks=(
            exited(rank(0, last_step=50), code=1, detail="Connection closed by peer [10.0.0.2]:4711"),
            at_step(rank(1, last_step=50), ago_s=20),
        )
    )
)
LOST_CAUSE = Cause(kind=CauseKind.NODE_LOST, rank=None, node="gpu-02", sentence="gpu-02 is gone.")
WAITING = incident(S.STOPPING, cause=LOST_CAUSE, stop_ordered=True)
FLEET = fleet(node("gpu-01"), lost("gpu-02"), node("gpu-03"), node("gpu-04"))


def test_lost_node_that_an_incident_waits_for_is_switched_off() -> None:
    for state in (S.STOPPING, S.WAITING_FOR_FENCE):
        waiting = replace(WAITING, state=state)
        assert nodes_to_fence(waiting, situation(BROKEN, fleet=FLEET), NOW) == ("gpu-02",)


@pytest.mark.parametrize(
    "changed",
    [
        replace(WAITING, state=S.DETECTED),
        replace(WAITING, state=S.PAUSED),
        replace(WAITING, stop_ordered=False),
        replace(WAITING, cause=None),
        replace(WAITING, cause=replace(LOST_CAUSE, kind=CauseKind.NODE_SILENT)),
        replace(WAITING, cause=replace(LOST_CAUSE, kind=CauseKind.RANK_KILLED)),
    ],
)
def test_nothing_is_switched_off_for_any_other_reason(changed: object) -> None:
    assert nodes_to_fence(changed, situation(BROKEN, fleet=FLEET), NOW) == ()  # type: ignore[arg-type]


def test_node_that_came_back_or_is_proven_empty_is_left_alone() -> None:
    back = fleet(node("gpu-01"), node("gpu-02"), node("gpu-03"))
    assert nodes_to_fence(WAITING, situation(BROKEN, fleet=back), NOW) == ()
    gone = proven(BROKEN, "gpu-02", at=NOW - 1, kind=ProofKind.LEASE_EXPIRED)
    assert nodes_to_fence(WAITING, situation(gone, fleet=FLEET), NOW) == ()


def test_nothing_is_switched_off_while_absence_is_not_believed() -> None:
    assert nodes_to_fence(WAITING, situation(BROKEN, fleet=replace(FLEET, breaker_open=True)), NOW) == ()
    many = fleet(node("gpu-01"), lost("gpu-02"), lost("gpu-03"), lost("gpu-04"))
    assert nodes_to_fence(WAITING, situation(BROKEN, fleet=many), NOW) == ()


def test_node_that_fell_silent_later_is_switched_off_only_if_somebody_else_misses_it_too() -> None:
    """gpu-01 is silent as well, while its agent was about to prove the stop."""
    later = fleet(lost("gpu-01"), lost("gpu-02"), node("gpu-03"), node("gpu-04"), node("gpu-05"))
    assert nodes_to_fence(WAITING, situation(BROKEN, fleet=later), NOW) == ("gpu-02",)
    half = leased(ranks=(at_step(rank(0, last_step=50), ago_s=20), killed(rank(1, last_step=50))))
    probe = ProbeView(node="gpu-01", prober="gpu-03", asked_at=NOW - 1, reachable=False)
    fenced = proven(stopping(half), "gpu-02", at=NOW - 1, kind=ProofKind.PROVIDER)
    own = fleet(lost("gpu-01"), node("gpu-02"), node("gpu-03"), node("gpu-04"))
    assert nodes_to_fence(WAITING, situation(fenced, fleet=own), NOW) == ()
    assert nodes_to_fence(WAITING, situation(fenced, fleet=own, probes=(probe,)), NOW) == ("gpu-01",)
