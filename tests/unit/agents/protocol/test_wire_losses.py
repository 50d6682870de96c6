"""Losses that neither side can help: told as gaps, so that the conversation goes on."""

from __future__ import annotations

import pytest

from agents.protocol.codec import encode_frame
from agents.protocol.messages import (
    Ack,
    CheckpointSaved,
    Hello,
    Message,
    NodeFacts,
    OutboxGap,
    RankExited,
    RankStarted,
    Welcome,
)
from agents.protocol.outbox import Outbox
from agents.protocol.session import AgentSession, ServerSession


def fact(number: int) -> RankStarted:
    return RankStarted(job="j", generation=1, rank=0, pid=number, at=0.0)


def connected(outbox: Outbox, *, acknowledged: int = 0) -> tuple[AgentSession, ServerSession]:
    hello = Hello(protocol=1, agent_version="0", node="n", boot_id="b", outbox_id="o", facts=NodeFacts())
    agent, server = AgentSession(hello, outbox), ServerSession()
    server.receive(agent.opening())
    welcome = Welcome(protocol=1, server_version="0", at=0.0, heartbeat_interval_s=1.0, acknowledged=acknowledged)
    agent.receive(server.welcome(welcome))
    return agent, server


def taken(agent: AgentSession, server: ServerSession) -> list[Message]:
    return [found[1] for frame in agent.frames_to_send() if (found := server.receive(frame)) is not None]


@pytest.mark.parametrize("waiting", [0, 2])
def test_server_that_was_restored_from_a_backup_is_told_what_it_lost_and_hears_the_rest(waiting: int) -> None:
    outbox = Outbox(outbox_id="o")
    agent, server = connected(outbox)
    for number in range(1, 21):
        outbox.add(fact(number))
    agent.receive(encode_frame(Ack(through=20)))
    for number in range(21, 21 + waiting):
        outbox.add(fact(number))
    agent, server = connected(outbox, acknowledged=10)
    gap, *rest = taken(agent, server)
    assert isinstance(gap, OutboxGap)
    assert (gap.first_seq, gap.last_seq) == (11, 20)
    assert rest == [fact(number) for number in range(21, 21 + waiting)]
    outbox.add(fact(99))
    assert taken(agent, server) == [fact(99)]


@pytest.mark.parametrize(
    "message",
    [
        CheckpointSaved(
            job="j", generation=1, step=1, at=0.0, directory="/c/\udcff", size_bytes=1, world_size=1
        ),
        RankExited(job="j", generation=1, rank=0, pid=1, at=0.0, exit_code=10**30),
        CheckpointSaved(
            job="j", generation=1, step=1, at=0.0, directory="x" * (2 << 20), size_bytes=1, world_size=1
        ),
    ],
    ids=["half a character", "a number too large", "a frame too large"],
)  # fmt: skip
def test_message_that_cannot_be_encoded_is_told_as_lost_in_its_place(message: Message) -> None:
    outbox = Outbox(outbox_id="o")
    agent, server = connected(outbox)
    for each in (fact(1), message, fact(3)):
        outbox.add(each)
    first, gap, last = taken(agent, server)
    assert (first, last) == (fact(1), fact(3))
    assert isinstance(gap, OutboxGap)
    assert (gap.first_seq, gap.last_seq) == (2, 2)
    assert type(message).__name__ in gap.reason
