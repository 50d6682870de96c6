"""Knocking at other nodes: what answers, what does not, and that nothing is told twice or too late."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.probes import Probes, knock
from agents.protocol.messages import Message, ProbeOrder, ProbeOutcome, ProbeReport
from tests.fakes.agent_process import PROJECT, AgentProcess
from tests.fakes.agent_server import FakeAgentServer


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer()
    await server.start()
    yield server
    await server.stop()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def order(probe: str, port: int, *, address: str = "127.0.0.1", not_after: float = 4e9) -> ProbeOrder:
    return ProbeOrder(probe=probe, node="gpu-02", address=address, port=port, not_after=not_after)


async def test_a_connection_is_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert await knock("127.0.0.1", listening.getsockname()[1]) == (ProbeOutcome.REACHABLE, "connected")


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
async def test_a_refusal_is_life(address: str) -> None:
    outcome, words = await knock(address, free_port())
    assert outcome is ProbeOutcome.REACHABLE
    assert words == "Connection refused"


async def test_no_answer_within_the_limit_is_silence() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        # Its queue is full: the kernel drops further knocks, as a machine that is gone would.
        place = full.getsockname()
        held = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(place)
            held.append(filler)
        began = time.monotonic()
        assert await knock(*place) == (ProbeOutcome.UNREACHABLE, "no answer")
        assert 1.9 < time.monotonic() - began < 3.0
        for filler in held:
            filler.close()


def test_no_way_to_the_host_is_silence() -> None:
    code = "import asyncio; from agents.probes import knock; print(*asyncio.run(knock('192.0.2.1', 22)), sep=': ')"
    # In a network of its own there is no route to anywhere.
    alone = ["unshare", "--net", sys.executable, "-c", code]
    told = subprocess.run(alone, capture_output=True, text=True, cwd=PROJECT)
    if "unshare" in told.stderr:
        pytest.skip(f"no network namespace can be made here: {told.stderr.strip()}")
    assert told.stdout == "unreachable: Network is unreachable\n"


@pytest.mark.parametrize("address", ["no-such-host.invalid", "", "a" * 300, "\0"])
async def test_own_trouble_says_nothing_of_the_node(address: str) -> None:
    outcome, words = await knock(address, 22, limit_s=20.0)
    assert outcome is ProbeOutcome.FAILED or (address == "" and outcome is ProbeOutcome.REACHABLE)
    assert words


async def test_each_probe_is_answered_once_and_never_too_late() -> None:
    told: list[Message] = []
    answered: set[str] = {"before"}
    probes = Probes(emit=told.append, server_now=lambda: 100.0, told=lambda: answered)
    port = free_port()
    probes.take([order("a", port), order("a", port), order("before", port), order("late", port, not_after=99.0)])
    probes.take([order("a", port)])
    while not told:
        await asyncio.sleep(0.01)
    answered.add("a")
    probes.take([order("a", port)])
    await asyncio.sleep(0.2)
    (report,) = told
    assert isinstance(report, ProbeReport)
    assert (report.probe, report.outcome) == ("a", ProbeOutcome.REACHABLE)
    assert f"127.0.0.1 port {port}: Connection refused" in report.detail
    await probes.close()


async def test_an_agent_probes_on_order_and_once_over_its_lives(server: FakeAgentServer, tmp_path: Path) -> None:
    agent = AgentProcess(server, tmp_path, more=("--probe-port", "4022"))
    try:
        await agent.start()
        assert server.hellos[0].facts.probe_port == 4022
        server.probes = [order("p1", free_port()), order("late", free_port(), not_after=time.time() - 1)]
        server.order([])
        await server.until(lambda: server.heard(ProbeReport))
        await agent.kill()
        await agent.start()
        server.probes = [*server.probes, order("p2", server.port)]
        server.order([])
        await server.until(lambda: len(server.heard(ProbeReport)) > 1)
        await asyncio.sleep(0.3)
        told = [message for message in server.messages if isinstance(message, ProbeReport)]
        assert [(report.probe, report.outcome) for report in told] == [
            ("p1", ProbeOutcome.REACHABLE),
            ("p2", ProbeOutcome.REACHABLE),
        ]
    finally:
        agent.clean_up()
