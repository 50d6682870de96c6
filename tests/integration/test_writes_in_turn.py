"""What many agents' sockets write at once: stored together on SQLite, undone apart, acknowledged after the commit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from agents.protocol.messages import Ack, Order, OutboxGap, RankStarted
from dashboard import database_writer
from dashboard.database_writer import DatabaseWriter
from recovery import ingest
from recovery.models import Node, RankRow
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_agent_socket import Peer, call, credential

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.sqlite]

NAMES = [f"gpu-{number:02}" for number in range(1, 13)]
GAP = OutboxGap(first_seq=1, last_seq=1, reason="a full disk")


class Lock:
    """SQLite's lock in a test's hands: a thread holds it, as another process would."""

    def __init__(self) -> None:
        self._held, self._release = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    async def __aenter__(self) -> None:
        self._thread.start()
        assert await call(self._held.wait)(10)

    async def __aexit__(self, *_: object) -> None:
        self._release.set()
        await call(self._thread.join)()

    def _hold(self) -> None:
        with transaction.atomic():
            self._held.set()
            self._release.wait(15)
        connection.close()


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that committed a transaction, without those that say whom the process heard."""
    made: list[str] = []
    commit = BaseDatabaseWrapper._commit

    def counted(self: BaseDatabaseWrapper) -> Any:
        name = threading.current_thread().name
        if not name.startswith("beat"):
            made.append(name)
        return commit(self)

    monkeypatch.setattr(BaseDatabaseWrapper, "_commit", counted)
    return made


@pytest.fixture
def writer() -> DatabaseWriter:
    return DatabaseWriter(name="writer-under-test")


async def together(*writes: Awaitable[Any]) -> list[Any]:
    """Let them all wait for the database; what each returned or raised."""
    async with Lock():
        tasks = [asyncio.ensure_future(write) for write in writes]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in tasks)
    return await asyncio.gather(*tasks, return_exceptions=True)


def name_it(node_id: int, version: str) -> int:
    Node.objects.filter(pk=node_id).update(agent_version=version)
    return node_id


async def nodes(*names: str) -> list[Node]:
    fleet = await call(ToldFleet.of)("job", *names)
    return [fleet.nodes[name].row for name in names]


async def versions() -> set[str]:
    return set(await call(lambda: list(Node.objects.values_list("agent_version", flat=True)))())


async def test_facts_of_many_nodes_that_wait_for_the_database_are_one_commit(commits: list[str]) -> None:
    peers = [await Peer(await credential(name), node=name).open() for name in NAMES]
    for peer in peers:
        await peer.receive(Order)
    async with Lock():
        commits.clear()
        for peer in peers:
            peer.outbox.add(RankStarted(job="job", generation=1, rank=0, pid=7, at=time.time()))
            await peer.send(peer.session.frames_to_send()[0])
        await asyncio.sleep(0.3)
    for peer in peers:
        assert (await peer.receive(Ack)).through == 1
    assert len(commits) <= 3, commits  # one more that had begun before, and the test's own
    for peer in peers:
        await peer.disconnect()


async def test_agent_that_hung_up_before_its_welcome_leaves_nothing_to_be_written() -> None:
    peer = await Peer(await credential()).connect()
    async with Lock():
        await peer.send(peer.session.opening())
        await asyncio.sleep(0.3)
        hung_up = asyncio.ensure_future(peer.disconnect())
        await asyncio.sleep(0.2)
    await hung_up
    assert (await call(Node.objects.get)()).connected_since is None


async def test_each_learns_what_its_own_write_returned(writer: DatabaseWriter) -> None:
    rows = await nodes(*NAMES)
    returned = await together(*(writer.run(name_it, row.pk, "new") for row in rows))
    assert returned == [row.pk for row in rows]
    assert await versions() == {"new"}


async def test_one_that_fails_undoes_its_own_part_only(writer: DatabaseWriter, commits: list[str]) -> None:
    first, second, third = await nodes("gpu-01", "gpu-02", "gpu-03")

    def fail() -> None:
        name_it(second.pk, "undone")
        raise ValueError("no value for a database")

    commits.clear()
    results = await together(writer.run(name_it, first.pk, "new"), writer.run(fail), writer.run(name_it, third.pk, "n"))
    assert isinstance(results[1], ValueError)
    assert await versions() == {"new", "n", second.agent_version or "0.2.0"}
    assert len([name for name in commits if name.startswith("writer-under-test")]) == 1


async def test_superseded_session_keeps_no_other_node_from_being_acknowledged(writer: DatabaseWriter) -> None:
    fleet = await call(ToldFleet.of)("job", "gpu-01", "gpu-02")
    told = [(fleet.nodes["gpu-01"].row.pk, "older"), (fleet.nodes["gpu-02"].row.pk, fleet.nodes["gpu-02"].session)]
    stored = (writer.run(ingest.store_facts, pk, [(1, GAP)], session=session, offset_s=0.0) for pk, session in told)
    assert await together(*stored) == [None, 1]
    gaps = await call(lambda: list(Node.objects.order_by("name").values_list("gaps", "acknowledged_seq")))()
    assert gaps == [(0, 0), (1, 1)]


