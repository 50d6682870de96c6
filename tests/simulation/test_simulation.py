"""The simulator itself: it passes on the real machine, finds what is planted, and tells it shortly."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from schedules import make_schedule
from simulate import main, run_schedule


def last_json(text: str) -> dict[str, object]:
    found = json.loads(text.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def summary() -> dict[str, object]:
    """What 120 schedules on the real machine come to."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = main(["--schedules", "120", "--seed", "1", "--processes", "2"])
    return {"code": code, **last_json(told.getvalue())}


def test_no_rule_is_violated_on_the_real_machine(summary: dict[str, object]) -> None:
    assert (summary["code"], summary["schedules"], summary["violations"]) == (0, 120, 0)
    assert isinstance(summary["faults"], int)
    assert summary["faults"] > 200


def test_finds_a_relaunch_without_fence_proof_and_shortens_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "20", "--seed", "1", "--plant", "no-fence", "--processes", "2"]) == 1
    told = capsys.readouterr().out
    assert "VIOLATED fenced-before-run" in told
    first = told.split("shortened from ")[1].splitlines()[0]
    assert int(first.split(" to ")[1].split()[0]) <= 3
    assert "--replay 1:" in told


def test_the_same_schedule_gives_the_same_story() -> None:
    first, second = (run_schedule(make_schedule(4, 17), plant="") for _ in range(2))
    assert first == second


def test_a_schedule_can_be_replayed_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "1:3"]) == 0
    assert "no rule was violated" in capsys.readouterr().out


def test_schedules_reach_every_part_of_the_pipeline(summary: dict[str, object]) -> None:
    moves = summary["moves"]
    assert isinstance(moves, dict)
    for wanted in (
        "verifying -> recovered",
        "launching -> stopping",
        "verifying -> stopping",
        "placing -> stopping",
        "placing -> waiting_for_checkpoint",
        "escalated -> stopping",
        "stopping -> escalated",
        "paused -> stopping",
    ):
        assert moves.get(wanted, 0) > 0, (wanted, moves)
