"""The agents' socket when something is wrong with one node: what it holds up, and what it must not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agents.protocol.messages import GpuSample, GpuSamples, Heartbeat, HeartbeatReply, Order
from dashboard.consumers import connection as consumer
from recovery import orders
from recovery.models import Node
from tests.integration.test_agent_socket import Peer, call, credential

pytestmark = pytest.mark.django_db(transaction=True)


async def beat(peer: Peer, revision: int, *, at: float | None = None) -> None:
    await peer.send(peer.session.transient(Heartbeat(at=time.time() if at is None else at, revision=revision)))
    await peer.receive(HeartbeatReply)


async def test_order_that_was_not_taken_over_is_pushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "PUSH_AGAIN_AFTER_S", 0.1)
    secret = await credential()
    await call(Node.objects.update)(revision=3)
    peer = await Peer(secret).open()
    assert (await peer.receive(Order)).revision == 3
    await beat(peer, 2)
    assert (await peer.receive(Order)).revision == 3
    await beat(peer, 3)
    await peer.disconnect()


async def test_samples_that_cannot_be_stored_do_not_end_the_connection() -> None:
    peer = await Peer(await credential()).open()
    await peer.receive(Order)
    sample = GpuSample(uuid="GPU-1", index=0, at=1.0, temperature_c=float("nan"))
    await peer.send(peer.session.transient(GpuSamples(samples=[sample])))
    for _ in range(3):
        await beat(peer, 0)
    await peer.disconnect()


async def test_one_node_whose_order_cannot_be_built_keeps_no_order_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = [await Peer(await credential(name), node=name).open() for name in ("gpu-01", "gpu-02", "gpu-03")]
    for peer in peers:
        await peer.receive(Order)
    broken = (await call(Node.objects.get)(name="gpu-02")).pk
    real = orders.order_for

    def order_for(node_id: int) -> Any:
        return 1 / 0 if node_id == broken else real(node_id)

    monkeypatch.setattr(orders, "order_for", order_for)
    await call(Node.objects.update)(revision=9)
    for peer in (peers[0], peers[2]):
        assert (await peer.receive(Order)).revision == 9
    for peer in peers:
        await peer.disconnect()


async def test_clock_that_is_put_right_is_followed() -> None:
    connection = consumer.Connection(node_id=1, node="gpu-01", send=lambda _: None)
    assert connection.offset_s is None
    connection.clock_deltas.extend([-3600.0] * consumer.CLOCK_BEATS)
    connection.clock_deltas.extend([0.2, 0.1] * consumer.CLOCK_BEATS)
    assert connection.offset_s == 0.1