async def test_one_that_spoils_the_commit_is_told_so_and_the_others_are_stored(writer: DatabaseWriter) -> None:
    first, third = await nodes("gpu-01", "gpu-03")

    def refer_to_nothing() -> None:
        RankRow.objects.create(generation_id=999, rank=0, node_id=999)  # looked at when it is committed

    before, between, after = await together(
        writer.run(name_it, first.pk, "new"), writer.run(refer_to_nothing), writer.run(name_it, third.pk, "new")
    )
    assert (before, after) == (first.pk, third.pk)
    assert isinstance(between, IntegrityError)
    assert await versions() == {"new"}
    assert not await call(RankRow.objects.exists)()


async def test_one_that_loses_the_whole_transaction_is_told_so_and_the_others_are_stored(
    writer: DatabaseWriter,
) -> None:
    first, third = await nodes("gpu-01", "gpu-03")

    def as_on_a_full_disk() -> None:
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK")
        raise OperationalError("database or disk is full")

    results = await together(
        writer.run(name_it, first.pk, "new"), writer.run(as_on_a_full_disk), writer.run(name_it, third.pk, "new")
    )
    assert (results[0], results[2]) == (first.pk, third.pk)
    assert isinstance(results[1], OperationalError)
    assert await versions() == {"new"}


async def test_one_that_loses_it_without_a_word_is_told_so_and_the_others_are_stored(writer: DatabaseWriter) -> None:
    first, third = await nodes("gpu-01", "gpu-03")
    results = await together(
        writer.run(name_it, first.pk, "new"),
        writer.run(lambda: connection.close()),
        writer.run(name_it, third.pk, "new"),
    )
    assert (results[0], results[2]) == (first.pk, third.pk)
    assert isinstance(results[1], OperationalError)
    assert await versions() == {"new"}


async def test_one_among_many_that_spoils_the_commit_is_found_by_halves(
    writer: DatabaseWriter, commits: list[str]
) -> None:
    known = await nodes(*NAMES)

    def refer_to_nothing() -> None:
        RankRow.objects.create(generation_id=999, rank=0, node_id=999)

    writes = [writer.run(name_it, node.pk, "new") for node in known]
    commits.clear()
    *results, spoilt = await together(*writes, writer.run(refer_to_nothing))
    assert results == [node.pk for node in known]
    assert isinstance(spoilt, IntegrityError)
    assert await versions() == {"new"}
    assert len([name for name in commits if name.startswith("writer-under-test")]) < len(known)


async def test_all_are_told_at_once_that_the_database_is_away(writer: DatabaseWriter) -> None:
    rows = await nodes("gpu-01", "gpu-02", "gpu-03")

    def be_impatient() -> None:
        connection.ensure_connection()
        connection.connection.execute("PRAGMA busy_timeout=500")

    await writer.run(be_impatient)
    async with Lock():
        began = time.monotonic()
        writes = [writer.run(name_it, row.pk, "new") for row in rows]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert time.monotonic() - began < 1.5
    assert [type(result) for result in results] == [OperationalError] * 3
    assert "new" not in await versions()
    assert await writer.run(name_it, rows[0].pk, "new") == rows[0].pk


async def test_one_that_nobody_waits_for_any_more_is_not_begun(writer: DatabaseWriter) -> None:
    first, second = await nodes("gpu-01", "gpu-02")
    async with Lock():
        writes = [asyncio.ensure_future(writer.run(name_it, row.pk, f"v{row.pk}")) for row in (first, second)]
        await asyncio.sleep(0.2)
        writes[0].cancel()
    assert await writes[1] == second.pk
    assert f"v{first.pk}" not in await versions()


async def test_group_that_has_been_at_work_for_long_leaves_the_rest_to_the_next(
    writer: DatabaseWriter, commits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_writer, "HOLD_S", 0.0)
    rows = await nodes("gpu-01", "gpu-02", "gpu-03")
    assert await together(*(writer.run(name_it, row.pk, "new") for row in rows)) == [row.pk for row in rows]
    assert len([name for name in commits if name.startswith("writer-under-test")]) == 3


async def test_urgent_one_overtakes_those_that_can_wait(writer: DatabaseWriter) -> None:
    rows = await nodes("gpu-01", "gpu-02", "gpu-03")
    order: list[int] = []
    writes = [writer.run(order.append, row.pk) for row in rows[:2]]
    await together(*writes, writer.run_urgently(order.append, rows[2].pk))
    assert order == [rows[2].pk, rows[0].pk, rows[1].pk]


async def test_group_lets_go_first_who_asks_for_it(writer: DatabaseWriter) -> None:
    (row,) = await nodes("gpu-01")
    with writer.going_first():
        write = asyncio.ensure_future(writer.run(name_it, row.pk, "new"))
        await asyncio.sleep(0.3)
        assert not write.done()
    assert await asyncio.wait_for(write, 2) == row.pk


async def test_another_process_has_its_turn_between_who_goes_first_and_the_next_group(writer: DatabaseWriter) -> None:
    (row,) = await nodes("gpu-01")
    with writer.going_first():
        write = asyncio.ensure_future(writer.run(name_it, row.pk, "new"))
        await asyncio.sleep(2 * database_writer.REST_S)
        ended = time.monotonic()
    await write
    assert time.monotonic() - ended >= database_writer.REST_S
