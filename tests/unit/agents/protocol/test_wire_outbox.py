"""What waits for the server: bounded in number and size, thinned before it is dropped, each loss numbered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.protocol.codec import agent_frames, encode_frame
from agents.protocol.messages import (
    Ack,
    Hello,
    Message,
    NodeFacts,
    OutboxGap,
    RankStarted,
    StepReport,
    StepReports,
    Welcome,
)
from agents.protocol.outbox import Outbox
from agents.protocol.session import AgentSession, ServerSession


def fact(number: int) -> RankStarted:
    return RankStarted(job="j", generation=1, rank=0, pid=number, at=0.0)


def steps(number: int) -> StepReports:
    return StepReports(job="j", generation=1, steps=[StepReport(rank=0, step=number, at=0.0)])


def waiting(outbox: Outbox) -> list[tuple[int, Message]]:
    decoder = agent_frames()
    return [decoder.decode(frame) for _, frame in outbox.frames(after=0, through=10**9, max_bytes=10**9)]


def check_numbers(found: list[tuple[int, Message]], *, first: int, last: int) -> None:
    """Each number stands for one message or lies in one gap."""
    due = first
    for seq, message in found:
        starts = message.first_seq if isinstance(message, OutboxGap) else seq
        assert starts == due
        due = seq + 1
    assert due == last + 1


def connected(outbox: Outbox, *, acknowledged: int = 0) -> AgentSession:
    hello = Hello(protocol=2, agent_version="0", node="n", boot_id="b", outbox_id="o", facts=NodeFacts())
    session = AgentSession(hello, outbox)
    welcome = Welcome(protocol=2, server_version="0", at=0.0, heartbeat_interval_s=1.0, acknowledged=acknowledged)
    session.receive(encode_frame(welcome))
    return session


# --- Bounds ---


def test_step_reports_are_thinned_before_anything_else_goes() -> None:
    outbox = Outbox(outbox_id="o", limit=100)
    outbox.add(fact(1))
    for number in range(2, 102):
        outbox.add(steps(number))
    found = waiting(outbox)
    check_numbers(found, first=1, last=101)
    assert found[0] == (1, fact(1))
    gaps = [message for _, message in found if isinstance(message, OutboxGap)]
    assert gaps
    assert {gap.reason for gap in gaps} == {Outbox.THINNED}
    kept = [message.steps[0].step for _, message in found if isinstance(message, StepReports)]
    assert kept[-20:] == list(range(82, 102)), "the newest stay as they are"
    assert 0 < len([step for step in kept if step < 60]) < 20, "of the oldest, some stay"
    assert len(outbox) <= 90


def test_oldest_of_all_go_when_thinning_is_not_enough() -> None:
    outbox = Outbox(outbox_id="o", limit=20)
    for number in range(1, 31):
        outbox.add(fact(number))
    found = waiting(outbox)
    check_numbers(found, first=1, last=30)
    gap = found[0][1]
    assert isinstance(gap, OutboxGap)
    assert gap.reason == Outbox.FULL
    assert [message for _, message in found[1:]] == [fact(number) for number in range(gap.last_seq + 1, 31)]


def test_size_counts_as_well_as_number() -> None:
    outbox = Outbox(outbox_id="o", limit_bytes=10_000)
    for number in range(1, 1000):
        outbox.add(steps(number))
    assert outbox.size_bytes <= 10_000
    check_numbers(waiting(outbox), first=1, last=999)


@settings(max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(["fact", "steps", "steps", "steps", "gap", "ack"]), min_size=1, max_size=150),
    limit=st.integers(1, 40),
)
def test_no_number_is_ever_lost_or_used_twice(kinds: list[str], limit: int) -> None:
    outbox = Outbox(outbox_id="o", limit=limit)
    acknowledged = 0
    for number, kind in enumerate(kinds, start=1):
        if kind == "ack":
            acknowledged = max(acknowledged, (outbox.next_seq - 1) // 2)
            outbox.acknowledge(acknowledged)
        elif kind == "gap":
            outbox.tell_gap("told")
        else:
            outbox.add(fact(number) if kind == "fact" else steps(number))
        assert len(outbox) <= limit
        decoder = agent_frames()
        frames = outbox.frames(after=acknowledged, through=10**9, max_bytes=10**9)
        check_numbers([decoder.decode(frame) for _, frame in frames], first=acknowledged + 1, last=outbox.next_seq - 1)


# --- Batches ---


def test_long_backlog_is_encoded_piece_by_piece() -> None:
    outbox = Outbox(outbox_id="o")
    for _ in range(500):
        outbox.add(RankStarted(job="j" * 200, generation=1, rank=0, pid=1, at=0.0))
    frames = outbox.frames(after=0, through=10**9, max_bytes=10_000)
    assert 1 < len(frames) < 60
    assert outbox.frames(after=0, through=10**9, max_bytes=1) == frames[:1]


def test_no_more_is_on_its_way_than_the_server_takes_at_a_time() -> None:
    outbox = Outbox(outbox_id="o")
    for number in range(1, 2501):
        outbox.add(fact(number))
    session = connected(outbox)
    sent = 0
    while batch := session.frames_to_send():
        sent += len(batch)
    assert sent == 1000
    session.receive(encode_frame(Ack(through=400)))
    assert len(session.frames_to_send()) == 400


def test_long_gap_does_not_close_the_window() -> None:
    outbox = Outbox(outbox_id="o", limit=10)
    for number in range(1, 5001):
        outbox.add(fact(number))
    session, server = connected(outbox), ServerSession()
    server.receive(session.opening())
    server.welcome(Welcome(protocol=2, server_version="0", at=0.0, heartbeat_interval_s=1.0, acknowledged=0))
    last = 0
    while batch := session.frames_to_send():
        for frame in batch:
            found = server.receive(frame)
            assert found is not None
            last = found[0]
        session.receive(encode_frame(Ack(through=last)))
    assert last == 5000


# --- A new life ---


def restored(*messages: Message, next_seq: int) -> Outbox:
    before = Outbox(outbox_id="o", next_seq=next_seq - len(messages))
    for message in messages:
        before.add(message)
    return Outbox.restored(outbox_id="o", next_seq=next_seq, entries=before.entries, limit=1000, limit_bytes=1 << 20)


def test_goes_on_with_the_same_numbers() -> None:
    outbox = restored(fact(4), fact(5), next_seq=6)
    outbox.add(fact(6))
    outbox.begin(4)
    assert waiting(outbox) == [(5, fact(5)), (6, fact(6))]


def test_what_a_server_holds_and_the_disk_does_not_is_never_numbered_twice() -> None:
    """The disk has lost messages 6 to 9, which the server holds: what comes now must not pass for repeats of them."""
    outbox = restored(fact(4), fact(5), next_seq=6)
    outbox.add(fact(100))
    outbox.add(fact(101))
    outbox.begin(9)
    assert waiting(outbox) == [
        (10, OutboxGap(first_seq=10, last_seq=10, reason=Outbox.BEHIND)),
        (11, fact(100)),
        (12, fact(101)),
    ]
    assert outbox.add(fact(102)) == 13
    outbox.begin(11)
    assert [seq for seq, _ in waiting(outbox)] == [12, 13]


def test_numbers_that_the_server_counts_beyond_all_that_was_ever_sent_are_left_to_it() -> None:
    outbox = Outbox(outbox_id="o")
    outbox.add(fact(1))
    outbox.begin(7)
    assert outbox.add(fact(2)) == 9
    assert waiting(outbox) == [(8, OutboxGap(first_seq=8, last_seq=8, reason=Outbox.BEHIND)), (9, fact(2))]
