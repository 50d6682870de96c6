"""Sessions: whatever connections do, each durable message is taken exactly once and in order, or its loss is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agents.protocol.codec import agent_frames, encode_frame
from agents.protocol.errors import CloseCode, MalformedFrame, OutOfOrder, ProtocolError, UnsupportedVersion
from agents.protocol.messages import (
    Ack,
    Heartbeat,
    Hello,
    Message,
    NodeFacts,
    Order,
    OutboxGap,
    RankStarted,
    Welcome,
)
from agents.protocol.outbox import Outbox
from agents.protocol.session import AgentSession, ServerSession
from agents.protocol.version import OLDEST_SUPPORTED_VERSION, PROTOCOL_VERSION


def hello(protocol: int = PROTOCOL_VERSION) -> Hello:
    return Hello(protocol=protocol, agent_version="0.1", node="gpu-01", boot_id="b", outbox_id="o", facts=NodeFacts())


def welcome(acknowledged: int = 0) -> Welcome:
    return Welcome(
        protocol=PROTOCOL_VERSION, server_version="0.1", at=0.0, heartbeat_interval_s=1.0, acknowledged=acknowledged
    )


def fact(number: int) -> RankStarted:
    return RankStarted(job="j", generation=1, rank=0, pid=number, at=0.0)


def connected(outbox: Outbox, *, acknowledged: int = 0) -> tuple[AgentSession, ServerSession]:
    """Two ends after hello and welcome."""
    agent, server = AgentSession(hello(), outbox), ServerSession()
    server.receive(agent.opening())
    agent.receive(server.welcome(welcome(acknowledged)))
    return agent, server


def taken(server: ServerSession, frames: list[bytes]) -> Iterator[tuple[int, Message]]:
    for frame in frames:
        found = server.receive(frame)
        if found is not None:
            yield found


def waiting(outbox: Outbox) -> list[tuple[int, Message]]:
    """What an outbox has for a server that holds nothing of it."""
    decoder = agent_frames()
    return [decoder.decode(frame) for _, frame in outbox.frames(after=0, through=10**9, max_bytes=10**9)]


# --- Opening ---


def test_nothing_durable_is_sent_before_the_welcome() -> None:
    outbox = Outbox(outbox_id="o")
    outbox.add(fact(1))
    agent = AgentSession(hello(), outbox)
    assert not agent.established
    assert agent.frames_to_send() == []


def test_the_first_message_must_be_a_hello() -> None:
    with pytest.raises(MalformedFrame, match="not a hello"):
        ServerSession().receive(encode_frame(Heartbeat(at=0.0, revision=0)))


def test_a_second_hello_is_refused() -> None:
    agent, server = connected(Outbox(outbox_id="o"))
    with pytest.raises(MalformedFrame, match="second hello"):
        server.receive(agent.opening())


@pytest.mark.parametrize("version", [OLDEST_SUPPORTED_VERSION - 1, PROTOCOL_VERSION + 1, -3, 2**40])
def test_an_unsupported_version_is_refused_and_says_what_to_install(version: int) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        ServerSession().receive(encode_frame(hello(version)))
    assert caught.value.code == CloseCode.UNSUPPORTED_VERSION
    assert f"protocol {version}" in caught.value.reason
    assert "Install an agent of the server's release" in caught.value.reason


@pytest.mark.parametrize("version", range(OLDEST_SUPPORTED_VERSION, PROTOCOL_VERSION + 1))
def test_every_supported_version_is_taken(version: int) -> None:
    server = ServerSession()
    server.receive(encode_frame(hello(version)))
    assert server.hello is not None


# --- Durable messages ---


def test_messages_arrive_in_order_and_are_kept_until_acknowledged() -> None:
    outbox = Outbox(outbox_id="o")
    for number in (1, 2, 3):
        outbox.add(fact(number))
    agent, server = connected(outbox)
    assert [(seq, m) for seq, m in taken(server, agent.frames_to_send())] == [(n, fact(n)) for n in (1, 2, 3)]
    assert len(outbox) == 3
    agent.receive(encode_frame(Ack(through=2)))
    assert len(outbox) == 1


def test_nothing_is_sent_twice_on_one_connection() -> None:
    outbox = Outbox(outbox_id="o")
    outbox.add(fact(1))
    agent, _ = connected(outbox)
    assert len(agent.frames_to_send()) == 1
    assert agent.frames_to_send() == []


def test_a_repeat_is_dropped_and_a_hole_is_refused() -> None:
    outbox = Outbox(outbox_id="o")
    for number in (1, 2, 3):
        outbox.add(fact(number))
    agent, server = connected(outbox)
    first, second, third = agent.frames_to_send()
    assert server.receive(first) == (1, fact(1))
    assert server.receive(first) is None
    with pytest.raises(OutOfOrder) as caught:
        server.receive(third)
    assert caught.value.code == CloseCode.OUT_OF_ORDER
    assert "Message 3 came where 2 was due." in caught.value.reason
    assert server.receive(second) == (2, fact(2))


def test_a_durable_message_needs_a_number() -> None:
    _, server = connected(Outbox(outbox_id="o"))
    with pytest.raises(MalformedFrame, match="no sequence number"):
        server.receive(encode_frame(fact(1)))


def test_transient_messages_are_not_numbered_and_durable_ones_are_never_sent_as_such() -> None:
    agent, server = connected(Outbox(outbox_id="o"))
    beat = Heartbeat(at=1.0, revision=0)
    assert server.receive(agent.transient(beat)) == (0, beat)
    with pytest.raises(TypeError, match="durable"):
        agent.transient(fact(1))


def test_an_acknowledgement_may_come_late_twice_or_backwards() -> None:
    outbox = Outbox(outbox_id="o")
    for number in range(1, 6):
        outbox.add(fact(number))
    agent, _ = connected(outbox)
    for through in (3, 3, 1, 0):
        agent.receive(encode_frame(Ack(through=through)))
    assert [seq for seq, _ in waiting(outbox)] == [4, 5]


def test_orders_pass_through_untouched() -> None:
    agent, _ = connected(Outbox(outbox_id="o"))
    assert agent.receive(encode_frame(Order(revision=4))) == Order(revision=4)


# --- Overflow ---


def test_an_overflowing_outbox_leaves_a_numbered_gap() -> None:
    outbox = Outbox(outbox_id="o", limit=3)
    for number in range(1, 9):
        outbox.add(fact(number))
    agent, server = connected(outbox)
    found = list(taken(server, agent.frames_to_send()))
    gap = OutboxGap(first_seq=1, last_seq=5, reason="the agent's outbox was full")
    assert found == [(5, gap), (6, fact(6)), (7, fact(7)), (8, fact(8))]


def test_a_gap_that_the_server_partly_holds_names_only_what_is_missing() -> None:
    outbox = Outbox(outbox_id="o", limit=2)
    for number in range(1, 8):
        outbox.add(fact(number))
    agent, server = connected(outbox, acknowledged=3)
    (seq, gap), *_ = taken(server, agent.frames_to_send())
    assert isinstance(gap, OutboxGap)
    assert (seq, gap.first_seq, gap.last_seq) == (5, 4, 5)


def test_a_gap_is_forgotten_once_it_is_acknowledged() -> None:
    outbox = Outbox(outbox_id="o", limit=1)
    outbox.add(fact(1))
    outbox.add(fact(2))
    outbox.acknowledge(1)
    assert [seq for seq, _ in waiting(outbox)] == [2]
    outbox.add(fact(3))
    assert waiting(outbox)[0][1] == OutboxGap(first_seq=2, last_seq=2, reason="the agent's outbox was full")


def test_what_was_sent_before_it_was_dropped_leaves_no_gap_on_that_connection() -> None:
    outbox = Outbox(outbox_id="o", limit=2)
    agent, server = connected(outbox)
    for number in (1, 2):
        outbox.add(fact(number))
    got = list(taken(server, agent.frames_to_send()))
    for number in (3, 4):
        outbox.add(fact(number))
    got += list(taken(server, agent.frames_to_send()))
    assert got == [(number, fact(number)) for number in (1, 2, 3, 4)]


# --- Anything may happen ---


class LossyLink(RuleBasedStateMachine):
    """An agent and a server whose connections break anywhere; the server commits in batches and acknowledges late."""

    limit = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(outbox_id="o", limit=self.limit)
        self.made = 0
        self.committed: list[tuple[int, Message]] = []
        self.through = 0
        self.agent: AgentSession | None = None
        self.server = ServerSession()
        self.wire: list[bytes] = []
        self.sent: list[bytes] = []
        self.uncommitted: list[tuple[int, Message]] = []

    @rule(count=st.integers(1, 4))
    def make(self, count: int) -> None:
        for _ in range(count):
            self.made += 1
            assert self.outbox.add(fact(self.made)) == self.made

    @rule()
    def connect(self) -> None:
        """A new connection, whether or not the old one is known to be gone; what was not committed is forgotten."""
        self.uncommitted, self.wire, self.sent = [], [], []
        self.agent, self.server = connected(self.outbox, acknowledged=self.through)

    @precondition(lambda self: self.agent is not None)
    @rule()
    def send(self) -> None:
        assert self.agent is not None
        frames = self.agent.frames_to_send()
        self.wire += frames
        self.sent += frames

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for frame in self.wire[:count]:
            found = self.server.receive(frame)
            if found is not None:
                self.uncommitted.append(found)
        self.wire = self.wire[count:]

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A frame comes again; if it is early, it is refused and the connection goes on."""
        try:
            found = self.server.receive(data.draw(st.sampled_from(self.sent)))
        except OutOfOrder:
            return
        if found is not None:
            self.uncommitted.append(found)

    @rule(tell=st.booleans())
    def commit(self, tell: bool) -> None:
        self.committed += self.uncommitted
        self.uncommitted = []
        self.through = self.committed[-1][0] if self.committed else 0
        if tell and self.agent is not None:
            self.agent.receive(encode_frame(Ack(through=self.through)))

    @precondition(lambda self: self.agent is not None)
    @rule()
    def lose_connection(self) -> None:
        self.agent, self.wire, self.sent, self.uncommitted = None, [], [], []

    @invariant()
    def each_message_is_there_once_in_order_or_in_a_told_gap(self) -> None:
        due = 1
        for seq, message in [*self.committed, *self.uncommitted]:
            if isinstance(message, OutboxGap):
                assert message.first_seq <= due <= message.last_seq == seq
            else:
                assert (seq, message) == (due, fact(due))
            due = seq + 1

    def teardown(self) -> None:
        """After any story one sound connection is enough to bring everything over."""
        self.connect()
        self.send()
        self.deliver(len(self.wire))
        self.commit(True)
        self.each_message_is_there_once_in_order_or_in_a_told_gap()
        assert self.through == self.made
        assert len(self.outbox) == 0


class RoomyLink(LossyLink):
    @invariant()
    def nothing_is_ever_dropped(self) -> None:
        assert not any(isinstance(message, OutboxGap) for _, message in self.committed)


class NarrowLink(LossyLink):
    limit = 3


TestRoomyLink = RoomyLink.TestCase
TestRoomyLink.settings = settings(max_examples=40, stateful_step_count=30)
TestNarrowLink = NarrowLink.TestCase
TestNarrowLink.settings = settings(max_examples=40, stateful_step_count=30)


@given(frames=st.lists(st.binary(max_size=60), max_size=6), opened=st.booleans())
def test_sessions_raise_nothing_but_protocol_errors(frames: list[bytes], opened: bool) -> None:
    agent, server = (
        connected(Outbox(outbox_id="o")) if opened else (AgentSession(hello(), Outbox(outbox_id="o")), ServerSession())
    )
    for frame in frames:
        for end in (agent, server):
            try:
                end.receive(frame)
            except ProtocolError as error:
                assert error.reason
