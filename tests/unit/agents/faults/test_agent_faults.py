"""What an agent makes of drills that it finds on its disk, and of orders for a whole node."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agents.boot_clock import boottime_ns, this_boot
from agents.faults.drill_record import DrillRecord, DrillStep, DrillStore
from agents.faults.faults import Faults
from agents.faults.kept_fault import KeptFault, KeptFile, KeptStep, ProcessName, held_alone, kept_path
from agents.protocol.messages import FaultKind, FaultOrder, FaultReport, FaultState, LaunchSpec, Message, SeenPhase
from agents.supervisor.intake import Intake
from tests.fakes.drill_desk import FakeLink, drill_desk

K, S, D = FaultKind, FaultState, DrillStep
SECOND = 1_000_000_000

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

KEPT = KeptFault(
    drill="d",
    kind="kill-agent",
    step=KeptStep.WANTED,
    state_directory="/nowhere",
    boot_id="",
    not_after_ns=1,
    duration_s=5.0,
    undo_at_ns=1,
    agent=ProcessName(1, 2),
    agent_argv=("python", "-m", "agents"),
    agent_group="/sys/fs/cgroup",
    keeper_group=None,
    job="j",
    generation=1,
    mark="j:1:p:n",
    cgroup=None,
    runner=ProcessName(3, 4),
    master_port=20001,
    stopped=(ProcessName(5, 6),),
    sockets=(7, 8),
)


@dataclass
class QuietRun:
    """A run in its first step, without processes."""

    phase: SeenPhase = SeenPhase.RUNNING
    launch: LaunchSpec = LAUNCH
    ranks: range = range(1)
    exited: set[int] = field(default_factory=set)
    rank_pids: dict[int, int] = field(default_factory=lambda: {0: 1})
    runner_pid: int | None = None

    def __post_init__(self) -> None:
        self.intake = Intake(job="j", generation=1, ranks=self.ranks, emit=lambda m: None, progressed=lambda r: None)

    def holds_process(self, pid: int) -> bool:
        return False


@dataclass
class Desk:
    """The drills of one node over several lives of its agent."""

    directory: Path
    told: list[Message] = field(default_factory=list)
    link: FakeLink = field(default_factory=FakeLink)
    run: QuietRun | None = field(default_factory=QuietRun)
    lives: list[Faults] = field(default_factory=list)

    def born(self, *, server_now: Callable[[], float] = time.time) -> Faults:
        faults = drill_desk(self.directory, self.run, self.told, link=self.link, server_now=server_now)
        self.lives.append(faults)
        faults.adopt()
        return faults

    def remember(self, kind: FaultKind, step: DrillStep, **more: object) -> None:
        """What an earlier life wrote down."""
        store = DrillStore(self.directory)
        store.load()
        base = {"drill": "d", "job": "j", "generation": 1, "rank": 0, "not_after": 4e9, "steps_after_save": 0}
        store.put(DrillRecord(**{**base, "kind": kind, "step": step, "at": 5.0, **more}))  # type: ignore[arg-type]

    def keeper_noted(self, **changes: object) -> None:
        """What a keeper wrote down that does not live any more."""
        (self.directory / "faults").mkdir(exist_ok=True)
        KeptFile(kept_path(self.directory, "d"), KEPT).note(boot_id=this_boot(), **changes)

    @property
    def reports(self) -> list[tuple[FaultState, float]]:
        return [(message.state, message.at) for message in self.told if isinstance(message, FaultReport)]

    @property
    def states(self) -> list[FaultState]:
        return [state for state, _ in self.reports]

    @property
    def step(self) -> DrillStep:
        store = DrillStore(self.directory)
        store.load()
        record = store.get("d")
        assert record is not None
        return record.step


@pytest.fixture
async def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr("agents.faults.faults._HEAD_START_S", 0.0)
    desk = Desk(tmp_path)
    yield desk
    for faults in desk.lives:
        await faults.close()


def order(kind: FaultKind, *, duration_s: float = 5.0, drill: str = "d", **more: object) -> FaultOrder:
    base = {"job": "j", "generation": 1, "rank": 0, "not_after": time.time() + 60}
    return FaultOrder(**{**base, "drill": drill, "kind": kind, "duration_s": duration_s, **more})  # type: ignore[arg-type]


def test_what_is_kept_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = KeptFile(tmp_path / "d.json", KEPT)
    file.note(step=KeptStep.APPLIED, applied_at=3.5)
    again = KeptFile.read(tmp_path / "d.json")
    assert again is not None
    assert again.value == replace(KEPT, step=KeptStep.APPLIED, applied_at=3.5)
    assert KeptFile.read(tmp_path / "other.json") is None


async def test_cuts_the_link_for_its_time_and_tells_both(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = desk.born()
    faults.take([order(K.PARTITION)])
    assert desk.link.calls == ["cut"]
    assert desk.states == [S.ARMED, S.APPLIED]
    later = boottime_ns() + 6 * SECOND
    monkeypatch.setattr("agents.faults.faults.boottime_ns", lambda: later)
    faults._follow_all()
    assert desk.link.calls == ["cut", "mend"]
    assert desk.states == [S.ARMED, S.APPLIED, S.UNDONE]


@pytest.mark.parametrize("step", [D.APPLYING, D.APPLIED])
async def test_a_restart_does_not_end_a_partition(desk: Desk, step: DrillStep) -> None:
    desk.remember(K.PARTITION, step, boot_id=this_boot(), undo_at_ns=boottime_ns() + 60 * SECOND)
    desk.born()
    assert desk.link.calls == ["cut"]
    assert desk.states == ([S.APPLIED] if step is D.APPLYING else [])
    assert desk.step is D.APPLIED


@pytest.mark.parametrize(("boot", "in_s"), [("this", -1), ("another", 60)])
async def test_a_partition_that_is_over_is_undone_at_once(desk: Desk, boot: str, in_s: int) -> None:
    boot_id = this_boot() if boot == "this" else boot
    desk.remember(K.PARTITION, D.APPLIED, boot_id=boot_id, undo_at_ns=boottime_ns() + in_s * SECOND)
    desk.born()
    assert desk.link.calls == []
    assert desk.states == [S.UNDONE]
    desk.born()
    assert desk.states == [S.UNDONE]


async def test_what_a_keeper_never_began_is_taken_back_and_not_tried_again(desk: Desk) -> None:
    desk.remember(K.KILL_AGENT, D.APPLYING)
    desk.keeper_noted()
    faults = desk.born()
    assert desk.states == [S.EXPIRED]
    assert not kept_path(desk.directory, "d").exists()
    faults.take([order(K.KILL_AGENT)])
    assert desk.states == [S.EXPIRED]


async def test_what_was_never_written_down_for_a_keeper_did_not_happen(desk: Desk) -> None:
    desk.remember(K.FREEZE_NODE, D.APPLYING)
    desk.born()
    assert desk.states == [S.EXPIRED]


async def test_a_living_keeper_is_left_to_its_work(desk: Desk) -> None:
    desk.remember(K.FREEZE_NODE, D.APPLYING)
    desk.keeper_noted()
    with held_alone(kept_path(desk.directory, "d")) as alone:
        assert alone
        faults = desk.born()
        assert (desk.states, desk.step) == ([], D.APPLYING)
        desk.keeper_noted(step=KeptStep.DOING)
        faults._follow_all()
        assert (desk.states, desk.step) == ([], D.APPLYING)
        desk.keeper_noted(step=KeptStep.APPLIED, applied_at=7.0)
        faults._follow_all()
        assert (desk.reports, desk.step) == ([(S.APPLIED, 7.0)], D.APPLIED)
    desk.keeper_noted(step=KeptStep.UNDONE, applied_at=7.0, undone_at=9.0)
    faults._follow_all()
    assert desk.reports == [(S.APPLIED, 7.0), (S.UNDONE, 9.0)]
    assert not kept_path(desk.directory, "d").exists()


async def test_an_agent_that_was_away_tells_what_its_keeper_did(desk: Desk) -> None:
    desk.remember(K.KILL_AGENT, D.APPLYING)
    desk.keeper_noted(step=KeptStep.UNDONE, applied_at=7.0, undone_at=9.0, detail="SIGKILL", undone_detail="back")
    desk.born()
    assert desk.reports == [(S.APPLIED, 7.0), (S.UNDONE, 9.0)]
    assert desk.step is D.UNDONE


@pytest.mark.parametrize(("kept", "state"), [(KeptStep.REFUSED, S.REFUSED), (KeptStep.EXPIRED, S.EXPIRED)])
async def test_a_keeper_may_refuse(desk: Desk, kept: KeptStep, state: FaultState) -> None:
    desk.remember(K.ISOLATE_NODE, D.APPLYING)
    desk.keeper_noted(step=kept, detail="no way")
    desk.born()
    assert desk.states == [state]
    assert desk.link.calls == []


async def test_an_isolated_node_is_cut_from_the_server_too_and_only_for_that_long(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.remember(K.ISOLATE_NODE, D.APPLYING)
    desk.keeper_noted(step=KeptStep.APPLIED, applied_at=7.0, undo_at_ns=boottime_ns() + 60 * SECOND)
    with held_alone(kept_path(desk.directory, "d")):
        faults = desk.born()
        assert desk.link.calls == ["cut"]
        later = boottime_ns() + 61 * SECOND
        monkeypatch.setattr("agents.faults.faults.boottime_ns", lambda: later)
        faults._follow_all()
        assert desk.link.calls == ["cut", "mend"]
        assert desk.states == [S.APPLIED], "its keeper has not said that it is undone"


@pytest.mark.parametrize(("duration_s", "state"), [(0, S.REFUSED), (600, S.ARMED), (600.5, S.REFUSED)])
@pytest.mark.parametrize("kind", [K.KILL_AGENT, K.FREEZE_NODE, K.PARTITION, K.ISOLATE_NODE])
async def test_a_fault_has_an_end_within_ten_minutes(
    desk: Desk, kind: FaultKind, duration_s: float, state: FaultState
) -> None:
    desk.born().take([order(kind, duration_s=duration_s, steps_after_save=5)])
    assert desk.states == [state]


async def test_one_fault_of_a_node_at_a_time(desk: Desk) -> None:
    first, second = order(K.PARTITION), order(K.FREEZE_NODE, drill="e")
    desk.born().take([first, second])
    refused = next(message for message in desk.told if isinstance(message, FaultReport) and message.drill == "e")
    assert refused.state is S.REFUSED
    assert "drill d is not over" in refused.detail
    assert desk.link.calls == ["cut"]


@pytest.mark.parametrize("kind", [kind for kind in K if kind is not K.KILL_RANK])
async def test_refuses_what_is_not_here(desk: Desk, kind: FaultKind) -> None:
    desk.run = None
    desk.born().take([order(kind)])
    assert desk.states == [S.REFUSED]


@pytest.mark.parametrize("kind", [kind for kind in K if kind is not K.KILL_RANK])
async def test_waits_for_its_step_and_expires_without_it(desk: Desk, kind: FaultKind) -> None:
    now = [100.0]
    faults = desk.born(server_now=lambda: now[0])
    faults.take([order(kind, steps_after_save=5, not_after=160.0)])
    faults.look()
    assert (desk.states, desk.link.calls) == ([S.ARMED], [])
    now[0] = 160.1
    faults.look()
    assert (desk.states, desk.link.calls) == ([S.ARMED, S.EXPIRED], [])


async def test_a_drill_that_the_server_names_again_is_told_again_and_not_done_again(desk: Desk) -> None:
    desk.remember(K.PARTITION, D.UNDONE, applied_at=3.0, applied_detail="cut", detail="mended")
    desk.born().take([order(K.PARTITION)])
    assert desk.reports == [(S.APPLIED, 3.0), (S.UNDONE, 5.0)]
    assert desk.link.calls == []


async def test_a_full_disk_means_no_fault(desk: Desk) -> None:
    faults = desk.born()
    faults.take([order(K.PARTITION, steps_after_save=5)])
    in_the_way = desk.directory / f".drills.json.{os.getpid()}.new"
    in_the_way.mkdir()
    assert desk.run is not None
    desk.run.intake.progress.saved.add(1)
    desk.run.intake.progress.step[0] = 6
    faults.look()
    assert desk.link.calls == []
    in_the_way.rmdir()
    faults.look()
    assert desk.link.calls == ["cut"]


async def test_the_server_gets_to_hear_that_a_node_is_about_to_fall_silent(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.faults.faults._HEAD_START_S", 1000.0)
    faults = desk.born()
    faults.take([order(K.PARTITION)])
    faults.look()
    assert (desk.states, desk.link.calls) == ([S.ARMED], [])


async def test_without_a_runner_a_node_fault_is_refused_and_nothing_is_left(desk: Desk) -> None:
    desk.born().take([order(K.FREEZE_NODE)])
    assert desk.states == [S.ARMED, S.REFUSED]
    assert not kept_path(desk.directory, "d").exists()
