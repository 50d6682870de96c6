"""Hints over a real broker: with one, what changed is acted on at once, not when somebody looks next."""

from __future__ import annotations

import asyncio
import time

import pytest
from django.db import transaction

from agents.protocol.messages import Order
from dashboard.consumers import fleet
from recovery import jobs, wakeup
from recovery.models import Node
from tests.integration.test_agent_socket import Peer, call, credential
from tests.integration.test_recovery_pipeline import SPEC
from tests.servers.broker import Broker

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def broker_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test may have found no broker, and none is tried for a while then."""
    monkeypatch.setattr(wakeup, "_away_until", 0.0)
    monkeypatch.setattr(wakeup, "_client", None)


def test_change_is_announced_once_it_is_committed(broker: Broker) -> None:
    with broker.client as client:
        with transaction.atomic():
            wakeup.announce("incident:inc_a", 7)
            assert client.xlen(wakeup.LIVE_STREAM) == 0
        entries = client.xrange(wakeup.LIVE_STREAM)
    assert [fields for _, fields in entries] == [{"topic": "incident:inc_a", "seq": "7"}]


def test_submitted_job_is_put_into_the_queue_of_the_workers(broker: Broker) -> None:
    job = jobs.submit_job(SPEC, owner="tests")
    with broker.client as client:
        (message,) = client.lrange("everstep-celery:recovery", 0, -1)
    assert "recovery.tasks.advance_job" in message
    assert job.id


def test_full_broker_fails_no_transaction(broker: Broker) -> None:
    broker.fill()
    try:
        assert jobs.submit_job(SPEC, owner="tests").pk
    finally:
        broker.empty()


async def test_order_is_pushed_at_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LOOK_EVERY_S", 30.0)
    peer = await Peer(await credential()).open()
    await peer.receive(Order)
    await asyncio.sleep(0.5)  # until it listens

    def change() -> None:
        with transaction.atomic():
            Node.objects.update(revision=5)
            wakeup.push_orders()

    started = time.monotonic()
    await call(change)()
    assert (await peer.receive(Order)).revision == 5
    assert time.monotonic() - started < 5.0
    await peer.disconnect()
