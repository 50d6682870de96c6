"""The plan of the next generation while part of the fleet cannot be seen, because the server itself was away."""

from __future__ import annotations

import pytest
from domain_scenes import PARENT, fenced, fleet, generation, incident, job, lost, node, situation

from recovery.domain.fleet import NodeView
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.placement import NoCapacity
from recovery.domain.plan import RecoveryPlan
from recovery.domain.planning import make_plan
from recovery.domain.silence import Contact

UNOBSERVED = lost("gpu-02", contact=Contact.UNOBSERVED)


def planned(*nodes: NodeView, **of_job: object) -> RecoveryPlan | object:
    world = situation(
        fenced(generation(1)), fleet=fleet(*nodes), job=job(state=JobState.RECOVERING, **of_job), checkpoints=(PARENT,)
    )
    return make_plan(incident(IncidentState.PLACING), world)


@pytest.mark.parametrize("of_job", [{}, {"min_nodes": 1}], ids=["fixed size", "may shrink"])
def test_survivor_of_which_nothing_is_known_yet_is_neither_replaced_nor_done_without(of_job: dict[str, int]) -> None:
    made = planned(node("gpu-01"), UNOBSERVED, node("gpu-03"), **of_job)
    assert made == NoCapacity(reason="nothing is known of gpu-02 right now.", missing=1)


def test_survivor_that_is_seen_again_keeps_its_rank() -> None:
    made = planned(node("gpu-01"), node("gpu-02"), node("gpu-03"))
    assert isinstance(made, RecoveryPlan)
    assert made.nodes == ("gpu-01", "gpu-02")


def test_node_that_is_lost_is_replaced() -> None:
    made = planned(node("gpu-01"), lost("gpu-02"), node("gpu-03"))
    assert isinstance(made, RecoveryPlan)
    assert made.nodes == ("gpu-01", "gpu-03")


def test_other_nodes_of_which_nothing_is_known_hold_up_no_plan() -> None:
    made = planned(node("gpu-01"), node("gpu-02"), lost("gpu-03", contact=Contact.UNOBSERVED))
    assert isinstance(made, RecoveryPlan)
