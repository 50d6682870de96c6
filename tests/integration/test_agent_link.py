"""A link that is cut on purpose: at once, without a word, and for as long as it is meant to be."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.link import Handlers, Link
from agents.outbox import DiskOutbox
from agents.protocol.messages import Heartbeat, Hello, NodeFacts, RankStarted
from agents.server_clock import ServerClock
from agents.settings import Settings
from tests.fakes.agent_server import FakeAgentServer


class Linked:
    """A link to a fake server, without the rest of an agent."""

    def __init__(self, server: FakeAgentServer, directory: Path) -> None:
        self.outbox = DiskOutbox(directory)
        self.outbox.open()
        self.granted: list[int] = []
        server.credentials["n"] = "secret"
        hello = Hello(
            protocol=2, agent_version="0", node="n", boot_id="b", outbox_id=self.outbox.outbox_id, facts=NodeFacts()
        )

        async def refused(code: int) -> bool:
            return False

        self.link = Link(
            settings=Settings(
                server=server.url, name="n", state_directory=directory, reconnect_base_s=0.05, reconnect_cap_s=0.1
            ),
            outbox=self.outbox,
            clock=ServerClock(),
            handlers=Handlers(
                hello=lambda: hello,
                credential=lambda: "secret",
                welcomed=lambda: None,
                ordered=lambda order: None,
                refused=refused,
                granted=self.granted.append,
            ),
        )
        self.task = asyncio.ensure_future(self.link.run())


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer(heartbeat_interval_s=0.1)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def linked(server: FakeAgentServer, tmp_path: Path) -> AsyncIterator[Linked]:
    linked = Linked(server, tmp_path)
    yield linked
    linked.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await linked.task
    linked.outbox.close()


async def test_a_cut_is_at_once_and_lasts_until_it_is_mended(server: FakeAgentServer, linked: Linked) -> None:
    await server.until(lambda: linked.link.connected)
    began = time.monotonic()
    linked.link.cut()
    while linked.link.connected:
        await asyncio.sleep(0.001)
    assert time.monotonic() - began < 0.2, "no farewell is waited for"
    linked.outbox.add(RankStarted(job="j", generation=1, rank=0, pid=1, at=0.0))
    linked.link.wake()
    accepted = server.accepted
    await asyncio.sleep(0.5)
    assert server.accepted == accepted, "not even an attempt"
    assert not server.durable
    linked.link.mend()
    await server.until(lambda: server.durable)
    assert len(server.hellos) == 2


async def test_a_cut_before_the_first_connection_holds(server: FakeAgentServer, tmp_path: Path) -> None:
    linked = Linked(server, tmp_path)
    linked.link.cut()
    await asyncio.sleep(0.3)
    assert server.accepted == 0
    linked.link.mend()
    await server.until(lambda: linked.link.connected)
    linked.task.cancel()


async def test_a_cut_ends_an_attempt_that_is_under_way(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await reader.read()
        ended.set()
        writer.close()

    accepted, ended = 0, asyncio.Event()
    deaf = await asyncio.start_server(mute, "127.0.0.1", 0)
    server = FakeAgentServer()
    server.port = deaf.sockets[0].getsockname()[1]
    linked = Linked(server, tmp_path)
    while not accepted:
        await asyncio.sleep(0.01)
    linked.link.cut()
    async with asyncio.timeout(2):
        await ended.wait()
    await asyncio.sleep(0.3)
    assert accepted == 1
    linked.task.cancel()
    deaf.close()


async def test_being_mended_without_a_cut_changes_nothing(server: FakeAgentServer, linked: Linked) -> None:
    await server.until(lambda: linked.link.connected)
    linked.link.mend()
    await asyncio.sleep(0.2)
    assert linked.link.connected
    assert len(server.hellos) == 1


async def test_grants_count_from_the_sending_of_their_heartbeat(server: FakeAgentServer, linked: Linked) -> None:
    await server.until(lambda: sum(isinstance(message, Heartbeat) for message in server.transient) > 3)
    assert not linked.granted
    greeted = linked.link.contact_ns
    assert greeted > 0, "the server has answered the hello"
    server.grants_lease = True
    await server.until(lambda: len(linked.granted) > 3)
    assert linked.granted == sorted(linked.granted)
    assert linked.link.contact_ns == linked.granted[-1] > greeted
    offset_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    beats = [message.at - offset_s for message in server.transient if isinstance(message, Heartbeat)]
    assert all(any(abs(at - sent / 1e9) < 0.01 for at in beats) for sent in linked.granted)
