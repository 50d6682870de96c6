"""How often a snapshot is kept in memory."""

from __future__ import annotations

import pytest

from everstep.errors import UsageError
from everstep.memory_interval import BEFORE_MEASURED, MemoryInterval


def auto() -> MemoryInterval:
    return MemoryInterval("auto", environment={})


def test_number_of_steps_is_kept_to_from_any_start() -> None:
    interval = MemoryInterval(4, environment={})
    interval.begin(6)
    assert [step for step in range(7, 17) if interval.due(step)] == [8, 12, 16]


def test_none_keeps_nothing() -> None:
    interval = MemoryInterval(None, environment={})
    assert interval.steps is None and not any(interval.due(step) for step in range(100))


def test_auto_holds_training_up_for_no_more_than_a_hundredth() -> None:
    interval = auto()
    interval.made(0.5)
    interval.kept(10, blocked_s=0.02)
    interval.written(0.1)
    assert interval.best_steps() == 4, "20 ms of 4 steps of 0.5 s"


def test_auto_is_not_due_before_the_last_one_is_complete() -> None:
    interval = auto()
    interval.made(0.1)
    interval.kept(10, blocked_s=0.0001)
    interval.written(2.0)
    assert interval.best_steps() == 20


def test_auto_waits_with_its_first_numbers_until_it_has_measured() -> None:
    interval = auto()
    interval.begin(3)
    assert interval.best_steps() == BEFORE_MEASURED
    assert not interval.due(2 + BEFORE_MEASURED) and interval.due(3 + BEFORE_MEASURED)


def test_servers_word_overrides_the_script() -> None:
    assert MemoryInterval(None, environment={"EVERSTEP_MEMORY_EVERY": "7"}).steps == 7
    assert MemoryInterval(3, environment={"EVERSTEP_MEMORY_EVERY": "off"}).steps is None
    assert MemoryInterval(3, environment={"EVERSTEP_MEMORY_EVERY": "auto"}).measures


@pytest.mark.parametrize("wrong", [0, -1, "often"])
def test_what_is_no_interval_is_refused(wrong: int | str) -> None:
    with pytest.raises(UsageError, match="memory_every"):
        MemoryInterval(wrong, environment={})  # type: ignore[arg-type]


def test_stopped_interval_is_never_due_again() -> None:
    interval = auto()
    interval.stop()
    assert not interval.due(1000) and interval.best_steps() == 0
