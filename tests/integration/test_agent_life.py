"""An agent that comes and goes, with a server that comes and goes: nothing is lost, nothing is told twice."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.faults.tombstone import Tombstone, write_tombstone
from agents.protocol.errors import CloseCode
from agents.protocol.messages import (
    AssignmentPhase,
    CheckpointSaved,
    RankExited,
    RankFinished,
    RankResumed,
    RankStarted,
    SeenPhase,
)
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer
from tests.integration.agent_lives import gaps, reports, run_generation, steps

P = AssignmentPhase
S = SeenPhase


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def agent(server: FakeAgentServer, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(server, tmp_path)
    yield agent
    agent.clean_up()


def told_once(server: FakeAgentServer) -> None:
    """Every step and every fact about a rank is there exactly once, under numbers without holes."""
    assert len({outbox for outbox, _, _ in server.durable}) == 1
    numbers = [seq for _, seq, _ in server.durable]
    assert numbers == list(range(1, len(numbers) + 1))
    assert gaps(server) == []
    assert steps(server) == list(range(1, max(steps(server)) + 1))
    for kind in (RankStarted, RankResumed, RankFinished, RankExited):
        assert len(server.heard(kind)) <= 1, kind
    saved = Counter(message.step for message in server.messages if isinstance(message, CheckpointSaved))
    assert not saved or max(saved.values()) == 1


@pytest.mark.parametrize("gently", [True, False], ids=["SIGTERM", "SIGKILL"])
async def test_a_restart_tells_nothing_twice_and_loses_nothing(
    gently: bool, server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEP_S="0.01")
    ranks = sorted(agent.marked())
    for _ in range(3):
        reached = max(steps(server), default=0)
        await server.until(lambda reached=reached: max(steps(server), default=0) > reached + 30)
        await (agent.end() if gently else agent.kill())
        await agent.start()
    reached = max(steps(server))
    await server.until(lambda: max(steps(server)) > reached + 30)
    assert sorted(agent.marked()) == ranks, "training has not noticed"
    told_once(server)


async def test_what_happens_without_a_server_survives_the_agent(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEPS="60")
    await server.stop()
    while agent.marked():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    await agent.kill()
    hellos = len(server.hellos)
    await server.start()
    await agent.start()
    assert len({hello.outbox_id for hello in server.hellos[hellos - 1 :]}) == 1
    await server.until(lambda: reports(server, S.STOPPED))
    assert max(steps(server)) == 60
    assert len(server.heard(RankExited)) == 1
    told_once(server)


async def test_an_ended_generation_is_not_told_again(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEPS="25")
    await server.until(lambda: reports(server, S.STOPPED))
    for _ in range(2):
        await agent.kill()
        told = len(reports(server, S.STOPPED))
        await agent.start()
        await server.until(lambda told=told: len(reports(server, S.STOPPED)) > told)
    told_once(server)


async def test_a_lost_outbox_begins_anew_and_the_story_is_told_again(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEPS="25")
    await server.until(lambda: reports(server, S.STOPPED))
    await agent.kill()
    (agent.state / "outbox.log").write_bytes(b"nonsense")
    await agent.start()
    await server.until(lambda: len(server.heard(RankExited)) == 2)
    assert len({hello.outbox_id for hello in server.hellos}) == 2
    assert "damaged" in gaps(server)[0]
    assert sorted(set(steps(server))) == list(range(1, 26))


async def test_a_disk_that_takes_no_more_costs_nothing_while_the_agent_lives(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEP_S="0.01")
    _, hard = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (4096, hard))
    await server.until(lambda: gaps(server))
    assert "cannot be written (File too large): it goes on from memory" in gaps(server)[0]
    reached = max(steps(server))
    await server.until(lambda: max(steps(server)) > reached + 50)
    assert steps(server) == list(range(1, max(steps(server)) + 1))
    # The next life says what it cannot know, and training has noticed neither.
    await agent.kill()
    told = len(gaps(server))
    await agent.start()
    await server.until(lambda: len(gaps(server)) > told)
    reached = max(steps(server))
    await server.until(lambda: max(steps(server)) > reached + 30)
    assert sorted(set(steps(server))) == list(range(1, max(steps(server)) + 1))
    assert not server.errors


async def test_heartbeats_go_on_while_a_long_backlog_is_sent(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    server.acknowledges = False
    await run_generation(agent, STUB_PHASES="1", STUB_STEP_S="0.0005")
    await asyncio.sleep(3.0)
    beats = len(server.beats)
    await server.until(lambda: len(server.beats) > beats + 5, within_s=5)
    assert server.durable[-1][1] <= 1000 + 1, "no more is on its way than the server takes at a time"
    server.acknowledges = True
    server.drop_connections()
    hellos = len(server.hellos)
    await server.until(lambda: len(server.hellos) > hellos)
    beats = len(server.beats)
    await server.until(lambda: len(server.beats) > beats + 5, within_s=5)
    assert not server.errors


async def test_a_superseded_agent_says_so_and_comes_back_slowly(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await asyncio.sleep(0.3)
    server.close_connections(CloseCode.SUPERSEDED)
    began = time.monotonic()
    hellos = len(server.hellos)
    await server.until(lambda: len(server.hellos) > hellos)
    assert time.monotonic() - began >= 0.45, "half of slow_retry_s, which is 1 s here; 0.3 s is the cap of others"
    assert "see that only one runs for this node" in agent.log.read_text()


async def test_a_tombstone_keeps_it_down_until_its_limit(server: FakeAgentServer, agent: AgentProcess) -> None:
    agent.state.mkdir(parents=True)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    began = time.monotonic()
    until = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 3 * 10**9
    write_tombstone(agent.state, Tombstone(until_boottime_ns=until, drill="d", boot_id=boot_id))
    starting = asyncio.ensure_future(agent.start())
    await asyncio.sleep(2.0)
    assert [path.name for path in agent.state.iterdir()] == ["down-until"], "it has touched nothing"
    assert not server.joins
    await starting
    assert time.monotonic() - began >= 3.0


async def test_an_agent_of_another_release_takes_over(server: FakeAgentServer, agent: AgentProcess) -> None:
    """What another release has written holds names that this one does not know."""
    await agent.start()
    await run_generation(agent)
    await server.until(lambda: steps(server))
    await agent.end()
    path = agent.state / "runs/job-1/1.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "of_a_later_release": 1}))
    before = sorted(agent.marked())
    await agent.start()
    reached = max(steps(server))
    await server.until(lambda: max(steps(server)) > reached + 10)
    assert sorted(agent.marked()) == before
    told_once(server)
