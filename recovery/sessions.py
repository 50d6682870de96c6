"""Connections of agents as rows: who is connected, since when, and what was heard. Called by the agents' consumer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.db import transaction

from agents.protocol.messages import GpuSample, Hello
from recovery.models import Job, Node
from recovery.store import to_json
from recovery.wakeup import announce_change


def begin_session(node_id: int, hello: Hello, *, session: str) -> int:
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
        node.boot_id, node.agent_version = hello.boot_id, hello.agent_version[:60]
        node.facts, node.address = to_json(hello.facts), hello.facts.address
        node.save(
            update_fields=[
                "outbox_id", "acknowledged_seq", "connected_since", "last_heard_at", "boot_id", "agent_version",
                "facts", "address",
            ]
        )  # fmt: skip
        for known in hello.highest:
            Job.objects.filter(pk=known.job, generation__lt=known.generation).update(generation=known.generation)
        announce_change("fleet")
    return node.acknowledged_seq


def end_session(node_id: int, *, session: str) -> None:
    """Forget a session that closed, unless a newer one has taken its place."""
    if Node.objects.filter(pk=node_id, session=session).update(session=""):
        announce_change("fleet")


def record_heard(heard: Mapping[int, float], *, offsets: Mapping[int, float], revisions: Mapping[int, int]) -> None:
    """Write when nodes were last heard (server's clock), their clock offsets and the revisions that they took over.

    A node without an offset here keeps the one that was last known.
    """
    with transaction.atomic():
        for node_id, at in sorted(heard.items()):  # in one order everywhere, so that two web processes cannot deadlock
            known = {"clock_offset_s": offsets[node_id]} if node_id in offsets else {}
            Node.objects.filter(pk=node_id).update(last_heard_at=at, seen_revision=revisions.get(node_id, 0), **known)


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
