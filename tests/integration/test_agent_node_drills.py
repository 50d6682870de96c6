"""Drills that break a node, with the real agent, real keepers and ranks that are real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.faults.agent_again import present_agent
from agents.faults.kept_fault import KeptFile, kept_path
from agents.protocol.messages import (
    AssignmentPhase,
    AssignmentReport,
    FaultKind,
    FaultOrder,
    FaultReport,
    FaultState,
    OutboxGap,
    RankExited,
    RankStarted,
    SeenPhase,
    StepReports,
)
from agents.supervisor.cgroups import ControlGroup, cgroup2_mount
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer
from tests.fakes.drilled_node import goes_on, state_of

WITH_AND_WITHOUT_CGROUPS = pytest.mark.parametrize(
    "agent", [(), ("--no-cgroup",)], indirect=True, ids=["cgroup", "no cgroup"]
)

NODE = f"node-{os.getpid()}"
"""A name of our own: agents and keepers look for a node's ranks on the whole machine, and other tests may run there."""

P, K, S = AssignmentPhase, FaultKind, FaultState

LATE_S = 10.0
"""A keeper's share of a busy machine may come this late."""


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def agent(server: FakeAgentServer, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(server, tmp_path, name=NODE, more=getattr(request, "param", ()))
    yield agent
    clean_up(agent)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[AgentProcess]:
    """A second node with a server of its own, for rank 1."""
    server = FakeAgentServer()
    await server.start()
    (tmp_path / "peer").mkdir()
    peer = AgentProcess(server, tmp_path / "peer", name=f"{NODE}-peer")
    yield peer
    clean_up(peer)
    await server.stop()


def clean_up(agent: AgentProcess) -> None:
    agent.clean_up()
    keeper = keeper_pid(agent)
    for pid in (keeper, present_agent(agent.state)):  # a keeper may have started an agent that is no child of ours
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for path in groups(f"everstep-{agent.name}-*"):
        ControlGroup(path).remove()


def groups(pattern: str) -> list[Path]:
    mount = cgroup2_mount(Path("/proc/self/mountinfo").read_text())
    return [] if mount is None else list(mount.glob(pattern))


def order(
    kind: FaultKind, *, duration_s: float = 0.0, rank: int = 0, drill: str = "drill-1", steps_after_save: int = 0
) -> FaultOrder:
    return FaultOrder(
        drill=drill,
        kind=kind,
        job="job-1",
        generation=1,
        rank=rank,
        not_after=time.time() + 60,
        duration_s=duration_s,
        steps_after_save=steps_after_save,
    )


async def train(agent: AgentProcess, *, node_rank: int = 0, **environment: str) -> None:
    """Start generation 1 on a node and wait until it makes steps."""
    server = agent.server
    await agent.start()
    prepare = agent.assignment(P.PREPARE, node_rank=node_rank, port=23999 if node_rank else None, **environment)
    server.order([prepare])
    await server.until(lambda: SeenPhase.PREPARED in server.phases())
    server.order([running(agent, node_rank=node_rank, **environment)])
    await server.until(lambda: len(steps(server)) > 3)


def running(agent: AgentProcess, *, node_rank: int = 0, **environment: str):  # type: ignore[no-untyped-def]
    return agent.assignment(P.RUN, node_rank=node_rank, port=23999, **environment)


async def drill(agent: AgentProcess, fault: FaultOrder, *, node_rank: int = 0, **environment: str) -> None:
    agent.server.order([running(agent, node_rank=node_rank, **environment)], faults=[fault])


def steps(server: FakeAgentServer) -> list[int]:
    return [step.step for message in server.messages if isinstance(message, StepReports) for step in message.steps]


def reports(server: FakeAgentServer) -> dict[FaultState, FaultReport]:
    return {message.state: message for message in server.messages if isinstance(message, FaultReport)}


def rank_pids(server: FakeAgentServer) -> list[int]:
    return [message.pid for message in server.messages if isinstance(message, RankStarted)]


def logged_steps(agent: AgentProcess, rank: int = 0) -> int:
    log = agent.state / "runs" / "job-1" / "1" / "logs" / f"rank-{rank}.jsonl"
    return log.read_text().count('"kind": "step"')


def keeper_pid(agent: AgentProcess) -> int | None:
    words = f"agents.faults.keeper\0{agent.state}/".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if words in (entry / "cmdline").read_bytes():
                    return int(entry.name)
    return None


async def until(condition, *, within_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        await asyncio.sleep(0.02)


async def both_told(agent: AgentProcess, *, within_s: float = 20.0) -> tuple[FaultReport, FaultReport]:
    server = agent.server
    await server.until(lambda: {S.APPLIED, S.UNDONE} <= reports(server).keys(), within_s=within_s)
    told = [message.state for message in server.messages if isinstance(message, FaultReport)]
    assert told == [S.ARMED, S.APPLIED, S.UNDONE]
    assert not kept_path(agent.state, "drill-1").exists(), "nothing is left on the disk"
    assert not (agent.state / "faults").exists() or not list((agent.state / "faults").iterdir())
    assert not groups(f"everstep-{agent.name}-keeper-*")
    return reports(server)[S.APPLIED], reports(server)[S.UNDONE]


def unharmed(server: FakeAgentServer) -> None:
    """No step was lost, nobody died, and nothing is missing from what the agent tells."""
    made = steps(server)
    assert made == list(range(1, len(made) + 1))
    assert not server.heard(RankExited)
    assert not server.heard(OutboxGap)
    assert {m.generation for m in server.messages if isinstance(m, AssignmentReport)} == {1}


async def test_partition_cuts_the_server_off_and_ranks_train_on(agent: AgentProcess) -> None:
    server = agent.server
    await train(agent)
    everyone = agent.marked()
    await drill(agent, order(K.PARTITION, duration_s=3.0))
    await server.until(lambda: S.ARMED in reports(server))
    await asyncio.sleep(0.7)
    accepted, heard, made = server.accepted, len(server.durable) + len(server.transient), logged_steps(agent)
    await asyncio.sleep(1.5)
    assert (server.accepted, len(server.durable) + len(server.transient)) == (accepted, heard), "not a byte came"
    assert S.APPLIED not in reports(server)
    assert logged_steps(agent) > made + 20
    assert agent.marked() == everyone
    applied, undone = await both_told(agent)
    assert 2.9 < undone.at - applied.at < 3.5
    await server.until(lambda: len(steps(server)) > made + 50)
    unharmed(server)


async def test_a_restart_does_not_end_a_partition(agent: AgentProcess) -> None:
    server = agent.server
    await train(agent)
    hellos = len(server.hellos)
    await drill(agent, order(K.PARTITION, duration_s=4.0))
    await asyncio.sleep(0.7)
    await agent.kill()
    began = asyncio.create_task(agent.start())
    await asyncio.sleep(2.0)
    assert len(server.hellos) == hellos
    await began
    applied, undone = await both_told(agent)
    assert 3.9 < undone.at - applied.at < 4.0 + LATE_S
    await server.until(lambda: len(steps(server)) > 100)
    unharmed(server)


@WITH_AND_WITHOUT_CGROUPS
async def test_freeze_stops_everyone_and_wakes_everyone(agent: AgentProcess) -> None:
    server = agent.server
    await train(agent)
    frozen = [agent.pid, *agent.marked()]
    assert len(frozen) == 3
    await drill(agent, order(K.FREEZE_NODE, duration_s=6.0))
    await until(lambda: [state_of(pid) for pid in frozen] == ["T"] * 3)
    keeper = keeper_pid(agent)
    assert keeper is not None
    assert f"everstep-{NODE}-keeper" in Path(f"/proc/{keeper}/cgroup").read_text() or "--no-cgroup" in agent.more
    heard = len(server.durable) + len(server.transient)
    await asyncio.sleep(1.0)
    assert [state_of(pid) for pid in frozen] == ["T"] * 3
    assert len(server.durable) + len(server.transient) == heard
    applied, undone = await both_told(agent)
    assert 5.9 < undone.at - applied.at < 6.0 + LATE_S
    assert "SIGSTOP to 3 processes" in applied.detail
    await until(lambda: all(goes_on(pid) for pid in frozen))
    made = len(steps(server))
    await server.until(lambda: len(steps(server)) > made + 5)
    unharmed(server)


@WITH_AND_WITHOUT_CGROUPS
async def test_kill_agent_takes_all_and_the_next_agent_stays_away_until_the_limit(agent: AgentProcess) -> None:
    server = agent.server
    await train(agent)
    everyone = agent.marked()
    hellos = len(server.hellos)
    await drill(agent, order(K.KILL_AGENT, duration_s=4.0))
    await until(lambda: agent._process is not None and agent._process.poll() is not None)
    await until(lambda: all(state_of(pid) in ("", "Z", "X") for pid in everyone))
    assert not agent.marked()
    began = asyncio.create_task(agent.start())
    await asyncio.sleep(2.0)
    assert (len(server.hellos), present_agent(agent.state)) == (hellos, None)
    await began
    assert present_agent(agent.state) == agent.pid
    applied, undone = await both_told(agent)
    assert 3.9 < undone.at - applied.at < 8.0
    assert undone.detail == f"The agent is back as process {agent.pid}."
    await server.until(lambda: SeenPhase.STOPPED in server.phases())


async def test_a_keeper_starts_the_agent_that_nobody_starts(agent: AgentProcess) -> None:
    server = agent.server
    await train(agent)
    before = agent.pid
    hellos = len(server.hellos)
    await drill(agent, order(K.RESTART_AGENT))
    await server.until(lambda: len(server.hellos) > hellos)
    applied, undone = await both_told(agent)
    assert 4.5 < undone.at - applied.at < 9.0
    pid = present_agent(agent.state)
    assert pid not in (None, before)
    assert undone.detail == f"Nobody else started the agent: the keeper did, as process {pid}."
    await server.until(lambda: len(steps(server)) > 300)
    unharmed(server)


async def test_restart_agent_leaves_training_alone(agent: AgentProcess) -> None:
    server = agent.server
    await train(agent)
    everyone = agent.marked()
    await drill(agent, order(K.RESTART_AGENT))
    await until(lambda: agent._process is not None and agent._process.poll() is not None)
    await agent.start()  # as a supervisor would, at once
    back_at = time.time()
    _, undone = await both_told(agent)
    assert undone.at - back_at < 4.0
    assert undone.detail == f"The agent is back as process {agent.pid}."
    await server.until(lambda: len(steps(server)) > 100)
    assert agent.marked() == everyone
    unharmed(server)
    # The same order again, to another life of the agent: it is not done again.
    server.push(server.current_order())
    await asyncio.sleep(1.0)
    assert present_agent(agent.state) == agent.pid


async def test_isolated_ranks_lose_each_other_and_meet_again(
    agent: AgentProcess, peer: AgentProcess, tmp_path: Path
) -> None:
    talk = tmp_path / "talk"
    talk.mkdir()
    await train(agent, STUB_TALK=str(talk))
    await train(peer, node_rank=1, STUB_TALK=str(talk))

    def heard(rank: int) -> int:
        path = talk / f"rank-{rank}.heard"
        return path.read_text().count("\n") if path.exists() else 0

    await until(lambda: heard(0) > 5 and heard(1) > 5)
    await drill(agent, order(K.ISOLATE_NODE, duration_s=5.0), STUB_TALK=str(talk))
    fault = kept_path(agent.state, "drill-1")
    await until(lambda: (file := KeptFile.read(fault)) is not None and file.value.applied_at is not None)
    deaf = heard(0)
    await asyncio.sleep(1.5)
    accepted, silent, hearts = agent.server.accepted, heard(1), len(peer.server.transient)
    made = logged_steps(agent)
    await asyncio.sleep(1.5)
    assert heard(0) <= deaf + 1
    assert heard(1) == silent
    assert agent.server.accepted == accepted
    assert len(peer.server.transient) > hearts, "the other node's agent has its server"
    assert logged_steps(agent) > made, "nobody was stopped for it"
    applied, undone = await both_told(agent)
    assert "1 TCP connections" in applied.detail
    assert 4.9 < undone.at - applied.at < 6.5
    await until(lambda: heard(0) > deaf + 100 and heard(1) > silent + 100)
    unharmed(agent.server)


@WITH_AND_WITHOUT_CGROUPS
async def test_a_keeper_outlives_the_end_of_the_generation(
    agent: AgentProcess, peer: AgentProcess, tmp_path: Path
) -> None:
    talk = tmp_path / "talk"
    talk.mkdir()
    await train(agent, STUB_TALK=str(talk))
    await train(peer, node_rank=1, STUB_TALK=str(talk))
    await until(lambda: (talk / "rank-0.heard").exists() and (talk / "rank-0.heard").read_text())
    await drill(agent, order(K.ISOLATE_NODE, duration_s=3.0), STUB_TALK=str(talk))
    await until(lambda: (file := KeptFile.read(kept_path(agent.state, "drill-1"))) and file.value.applied_at)
    keeper = keeper_pid(agent)
    assert keeper is not None
    os.kill(rank_pids(agent.server)[0], signal.SIGKILL)
    await until(lambda: not agent.marked())
    await asyncio.sleep(0.5)
    assert goes_on(keeper)
    assert "gone" not in (talk / "rank-1.heard").read_text(), "a dead rank of an isolated node says no farewell"
    _, undone = await both_told(agent)
    assert undone.detail.startswith("1 of 1 connections")
    await until(lambda: state_of(rank_pids(peer.server)[0]) in ("", "Z"), within_s=30)


async def test_isolation_of_ranks_that_talk_to_nobody_is_refused(agent: AgentProcess) -> None:
    await train(agent)
    await drill(agent, order(K.ISOLATE_NODE, duration_s=5.0))
    await agent.server.until(lambda: S.REFUSED in reports(agent.server))
    assert "no TCP connection to ranks on other nodes" in reports(agent.server)[S.REFUSED].detail
    assert len(agent.server.hellos) == 1
    assert not groups(f"everstep-{agent.name}-keeper-*")


async def test_the_next_agent_undoes_what_a_killed_keeper_left(agent: AgentProcess) -> None:
    server = agent.server
    await train(agent)
    everyone = agent.marked()
    await drill(agent, order(K.FREEZE_NODE, duration_s=10.0))
    await until(lambda: (file := KeptFile.read(kept_path(agent.state, "drill-1"))) and file.value.applied_at)
    keeper = keeper_pid(agent)
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    await agent.kill()
    await agent.start()
    assert [state_of(pid) for pid in everyone] == ["T", "T"]
    applied, undone = await both_told(agent)
    assert 9.9 < undone.at - applied.at < 10.0 + LATE_S, "not before its time"
    await until(lambda: all(goes_on(pid) for pid in everyone))
    await server.until(lambda: len(steps(server)) > 50)
    unharmed(server)


async def test_waits_for_its_step_after_a_save(agent: AgentProcess) -> None:
    await train(agent, STUB_SAVE_EVERY="40")
    await drill(agent, order(K.FREEZE_NODE, duration_s=0.5, steps_after_save=7), STUB_SAVE_EVERY="40")
    applied, _ = await both_told(agent)
    # The order is: step 40, save, steps 41 to 47; the fault takes the moment it takes after that.
    assert applied.detail.split("step ")[1].split(":")[0].isdecimal()
    assert int(applied.detail.split("step ")[1].split(":")[0]) >= 47
