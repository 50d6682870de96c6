"""`make demo-check` passes, and can fail: the planted bugs are found, named, and end it non-zero."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_check.system import RunningSystem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).parent


def demo_check(bug: str = "", *, drill: str = "kill-rank") -> tuple[int, dict[str, Any], str]:
    """Exit code, the last line as JSON, and everything that was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "demo_check"],
        env=os.environ | {"PYTHONPATH": str(HERE), "BUG": bug, "DRILL": drill},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_recovers_with_continuity_proven_and_leaves_nothing_behind() -> None:
    code, result, everything = demo_check()
    assert code == 0, everything
    assert (result["state"], result["continuity"], result["generation"]) == ("recovered", "bit-equal", 2)
    assert result["steps_compared"] > 4
    assert result["steps_lost"] >= 5
    assert 0 < result["detect_s"] < result["first_step_s"] < result["caught_up_s"]
    assert 0 < result["stop_s"] < result["first_step_s"]


def test_a_frozen_node_is_fenced_by_its_lease_and_does_nothing_once_it_is_thawed() -> None:
    code, result, everything = demo_check(drill="freeze-node")
    assert code == 0, everything
    assert (result["state"], result["drill"], result["continuity"]) == ("recovered", "passed", "bit-equal")
    assert result["fence"]["gpu-02"] == "lease_expired"
    assert 30 < result["fence_s"] < result["first_step_s"]


def test_fails_in_the_right_words_when_a_bug_is_planted() -> None:
    """One of the bugs that `make proof` plants; the others are planted in resumes by test_planted_bugs, too."""
    code, result, everything = demo_check("ghost")
    assert code == 1, everything
    assert "a process of generation 1 outlived the stop" in result["error"], everything
    assert "left behind" not in result["error"], everything


def test_a_second_demo_in_the_same_home_begins_a_fresh_job_where_ctrl_c_had_ended_the_first(tmp_path: Path) -> None:
    with RunningSystem(home=tmp_path, keep=True) as first:
        (job,) = first.rest.items("jobs")
        assert job["ended_at"] is None
    assert first.process.returncode == 0
    assert first.leftovers() == {}
    with RunningSystem(home=tmp_path, keep=True) as second:
        fresh, old = second.rest.items("jobs")
        assert (old["id"], old["state"]) == (job["id"], "stopped")
        assert fresh["ended_at"] is None
    assert second.process.returncode == 0
    assert second.leftovers() == {}
