"""What is read again of a rank's log after nobody listened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.sensors.rank_reports import StepSaid
from agents.supervisor.missed_words import Missed, missed_words

LINE_BYTES = 4000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """5000 steps, about 20 MB: longer than any first look."""
    path = tmp_path / "rank-0.jsonl"
    with path.open("w") as file:
        for step in range(1, 5001):
            said = {"kind": "step", "v": 1, "job": "j", "generation": 2, "rank": 0, "at": 1.0 * step, "step": step}
            said |= {"loss": 0.5, "epoch": 0, "step_time_s": 0.1}
            file.write(json.dumps(said) + " " * LINE_BYTES + "\n")
    return path


def read(path: Path, known_step: int, **limits: int) -> Missed:
    return missed_words(path, job="j", generation=2, rank=0, known_step=known_step, **limits)


def steps(missed: Missed) -> list[int]:
    return [said.step for said in missed.reports if isinstance(said, StepSaid)]


@pytest.mark.parametrize("known_step", [0, 1, 2500, 4998, 5000])
def test_everything_after_the_known_step_is_told_however_far_back_it_is(log: Path, known_step: int) -> None:
    missed = read(log, known_step)
    assert steps(missed) == list(range(known_step + 1, 5001))
    assert missed.whole


def test_what_lies_farther_back_than_can_be_read_is_said_to_be_missing(log: Path) -> None:
    missed = read(log, 10, farthest_bytes=3 << 20)
    assert not missed.whole
    assert 500 < len(steps(missed)) < 1000 and steps(missed)[-1] == 5000


def test_log_of_another_generation_says_nothing(log: Path) -> None:
    assert missed_words(log, job="j", generation=3, rank=0, known_step=0).reports == []


def test_no_log_is_nothing_missed(tmp_path: Path) -> None:
    assert read(tmp_path / "none", 7) == Missed([], True)
