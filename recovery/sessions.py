"""Connections of agents as rows: who is connected, since when, and what was heard. Called by the agents' consumer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.db import transaction

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


_FORGET_OBSERVER_AFTER_S = 7 * 86400.0


def end_session(node_id: int, *, session: str) -> None:
    """Forget a session that closed, unless a newer one has taken its place."""
    if Node.objects.filter(pk=node_id, session=session).update(session=""):
        announce_change("fleet")


def record_heard(
    heard: Mapping[int, float],
    *,
    observer: str,
    since: float,
    lag_s: float,
    offsets: Mapping[int, float],
    revisions: Mapping[int, int],
) -> None:
    """Write when nodes were last heard (server's clock), their clock offsets and the revisions that they took over.

    With them goes the beat of the web process that heard them: a silence is only as long as an observer saw it. A node
    without an offset here keeps the one that was last known.
    """
    with transaction.atomic():
        now = time.time()
        Observer.objects.update_or_create(name=observer, defaults={"since": since, "beat_at": now, "lag_s": lag_s})
        Observer.objects.filter(beat_at__lt=now - _FORGET_OBSERVER_AFTER_S).delete()
        for node_id, at in sorted(heard.items()):  # in one order everywhere, so that two web processes cannot deadlock
            known = {"clock_offset_s": offsets[node_id]} if node_id in offsets else {}
            Node.objects.filter(pk=node_id, observer=observer).update(
                last_heard_at=at, seen_revision=revisions.get(node_id, 0), **known
            )


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
