"""A save that takes ten times as long as usual is storage's trouble, and nothing else is."""

from __future__ import annotations

import pytest

from recovery.domain.slow_saves import AT_LEAST_S, judge_save_time


def test_case_R11_save_of_ten_times_the_usual_is_storage_and_nobodys_fault() -> None:
    reason = judge_save_time(42.0, before=[4.0, 4.2, 3.9, 30.0])
    assert reason.startswith("it took 42.0 s until it was on disk, the median of the 4 saves before is 4.1 s")
    assert "storage is slow" in reason and "no node is to blame" in reason


@pytest.mark.parametrize(
    ("save_time_s", "before"),
    [
        (39.9, [4.0] * 5),
        (42.0, [4.0, 4.0]),
        (42.0, []),
        (AT_LEAST_S - 0.1, [0.01] * 5),
        (42.0, [41.0, 43.0, 40.0, 4.0]),
    ],
    ids=["not ten times", "too few to compare", "the first", "short", "slow ones have become usual"],
)
def test_other_saves_are_not_called_slow(save_time_s: float, before: list[float]) -> None:
    assert judge_save_time(save_time_s, before=before) == ""
