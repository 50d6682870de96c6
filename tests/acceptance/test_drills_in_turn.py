"""One running system whose node freezes, whose agent dies or is cut off, and whose server goes away. Then a second one.

They share the system because it takes half a minute to start, as `make drills` does with every kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from demo_check.run import SCRIPT, check_drill
from demo_check.system import LEISURELY, RunningSystem
from demo_check.witness import Witness

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningSystem, Witness]]:
    home = tmp_path_factory.mktemp("home")
    system = RunningSystem(script=(*SCRIPT, *LEISURELY), environment={"EVERSTEP_BEATS": "1"}, home=home, keep=True)
    with system, Witness(system.agents) as witness:
        yield system, witness
    assert_all_ended(system)


def assert_all_ended(system: RunningSystem) -> None:
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
    assert result["steps_checked"] > 50


def test_a_frozen_node_is_fenced_by_its_lease_and_does_nothing_once_it_is_thawed(
    trained: tuple[RunningSystem, Witness],
) -> None:
    result: dict[str, Any] = {}
    wrong = check_drill(*trained, "freeze-node", result=result)
    assert wrong == []
    assert (result["state"], result["drill"], result["continuity"]) == ("recovered", "passed", "bit-equal")
    assert result["fence"]["gpu-02"] == "lease_expired"
    assert 30 < result["fence_s"] < result["first_step_s"]


def test_a_second_demo_in_the_same_home_begins_a_fresh_job_where_ctrl_c_had_ended_the_first(
    trained: tuple[RunningSystem, Witness],
) -> None:
    first, _ = trained
    (job,) = first.rest.items("jobs")
    assert job["ended_at"] is None
    first.stop()
    assert_all_ended(first)
    with RunningSystem(script=LEISURELY, home=first.home, keep=True) as second:
        fresh, old = second.rest.items("jobs")
        assert (old["id"], old["state"]) == (job["id"], "stopped")
        assert fresh["ended_at"] is None
    assert_all_ended(second)
