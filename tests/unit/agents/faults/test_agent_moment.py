"""When a drill is due: counted from the newest checkpoint, never from the beginning."""

from __future__ import annotations

from agents.faults.moment import steps_past_save
from agents.supervisor.intake import Progress


def test_counts_from_the_newest_save() -> None:
    progress = Progress(step={0: 47}, saved={20, 40}, resumed={0: 0})
    assert steps_past_save(progress, rank=0) == 7


def test_is_unknown_before_the_first_save_and_step_0_is_none() -> None:
    assert steps_past_save(Progress(step={0: 19}, resumed={0: 0}), rank=0) is None
    assert steps_past_save(Progress(step={0: 19}, saved={0}, resumed={0: 0}), rank=0) is None
    assert steps_past_save(Progress(saved={20}), rank=0) is None


def test_a_resumed_generation_counts_from_where_it_began() -> None:
    assert steps_past_save(Progress(step={1: 64}, resumed={1: 60}), rank=1) == 4
    assert steps_past_save(Progress(step={1: 84}, resumed={1: 60}, saved={80}), rank=1) == 4


def test_a_save_of_another_node_is_seen_on_the_storage() -> None:
    assert steps_past_save(Progress(step={1: 47}, resumed={1: 0}), rank=1, complete=[20, 40]) == 7
    assert steps_past_save(Progress(step={1: 47}, resumed={1: 0}, saved={20}), rank=1, complete=[20, 40]) == 7
