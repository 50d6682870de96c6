from __future__ import annotations

import pytest

from everstep.errors import UsageError
from everstep.save_interval import BEFORE_MEASURED, DEFAULT_MTBF_S, SAVE_EVERY, SaveInterval, daly_interval_s


def interval(save_every: int | str, *, nodes: int = 1, told: str = "") -> SaveInterval:
    return SaveInterval(save_every, nodes=nodes, environment={SAVE_EVERY: told})  # type: ignore[arg-type]


def test_a_number_saves_at_its_multiples_whatever_saves_cost() -> None:
    fixed = interval(20)
    fixed.begin(50)
    fixed.made(0.1)
    fixed.saved(55, blocked_s=9.0)
    assert [step for step in range(51, 101) if fixed.due(step)] == [60, 80, 100]
    assert fixed.best_steps() == 20


def test_the_server_s_word_overrides_the_script_s() -> None:
    assert interval(20, told="7").steps == 7
    assert interval("auto", told="7").measures is False
    assert interval(20, told="auto").measures


def test_auto_counts_from_the_last_save_until_something_was_measured() -> None:
    auto = interval("auto")
    auto.begin(30)
    assert [step for step in range(31, 200) if auto.due(step)][:1] == [30 + BEFORE_MEASURED]


def test_auto_weighs_what_saves_and_steps_took_against_failures() -> None:
    auto = interval("auto", nodes=64)
    for _ in range(5):
        auto.made(0.5)
    auto.saved(10, blocked_s=2.0)
    assert auto.best_steps() == round(daly_interval_s(2.0, DEFAULT_MTBF_S / 64) / 0.5)
    auto.steps = auto.best_steps()
    assert auto.due(10 + auto.steps)
    assert not auto.due(9 + auto.steps)


def test_auto_puts_no_more_than_an_hour_at_risk() -> None:
    auto = interval("auto")
    auto.made(1.0)
    auto.saved(10, blocked_s=100.0)
    assert auto.best_steps() == 3600


@pytest.mark.parametrize(("save_every", "told"), [(0, ""), (-1, ""), ("often", ""), (20, "0"), (20, "x")])
def test_refuses_what_is_no_interval(save_every: int | str, told: str) -> None:
    with pytest.raises(UsageError, match="save_every"):
        interval(save_every, told=told)
