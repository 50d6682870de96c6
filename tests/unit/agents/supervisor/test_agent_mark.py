"""The mark of a generation's processes on one node."""

from __future__ import annotations

from agents.supervisor.environment import mark_of


def test_agents_that_share_a_machine_never_take_each_others_ranks_for_their_own() -> None:
    here = mark_of("job-1", 2, "plan-2", node="gpu-01")
    there = mark_of("job-1", 2, "plan-2", node="gpu-02")
    assert here != there
    assert here.startswith("job-1:2:")
