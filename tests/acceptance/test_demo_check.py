"""`make demo-check` passes. That it can fail is shown by `make proof`, which plants bugs; see test_auditor, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def test_recovers_with_continuity_proven_and_leaves_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo_check"],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}\n{done.stderr}\n{done.stdout}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["state"], result["continuity"], result["generation"]) == ("recovered", "bit-equal", 2)
    assert result["steps_compared"] > 4
    assert result["steps_lost"] >= 5
    assert 0 < result["detect_s"] < result["first_step_s"] < result["caught_up_s"]
    assert 0 < result["stop_s"] < result["first_step_s"]
