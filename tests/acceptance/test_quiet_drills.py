"""One running system whose agent dies, whose agent is cut off, and whose server goes away: its job never notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from demo_check.run import SCRIPT, check_drill
from demo_check.system import RunningSystem
from demo_check.witness import Witness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[RunningSystem, Witness]]:
    system = RunningSystem(script=SCRIPT, environment={"EVERSTEP_BEATS": "1"})
    with system, Witness(system.agents) as witness:
        yield system, witness
    assert system.process.returncode == 0
    assert system.leftovers() == {}


@pytest.mark.parametrize(("kind", "seconds"), [("restart-agent", None), ("partition", 10.0), ("server-down", 12.0)])
def test_loses_no_step_and_no_event_by(
    trained: tuple[RunningSystem, Witness], kind: str, seconds: float | None
) -> None:
    result: dict[str, Any] = {}
    wrong = check_drill(*trained, kind, result=result, duration_s=seconds)
    assert wrong == []
    assert (result["drill"], result["steps_lost"], result["events_lost"], result["incidents"]) == ("passed", 0, 0, 0)
    assert result["steps_checked"] > 100
