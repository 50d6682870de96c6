"""The kill-rank drill on a real process: what is on disk when the fault comes, what a crash in its moment leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agents.faults.drill_record import DrillRecord, DrillStep, DrillStore
from agents.faults.faults import Faults
from agents.protocol.messages import FaultKind, FaultOrder, FaultReport, FaultState, LaunchSpec, Message, SeenPhase
from agents.sensors.rank_reports import SavedSaid, StepSaid
from agents.supervisor.intake import Intake
from tests.fakes.drill_desk import drill_desk

LAUNCH = LaunchSpec(
    argv=["python"],
    working_directory="/",
    environment={},
    run_id="r",
    node_rank=0,
    node_count=1,
    ranks_per_node=1,
    first_rank=0,
    world_size=1,
    master_address="127.0.0.1",
    checkpoint_directory="/no/such/directory",
)


@dataclass
class OneRank:
    """A run whose only rank is a sleeping process."""

    process: subprocess.Popen[bytes]
    ours: bool = True
    phase: SeenPhase = SeenPhase.RUNNING
    launch: LaunchSpec = LAUNCH
    ranks: range = range(1)
    exited: set[int] = field(default_factory=set)
    runner_pid: int | None = None

    def __post_init__(self) -> None:
        self.rank_pids = {0: self.process.pid}
        self.intake = Intake(job="j", generation=1, ranks=self.ranks, emit=lambda m: None, progressed=lambda r: None)

    def holds_process(self, pid: int) -> bool:
        return self.ours and pid == self.process.pid

    @property
    def alive(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        return self.process.poll() is None

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.intake.take(StepSaid(job="j", generation=1, rank=0, at=1.0, step=number))

    def saves(self, step: int) -> None:
        self.intake.take(
            SavedSaid(job="j", generation=1, rank=0, at=1.0, step=step, directory="d", size_bytes=1, world_size=1)
        )


@pytest.fixture
def run() -> Iterator[OneRank]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield OneRank(process)
    process.kill()
    process.wait()


def order(*, steps_after_save: int = 0, rank: int = 0, not_after: float = 4e9) -> FaultOrder:
    return FaultOrder(
        drill="d",
        kind=FaultKind.KILL_RANK,
        job="j",
        generation=1,
        rank=rank,
        not_after=not_after,
        steps_after_save=steps_after_save,
    )


def desk(directory: Path, run: OneRank | None, told: list[Message]) -> Faults:
    faults = drill_desk(directory, run, told)
    faults.adopt()
    return faults


def states(told: list[Message]) -> list[FaultState]:
    return [message.state for message in told if isinstance(message, FaultReport)]


async def test_waits_for_its_steps_after_the_newest_save(tmp_path: Path, run: OneRank) -> None:
    told: list[Message] = []
    drills = desk(tmp_path, run, told)
    drills.take([order(steps_after_save=5)])
    run.steps(*range(1, 30))
    drills.look()
    assert run.alive, "there is no save yet"
    run.saves(25)
    drills.look()
    run.saves(28)
    run.steps(30, 31, 32)
    drills.look()
    assert run.alive, "32 is four steps past 28"
    run.steps(33)
    drills.look()
    assert not run.alive
    assert states(told) == [FaultState.ARMED, FaultState.APPLIED]


async def test_is_on_disk_before_the_fault_and_a_full_disk_means_no_fault(tmp_path: Path, run: OneRank) -> None:
    drills = desk(tmp_path, run, told := [])
    run.steps(1)
    drills.take([order(steps_after_save=1)])
    in_the_way = tmp_path / f".drills.json.{os.getpid()}.new"
    in_the_way.mkdir()
    run.saves(1)
    run.steps(2)
    drills.look()
    assert run.alive
    in_the_way.rmdir()
    drills.look()
    assert not run.alive
    assert states(told) == [FaultState.ARMED, FaultState.APPLIED]


@pytest.mark.parametrize("died", [True, False])
async def test_a_crash_in_the_moment_of_the_fault_never_means_a_second_one(
    tmp_path: Path, run: OneRank, died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DrillStore(tmp_path)
    store.put(
        DrillRecord(
            drill="d", job="j", generation=1, rank=0, not_after=4e9, steps_after_save=0, step=DrillStep.APPLYING, at=7.0
        )
    )
    told: list[Message] = []
    drills = desk(tmp_path, run, told)
    drills.take([order()])
    assert run.alive
    assert states(told) == []
    if died:
        run.exited.add(0)
        await asyncio.sleep(0.2)
        assert states(told) == [FaultState.APPLIED]
    else:
        monkeypatch.setattr("agents.faults.faults._SETTLE_LIMIT_S", -1.0)
        await asyncio.sleep(0.2)
        assert states(told) == [FaultState.EXPIRED]
    drills.take([order()])
    assert run.alive
    assert len(states(told)) == 1
    await drills.close()


async def test_refuses_what_is_not_its_own(tmp_path: Path, run: OneRank) -> None:
    told: list[Message] = []
    desk(tmp_path, None, told).take([order()])
    assert states(told) == [FaultState.REFUSED]


async def test_kills_no_process_that_only_bears_the_number(tmp_path: Path, run: OneRank) -> None:
    told: list[Message] = []
    run.ours = False  # the number was taken over by somebody else's process
    desk(tmp_path, run, told).take([order()])
    assert run.alive
    assert states(told) == [FaultState.ARMED, FaultState.REFUSED]


async def test_comes_too_late(tmp_path: Path, run: OneRank) -> None:
    told: list[Message] = []
    drills = desk(tmp_path, run, told)
    drills.take([order(not_after=time.time() - 1)])
    assert states(told) == [FaultState.EXPIRED]
    assert run.alive


async def test_an_armed_drill_expires_by_itself(tmp_path: Path, run: OneRank) -> None:
    told: list[Message] = []
    drills = desk(tmp_path, run, told)
    drills.take([order(steps_after_save=5, not_after=time.time() + 0.05)])
    time.sleep(0.1)
    drills.look()
    assert states(told) == [FaultState.ARMED, FaultState.EXPIRED]
    run.saves(1)
    run.steps(20)
    drills.look()
    assert run.alive
