"""What a web process writes down of the agents that it hears, and what must not look like silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError

from agents.protocol.messages import Heartbeat, HeartbeatReply, Order
from dashboard.consumers import fleet as consumer
from recovery import sessions
from recovery.domain.silence import Contact
from recovery.models import Node, Observer
from recovery.store.situations import load_fleet
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_agent_socket import Peer, call, credential, until_all_are_seen

pytestmark = pytest.mark.django_db(transaction=True)


def heard(node: Node, *, at: float, session: str = "") -> sessions.Heard:
    return sessions.Heard(node_id=node.pk, session=session or node.session, at=at, offset_s=None, seen_revision=0)


@pytest.fixture
def node() -> Node:
    ToldFleet.of("job", "gpu-01")
    return Node.objects.get(name="gpu-01")


def contact(*, now: float) -> Contact:
    return load_fleet(now).nodes[0].contact


def test_record_that_had_to_wait_for_the_database_makes_nobody_look_silent(node: Node) -> None:
    now = time.time()
    sessions.record_heard([heard(node, at=now - 15.5)], observer="obs-a", since=now - 100.0, at=now - 15.0, lag_s=0.0)
    Observer.objects.exclude(name="obs-a").delete()
    assert contact(now=now) is Contact.UNOBSERVED
    sessions.record_heard([heard(node, at=now - 0.5)], observer="obs-a", since=now - 100.0, at=now, lag_s=0.0)
    assert contact(now=now) is Contact.SEEN


def test_node_that_moved_to_another_connection_is_left_alone_by_its_old_one(node: Node) -> None:
    before = node.last_heard_at
    assert (
        sessions.record_heard(
            [heard(node, at=5.0, session="ses-older")], observer="obs-a", since=0.0, at=6.0, lag_s=0.0
        )
        == frozenset()
    )
    node.refresh_from_db()
    assert (node.last_heard_at, node.observer) == (before, "obs-tests")


def test_whole_fleet_is_recorded_at_once() -> None:
    Node.objects.bulk_create(
        Node(name=f"n{i}", joined_at=1.0, session=f"s{i}", clock_offset_s=7.0) for i in range(2300)
    )
    rows = [
        sessions.Heard(node_id=node.pk, session=node.session, at=40.0, offset_s=0.5 if node.pk % 2 else None,
                       seen_revision=3)
        for node in Node.objects.all()
    ]  # fmt: skip
    assert len(sessions.record_heard(rows, observer="obs-a", since=0.0, at=41.0, lag_s=0.0)) == 2300
    told = Node.objects.filter(last_heard_at=40.0, observer="obs-a", seen_revision=3)
    assert {(node.pk % 2, node.clock_offset_s) for node in told} == {(0, 7.0), (1, 0.5)}
    assert told.count() == 2300


def test_processes_that_are_gone_are_forgotten_unless_a_node_was_heard_by_them_last(node: Node) -> None:
    now = time.time()
    for name, age_s in (("obs-crashed", 3600.0), ("obs-new", 5.0)):
        Observer.objects.create(name=name, since=now - 7200.0, beat_at=now - age_s)
    Observer.objects.filter(name=node.observer).update(beat_at=now - 7200.0)
    sessions.forget_observers(now=now)
    assert set(Observer.objects.values_list("name", flat=True)) == {"obs-new", node.observer}


# --- In the web process -------------------------------------------------------------------------------------------


@pytest.fixture
def short_grants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(consumer, "GRANT_S", 0.5)
    monkeypatch.setattr(consumer, "RECORD_EVERY_S", 0.1)
    yield


async def grants(peer: Peer) -> bool:
    await peer.send(peer.session.transient(Heartbeat(at=time.time(), revision=0)))
    return bool((await peer.receive(HeartbeatReply)).grants_lease)


async def until_it_grants(peer: Peer, *, wanted: bool = True) -> None:
    async with asyncio.timeout(10):
        while await grants(peer) is not wanted:
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("short_grants")
async def test_no_lease_is_granted_while_nobody_can_write_down_that_the_node_was_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = await Peer(await credential()).open()
    await peer.receive(Order)
    await until_it_grants(peer)
    real = sessions.record_heard

    def away(*_: Any, **__: Any) -> Any:
        raise OperationalError("the database is away")

    monkeypatch.setattr(sessions, "record_heard", away)
    await asyncio.sleep(0.8)
    assert not await grants(peer)
    monkeypatch.setattr(sessions, "record_heard", real)
    await until_it_grants(peer)
    await peer.disconnect()


@pytest.mark.usefixtures("short_grants")
async def test_process_that_stood_still_begins_anew_and_grants_nothing_before_it_has_written_that_down() -> None:
    peer = await Peer(await credential()).open()
    await peer.receive(Order)
    await until_it_grants(peer)
    await until_all_are_seen()
    before = consumer.fleet.observer
    consumer.fleet._ticked_at -= 20.0
    consumer.fleet._notice_standstill()
    assert consumer.fleet.observer != before
    assert not await grants(peer)
    await until_it_grants(peer)
    assert (await call(Node.objects.get)(name="gpu-01")).observer == consumer.fleet.observer
    await peer.disconnect()


@pytest.mark.usefixtures("short_grants")
async def test_node_that_was_not_heard_since_a_standstill_gets_the_time_to_come_back() -> None:
    peer = await Peer(await credential()).open()
    await peer.receive(Order)
    await until_it_grants(peer)
    consumer.fleet._ticked_at -= 20.0
    consumer.fleet._notice_standstill()
    await asyncio.sleep(0.5)
    node = await call(Node.objects.get)(name="gpu-01")
    assert node.observer != consumer.fleet.observer
    later = time.time() + 30.0
    await call(Observer.objects.filter(name=consumer.fleet.observer).update)(beat_at=later)
    assert await call(contact)(now=later) is Contact.UNOBSERVED
    await peer.disconnect()
