"""Connections of agents as rows: who is connected, since when, and what was heard. Called by the agents' consumer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db import connection, transaction

from agents.protocol.messages import GpuSample, Hello
from recovery.models import Node, Observer
from recovery.proofs import node_returned
from recovery.store import to_json
from recovery.strays import fall_behind
from recovery.wakeup import announce_change

MAX_GENERATION = 1_000_000
"""No job ever gets so far: an agent that says more is wrong, and must not lift the numbers out of reach."""


def begin_session(node_id: int, hello: Hello, *, session: str, observer: str) -> int:
    """Make this the node's one session and return how far its outbox is stored already.

    A fresh outbox starts at 0. The agent's record of generations lifts ours, so that a restored backup never hands out
    a number that an agent must refuse.
    """
    now = time.time()
    with transaction.atomic():
        # The row is taken before it is read: what the old session is storing right now counts, or it is undone.
        Node.objects.filter(pk=node_id).update(session=session)
        node = Node.objects.get(pk=node_id)
        if node.outbox_id != hello.outbox_id:
            node.outbox_id, node.acknowledged_seq = hello.outbox_id, 0
        node.connected_since, node.last_heard_at = now, now
        node.observer, node.protocol = observer, hello.protocol
        node_returned(node, boot_id=hello.boot_id)
        node.boot_id, node.agent_version = hello.boot_id, hello.agent_version[:60]
        node.facts, node.address = to_json(hello.facts), hello.facts.address
        node.save(
            update_fields=[
                "outbox_id", "acknowledged_seq", "connected_since", "last_heard_at", "boot_id", "agent_version",
                "facts", "address", "observer", "protocol",
            ]
        )  # fmt: skip
        for known in hello.highest:
            if known.generation <= MAX_GENERATION:
                fall_behind(known.job, known.generation)
        announce_change("fleet")
    return node.acknowledged_seq


_FORGET_OBSERVER_AFTER_S = 600.0


def end_session(node_id: int, *, session: str) -> None:
    """Forget a session that closed, unless a newer one has taken its place."""
    with transaction.atomic():
        # The row is taken first: a session that began and was called off meanwhile may be about to be stored.
        Node.objects.select_for_update().filter(pk=node_id).values_list("pk").first()
        if Node.objects.filter(pk=node_id, session=session).update(session=""):
            announce_change("fleet")


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What a web process has heard of one node over its open connection. Times are Unix seconds, server's clock."""

    node_id: int
    session: str
    at: float
    """When it was heard last."""
    offset_s: float | None
    """Server's clock minus the agent's; None if not known yet: what was known before stays."""
    seen_revision: int


def record_heard(heard: Sequence[Heard], *, observer: str, since: float, at: float, lag_s: float) -> frozenset[int]:
    """Write whom a web process has heard, together with its own beat. Returns the nodes whose session it still holds.

    `at` is the moment at which `heard` was taken: waiting for the database must not look like silence, and what is
    heard meanwhile may renew a lease. A node that has moved to another connection is left alone.
    """
    with transaction.atomic():
        Observer.objects.update_or_create(name=observer, defaults={"since": since, "beat_at": at, "lag_s": lag_s})
        ids = [one.node_id for one in heard]
        sessions = dict(Node.objects.filter(pk__in=ids).values_list("pk", "session"))
        held = [one for one in heard if sessions.get(one.node_id) == one.session]
        _write(held, observer)
    return frozenset(one.node_id for one in held)


_AT_ONCE = 1000
"""Nodes in one statement; SQLite takes some 32,000 parameters."""


_UPDATE_HEARD = """
UPDATE recovery_node SET last_heard_at = heard.column3, seen_revision = heard.column4, observer = %s,
    clock_offset_s = COALESCE(CAST(heard.column5 AS double precision), clock_offset_s)
FROM (VALUES {rows}) AS heard
WHERE recovery_node.id = heard.column1 AND recovery_node.session = heard.column2
"""


def _write(held: Sequence[Heard], observer: str) -> None:
    """One statement for many nodes: a fleet of a thousand costs some milliseconds, and locks its rows no longer."""
    for first in range(0, len(held), _AT_ONCE):
        some = held[first : first + _AT_ONCE]
        with connection.cursor() as cursor:
            cursor.execute(
                _UPDATE_HEARD.format(rows=", ".join(["(%s, %s, %s, %s, %s)"] * len(some))),
                [
                    observer,
                    *(
                        value
                        for one in some
                        for value in (one.node_id, one.session, one.at, one.seen_revision, one.offset_s)
                    ),
                ],
            )


def forget_observers(*, now: float) -> None:
    """Drop web processes that are gone and that no node was heard by last: leases are judged by the others."""
    gone = Observer.objects.filter(beat_at__lt=now - _FORGET_OBSERVER_AFTER_S)
    gone.exclude(name__in=Node.objects.values("observer")).delete()


def record_gpus(node_id: int, samples: Iterable[GpuSample]) -> None:
    """Keep the latest sample of each GPU."""
    Node.objects.filter(pk=node_id).update(gpus=to_json(list(samples)), gpus_at=time.time())
    announce_change("fleet")


@dataclass(frozen=True)
class WantedState:
    """What the database says of a connected node."""

    revision: int
    session: str
    """The session that counts; any other connection of this node is superseded."""
    revoked: bool


def wanted_states(node_ids: Iterable[int]) -> dict[int, WantedState]:
    """Read once a second by each web process for the nodes that it holds sockets of."""
    rows = Node.objects.filter(pk__in=list(node_ids)).values_list("pk", "revision", "session", "revoked")
    return {
        pk: WantedState(revision=revision, session=session, revoked=revoked) for pk, revision, session, revoked in rows
    }
