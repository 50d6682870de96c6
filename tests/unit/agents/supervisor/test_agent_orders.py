"""Reconciliation of orders: pure, so that shuffled, repeated and late orders can be tried by the thousand."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.protocol.messages import Assignment, AssignmentPhase, LaunchSpec, SeenPhase
from agents.supervisor.highest import HighWater
from agents.supervisor.orders import Act, Key, Known, reconcile

P, S = AssignmentPhase, SeenPhase


def launch(ranks: int = 1) -> LaunchSpec:
    return LaunchSpec(
        argv=["/usr/bin/python3", "train.py"],
        working_directory="/job",
        environment={},
        run_id="run",
        node_rank=0,
        node_count=1,
        ranks_per_node=ranks,
        first_rank=0,
        world_size=ranks,
        master_address="127.0.0.1",
        checkpoint_directory="/checkpoints",
    )


def assignment(phase: AssignmentPhase, generation: int = 1, *, job: str = "j", plan: str = "", ranks: int = 1):  # type: ignore[no-untyped-def]
    return Assignment(
        job=job, generation=generation, plan_id=plan or f"p{generation}", phase=phase, launch=launch(ranks)
    )


def acts(
    wanted: Sequence[Assignment], known: dict[Key, Known] | None = None, **high: HighWater
) -> list[tuple[Act, int]]:
    result = reconcile(wanted, known=known or {}, high=high, slots=1)
    return [(action.act, action.assignment.generation) for action in result.actions]


def known(phase: SeenPhase, plan: str = "p1", ranks: int = 1) -> Known:
    return Known(plan_id=plan, phase=phase, ranks=ranks)


def test_prepares_what_is_new_and_records_it_first() -> None:
    result = reconcile([assignment(P.PREPARE)], known={}, high={}, slots=1)
    assert [action.act for action in result.actions] == [Act.PREPARE]
    assert result.high == {"j": HighWater(generation=1, plan_id="p1")}


def test_starts_what_is_prepared() -> None:
    assert acts([assignment(P.RUN)], {("j", 1): known(S.PREPARED)}) == [(Act.START, 1)]


def test_prepares_first_when_it_has_forgotten_the_preparation() -> None:
    assert acts([assignment(P.RUN)]) == [(Act.PREPARE, 1)]


def test_leaves_alone_what_is_as_wanted_or_not_named() -> None:
    assert acts([assignment(P.RUN)], {("j", 1): known(S.RUNNING)}) == []
    assert acts([], {("j", 1): known(S.RUNNING)}) == []
    assert acts([assignment(P.PREPARE)], {("j", 1): known(S.RUNNING)}) == []
    assert acts([assignment(P.STOP)], {("j", 1): known(S.STOPPED)}) == []


def test_refuses_an_older_generation() -> None:
    high = HighWater(generation=3, plan_id="p3")
    assert acts([assignment(P.PREPARE, 2)], j=high) == [(Act.REFUSE, 2)]
    assert acts([assignment(P.RUN, 2)], j=high) == [(Act.REFUSE, 2)]


def test_refuses_another_plan_of_the_same_generation() -> None:
    high = HighWater(generation=1, plan_id="p1")
    assert acts([assignment(P.RUN, plan="q1")], {("j", 1): known(S.RUNNING)}, j=high) == [(Act.REFUSE, 1)]


def test_never_refuses_a_stop() -> None:
    high = HighWater(generation=3, plan_id="p3")
    assert acts([assignment(P.STOP, 1)], j=high) == [(Act.STOP, 1)]
    assert acts([assignment(P.STOP, 1)], {("j", 1): known(S.RUNNING)}, j=high) == [(Act.STOP, 1)]


def test_does_not_run_what_was_stopped() -> None:
    stopped = reconcile([assignment(P.STOP)], known={}, high={}, slots=1).high["j"]
    assert stopped.stopped == 1
    assert acts([assignment(P.RUN)], j=stopped) == [(Act.REFUSE, 1)]
    # Its own proof stands: a late order does not turn "stopped" into "refused".
    assert acts([assignment(P.RUN)], {("j", 1): known(S.STOPPED)}, j=stopped) == []


def test_holds_the_next_generation_until_the_old_one_is_gone() -> None:
    both = {("j", 1): known(S.STOPPING), ("j", 2): known(S.PREPARED, "p2")}
    assert acts([assignment(P.STOP), assignment(P.RUN, 2)], both) == []
    both["j", 1] = known(S.STOPPED)
    assert acts([assignment(P.STOP), assignment(P.RUN, 2)], both) == [(Act.START, 2)]


def test_prepares_the_next_generation_while_the_old_one_runs() -> None:
    assert acts([assignment(P.PREPARE, 2)], {("j", 1): known(S.RUNNING)}) == [(Act.PREPARE, 2)]


def test_fails_what_has_no_room_beside_another_job() -> None:
    assert acts([assignment(P.PREPARE, job="k")], {("j", 1): known(S.RUNNING)}) == [(Act.FAIL, 1)]
    assert acts([assignment(P.PREPARE, job="k")], {("j", 1): known(S.STOPPED)}) == [(Act.PREPARE, 1)]


def test_refuses_names_that_would_leave_the_state_directory() -> None:
    for name in ("../../etc", "a/b", ".hidden", "a b", "x" * 101, "\n"):
        assert acts([assignment(P.PREPARE, job=name)]) == [(Act.REFUSE, 1)]
        assert acts([assignment(P.STOP, job=name)]) == [(Act.REFUSE, 1)]


class Node:
    """A node that does at once what reconciliation says; nothing else may change it."""

    def __init__(self) -> None:
        self.known: dict[Key, Known] = {}
        self.high: dict[str, HighWater] = {}
        self.started: list[int] = []

    def take(self, wanted: Sequence[Assignment]) -> None:
        for _ in range(4):  # as the daemon does: a change of a run asks again
            result = reconcile(wanted, known=self.known, high=self.high, slots=1)
            assert all(result.high[job].generation >= high.generation for job, high in self.high.items())
            assert all(result.high[job].stopped >= high.stopped for job, high in self.high.items())
            self.high = result.high
            for action in result.actions:
                key = (action.assignment.job, action.assignment.generation)
                plan = action.assignment.plan_id
                match action.act:
                    case Act.PREPARE:
                        self.known[key] = known(S.PREPARED, plan)
                    case Act.START:
                        self.known[key] = known(S.RUNNING, plan)
                        self.started.append(key[1])
                    case Act.STOP:
                        self.known[key] = known(S.STOPPED, plan)
            assert len(self.running) <= 1, "two generations run at once"

    @property
    def running(self) -> set[int]:
        return {generation for (_, generation), run in self.known.items() if run.phase is S.RUNNING}

    def restart(self) -> None:
        """The agent forgets what it only prepared; what is on disk, and what runs, stays."""
        self.known = {key: run for key, run in self.known.items() if run.phase is S.RUNNING}


def history(generations: int) -> list[list[Assignment]]:
    """The orders of a job that was relaunched a few times; a stop stays in them, as it does until it is proven."""
    orders = []
    for number in range(1, generations + 1):
        old = [assignment(P.STOP, older) for older in range(1, number)]
        orders += [[*old, assignment(P.PREPARE, number)], [*old, assignment(P.RUN, number)]]
    return orders


@settings(max_examples=300)
@given(data=st.data(), generations=st.integers(1, 4))
def test_shuffled_repeated_and_late_orders_end_where_orders_in_sequence_do(
    data: st.DataObject, generations: int
) -> None:
    orders = history(generations)
    in_sequence, shuffled = Node(), Node()
    for order in orders:
        in_sequence.take(order)
    received = data.draw(st.lists(st.sampled_from(orders), max_size=12))
    for order in received:
        shuffled.take(order)
        if data.draw(st.booleans()):
            shuffled.restart()
    shuffled.take(orders[-1])  # the newest is pushed on every connection
    assert shuffled.running == in_sequence.running == {generations}
    assert shuffled.started == sorted(set(shuffled.started)), "a generation ran twice, or after a newer one"
