"""Snapshots in memory outlive their ranks and their agent; they go once the server says that nobody needs them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from agent_lives import reports, run_generation

from agents.protocol.messages import AssignmentPhase, SeenPhase, SnapshotKept
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def places() -> Iterator[list[Path]]:
    """Of tests that fail: nothing may stay in the machine's memory."""
    found: list[Path] = []
    yield found
    for place in found:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
async def agent(server: FakeAgentServer, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(server, tmp_path)
    yield agent
    agent.clean_up()


async def test_memory_is_kept_for_a_job_until_the_server_lets_go_of_it(
    server: FakeAgentServer, agent: AgentProcess, places: list[Path]
) -> None:
    await agent.start()
    await run_generation(agent)
    (launch,) = agent.state.glob("runs/job-1/1/launch.json")
    place = Path(json.loads(launch.read_text())["environment"]["EVERSTEP_MEMORY_DIR"])
    places.append(place)
    assert place.parts[:3] == ("/", "dev", "shm") and place.name.endswith(".job-1")
    place.mkdir(parents=True)
    server.memory_of = []
    server.order([agent.assignment(AssignmentPhase.STOP)])
    await server.until(lambda: reports(server, SeenPhase.STOPPED))
    assert place.exists(), "the job is in the order still"
    await agent.kill()
    server.memory_of = ["job-1"]
    server.order([])
    hellos = len(server.hellos)
    await agent.start()
    await server.until(lambda: len(server.hellos) > hellos)
    await asyncio.sleep(1.0)  # it has the order then, and nothing happens
    assert place.exists()
    server.memory_of = []
    server.order([])
    await server.until(lambda: not place.exists())


async def test_agent_tells_what_a_rank_keeps_in_memory(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_KEEP_EVERY="2")
    await server.until(lambda: server.heard(SnapshotKept))
    told = next(message for message in server.messages if isinstance(message, SnapshotKept))
    assert (told.rank, told.step, told.world_size, told.copy_of) == (0, 2, 1, None)
