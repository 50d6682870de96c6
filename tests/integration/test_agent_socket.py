"""The agents' socket against the real rows: who may speak, what is acknowledged, and when orders are pushed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator

from agents.protocol.codec import server_frames
from agents.protocol.errors import CloseCode
from agents.protocol.messages import (
    Ack,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    NodeFacts,
    Order,
    RankStarted,
    Welcome,
)
from agents.protocol.outbox import Outbox
from agents.protocol.session import AgentSession
from dashboard.consumers.agents import agent_socket
from recovery import access, jobs
from recovery.domain.silence import Contact
from recovery.models import Node, RankRow
from recovery.store.situations import load_fleet
from tests.integration.test_recovery_pipeline import SPEC

pytestmark = pytest.mark.django_db(transaction=True)

call: Callable[..., Any] = sync_to_async


class Peer:
    """An agent's end, over an in-process ASGI connection."""

    def __init__(self, credential: str, *, protocol: int = 1, node: str = "gpu-01") -> None:
        headers = [(b"authorization", f"Bearer {credential}".encode())]
        self._asgi = ApplicationCommunicator(
            agent_socket, {"type": "websocket", "path": "/ws/agent", "headers": headers}
        )
        self.outbox = Outbox(outbox_id=f"box-{node}")
        hello = Hello(
            protocol=protocol, agent_version="0.1.0", node=node, boot_id="b", outbox_id="box", facts=NodeFacts()
        )  # fmt: skip
        self.session = AgentSession(hello, self.outbox)

    async def connect(self) -> Peer:
        await self._asgi.send_input({"type": "websocket.connect"})
        assert (await self.output())["type"] == "websocket.accept"
        return self

    async def open(self) -> Peer:
        await self.connect()
        await self.send(self.session.opening())
        return self

    async def send(self, frame: bytes) -> None:
        await self._asgi.send_input({"type": "websocket.receive", "bytes": frame})

    async def output(self) -> Any:
        return await self._asgi.receive_output(timeout=60)

    async def receive(self, kind: type[Any]) -> Any:
        """The next message of a kind."""
        for _ in range(50):
            message = self.session.receive((await self.output())["bytes"])
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    async def disconnect(self) -> None:
        await self._asgi.send_input({"type": "websocket.disconnect", "code": 1000})
        await self._asgi.wait(timeout=60)


async def credential(node: str = "gpu-01") -> str:
    token = await call(access.create_join_token)()
    return str(await call(access.join_node)(token=token, node_name=node))


async def until_all_are_seen() -> None:
    """Until the web process has written down that it hears every node: before that nothing is placed on them."""
    async with asyncio.timeout(10):
        while not all(node.contact is Contact.SEEN for node in (await call(load_fleet)(time.time())).nodes):
            await asyncio.sleep(0.05)


async def test_welcomes_a_node_and_pushes_its_order() -> None:
    peer = await Peer(await credential()).open()
    assert (await peer.receive(Welcome)).acknowledged == 0
    assert (await peer.receive(Order)).assignments == []
    await peer.disconnect()
    assert await call(Node.objects.get)(name="gpu-01")


@pytest.mark.parametrize(
    ("secret", "protocol", "code"),
    [("wrong", 1, CloseCode.UNAUTHORIZED), ("", 1, CloseCode.UNAUTHORIZED), (None, 99, CloseCode.UNSUPPORTED_VERSION)],
)
async def test_refuses_with_its_own_code_and_a_sentence(secret: str | None, protocol: int, code: CloseCode) -> None:
    real = await credential()
    peer = Peer(real if secret is None else secret, protocol=protocol)
    await peer.connect()
    if secret is None:
        await peer.send(peer.session.opening())
    _, goodbye = server_frames().decode((await peer.output())["bytes"])
    assert isinstance(goodbye, Goodbye)
    assert goodbye.code == code
    assert goodbye.reason.endswith(".")
    closed = await peer.output()
    assert (closed["type"], closed["code"]) == ("websocket.close", code)


async def test_frame_that_is_no_message_closes_with_a_sentence() -> None:
    peer = await Peer(await credential()).open()
    await peer.receive(Order)
    await peer.send(b"\xc1 no message")
    assert (await peer.receive(Goodbye)).code == CloseCode.MALFORMED


async def test_heartbeat_is_answered_with_the_wanted_revision() -> None:
    peer = await Peer(await credential()).open()
    order = await peer.receive(Order)
    await peer.send(peer.session.transient(Heartbeat(at=time.time(), revision=order.revision)))
    assert (await peer.receive(HeartbeatReply)).revision == order.revision
    await peer.disconnect()


async def test_order_is_pushed_on_change_without_a_broker() -> None:
    first = await Peer(await credential("gpu-01"), node="gpu-01").open()
    second = await Peer(await credential("gpu-02"), node="gpu-02").open()
    await first.receive(Order)
    await second.receive(Order)
    await until_all_are_seen()
    job = await call(jobs.submit_job)(SPEC, owner="tests")
    from recovery import engine

    await call(engine.advance_job)(job.id)
    order = await first.receive(Order)
    assert [(a.job, a.generation, a.phase) for a in order.assignments] == [(job.id, 1, "prepare")]
    await first.disconnect()
    await second.disconnect()


async def test_newest_session_of_an_identity_wins() -> None:
    secret = await credential()
    old = await Peer(secret).open()
    await old.receive(Order)
    new = await Peer(secret).open()
    await new.receive(Order)
    assert (await old.receive(Goodbye)).code == CloseCode.SUPERSEDED
    node = await call(Node.objects.get)(name="gpu-01")
    assert node.session
    await new.disconnect()


async def test_revoked_credential_closes_the_live_socket_within_5_seconds() -> None:
    peer = await Peer(await credential()).open()
    await peer.receive(Order)
    await call(Node.objects.filter(name="gpu-01").update)(revoked=True)
    started = time.monotonic()
    assert (await peer.receive(Goodbye)).code == CloseCode.REVOKED
    assert time.monotonic() - started < 5


async def test_fact_is_acknowledged_once_committed_and_stored_once_over_two_connections() -> None:
    secret = await credential("gpu-01")
    other = await Peer(await credential("gpu-02"), node="gpu-02").open()
    peer = await Peer(secret).open()
    await peer.receive(Order)
    await other.receive(Order)
    await until_all_are_seen()
    job = await call(jobs.submit_job)(SPEC, owner="tests")
    from recovery import engine

    await call(engine.advance_job)(job.id)
    peer.outbox.add(RankStarted(job=job.id, generation=1, rank=0, pid=7, at=time.time()))
    frames = peer.session.frames_to_send()
    await peer.send(frames[0])
    assert (await peer.receive(Ack)).through == 1
    assert await call(RankRow.objects.count)() == 1
    await peer.disconnect()
    again = await Peer(secret).open()
    assert (await again.receive(Welcome)).acknowledged == 1
    await again.send(frames[0])
    await asyncio.sleep(0)
    assert await call(RankRow.objects.count)() == 1
    await again.disconnect()
    await other.disconnect()
