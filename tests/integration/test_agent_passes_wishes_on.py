"""Pins and requests to save on their way from an order to the files that ranks read, also over an agent's restart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from agents.protocol.messages import AssignmentPhase, AssignmentReport, RankStarted, SeenPhase
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer

P = AssignmentPhase


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


async def test_wishes_reach_the_run_s_directory_and_follow_the_order(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    server.order([agent.assignment(P.PREPARE)])
    await server.until(lambda: SeenPhase.PREPARED in server.phases())
    port = next(m.master_port for m in server.messages if isinstance(m, AssignmentReport) and m.master_port)
    run = agent.assignment(P.RUN, port=port)
    server.order([replace(run, keep=["1:0"], save_request=4)])
    await server.until(lambda: server.heard(RankStarted))
    (found,) = agent.state.glob("runs/*/1/save-request")
    directory = found.parent

    def wished() -> tuple[list[str], int]:
        keep = json.loads((directory / "pinned.json").read_text())["keep"]
        return keep, int((directory / "save-request").read_text())

    assert wished() == (["1:0"], 4)
    server.order([replace(run, keep=["1:0", "1:20"], save_request=5)])
    await server.until(lambda: wished() == (["1:0", "1:20"], 5))
    await agent.kill()
    server.order([replace(run, keep=["1:20"], save_request=6)])
    await agent.start()
    await server.until(lambda: wished() == (["1:20"], 6))
