"""Orders by the hundred, shuffled, repeated, late, replayed after restarts and after a restored backup.

Whatever a node goes through, it ends where a node ends that got every order once and in sequence: the same ranks run,
the same record is on disk, and the same is reported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.protocol.messages import Assignment, AssignmentPhase, LaunchSpec, SeenPhase
from agents.supervisor.highest import HighestStore, HighWater
from agents.supervisor.orders import Act, Key, Known, reconcile

P, S = AssignmentPhase, SeenPhase
JOBS = ("j", "k")
SLOTS = 16
ENDED = (S.STOPPED, S.PREPARE_FAILED, S.REFUSED)
Order = tuple[Assignment, ...]

LAUNCH = LaunchSpec(
    argv=["/usr/bin/python3", "train.py"],
    working_directory="/job",
    environment={},
    run_id="run",
    node_rank=0,
    node_count=1,
    ranks_per_node=1,
    first_rank=0,
    world_size=1,
    master_address="127.0.0.1",
    checkpoint_directory="/checkpoints",
)


@dataclass(frozen=True)
class FinalState:
    """What counts of a node in the end."""

    running: frozenset[Key]
    highest: dict[str, HighWater]
    reports: dict[Key, SeenPhase | None]
    """Of what the last order names."""


class Node:
    """A node around the real reconciliation and the real record on disk: work takes a while, and its agent may die."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: set[Key] = set()
        self.started: list[Key] = []
        self.ran: dict[Key, str] = {}
        """On disk: runs that were started, and their plans."""
        self._begin()

    def _begin(self) -> None:
        self.store = HighestStore(self.directory)
        self.store.load()
        self.wanted: Order = ()
        self.known: dict[Key, Known] = {}
        self.reports: dict[tuple[Key, str], SeenPhase] = {}
        """By generation and plan, as the server keeps them: what is said of a rival is not said of what it rivals."""

    def take(self, order: Order) -> None:
        self.wanted = order
        named = {(one.job, one.generation) for one in order}
        for key in [key for key, run in self.known.items() if key not in named and run.phase in ENDED]:
            del self.known[key]
        self.act()

    def act(self) -> None:
        """Once, as the daemon does when an order comes or a run has changed."""
        before = self.store.jobs
        result = reconcile(self.wanted, known=self.known, high=before, slots=SLOTS)
        for job, high in before.items():
            assert result.high[job].generation >= high.generation
            assert result.high[job].stopped >= high.stopped
        self.store.merge(result.high)
        for action in result.actions:
            key, plan = (action.assignment.job, action.assignment.generation), action.assignment.plan_id
            match action.act:
                case Act.PREPARE:
                    self._become(key, plan, S.PREPARING)
                case Act.START:
                    assert key not in self.started, f"{key} is started a second time"
                    assert not [other for other in self.processes if other[0] == key[0]], "two generations at once"
                    assert all(other[1] < key[1] for other in self.started if other[0] == key[0]), "older after newer"
                    self.ran[key] = plan
                    self.processes.add(key)
                    self.started.append(key)
                    self._become(key, plan, S.RUNNING)
                case Act.STOP:
                    self._become(key, plan, S.STOPPING)
                case Act.REFUSE:
                    self.reports[key, plan] = S.REFUSED
                case Act.FAIL:
                    raise AssertionError("there is room for everything here")

    def _become(self, key: Key, plan: str, phase: SeenPhase) -> None:
        self.known[key] = Known(plan_id=plan, phase=phase, ranks=1)
        self.reports[key, plan] = phase

    def work(self) -> bool:
        """What was begun is done: preparations are ready, what is killed is gone. Whether anything was."""
        changed = False
        for key, run in list(self.known.items()):
            if run.phase is S.PREPARING:
                self._become(key, run.plan_id, S.PREPARED)
            elif run.phase is S.STOPPING:
                self.processes.discard(key)
                self._become(key, run.plan_id, S.STOPPED)
            else:
                continue
            changed = True
        if changed:
            self.act()
        return changed

    def settle(self) -> None:
        while self.work():
            pass

    def end(self, key: Key) -> None:
        """Its ranks end by themselves; that bars it from running here once more."""
        self.processes.discard(key)
        high = self.store.jobs[key[0]]
        self.store.merge({key[0]: replace(high, stopped=max(high.stopped, key[1]))})
        self._become(key, self.ran[key], S.STOPPED)
        self.act()

    def has_proven(self, stop: Assignment) -> bool:
        return self.said(stop.job, stop.generation, stop.plan_id) is S.STOPPED

    def restart(self) -> None:
        """A new agent: what it only prepared is forgotten, what ran is found again."""
        self._begin()
        for key, plan in self.ran.items():
            self._become(key, plan, S.RUNNING if key in self.processes else S.STOPPED)

    def said(self, job: str, number: int, plan: str) -> SeenPhase | None:
        """The latest report of this plan by this agent."""
        return self.reports.get(((job, number), plan))

    def final(self, last: Order) -> FinalState:
        self.take(last)  # the newest order is pushed on every connection
        self.settle()
        return FinalState(
            running=frozenset(self.processes),
            highest=self.store.jobs,
            reports={(one.job, one.generation): self.said(one.job, one.generation, one.plan_id) for one in last},
        )


def assignment(phase: AssignmentPhase, job: str, number: int, plan: str = "") -> Assignment:
    launch = None if phase is P.STOP else LAUNCH
    return Assignment(job=job, generation=number, plan_id=plan or f"{job}{number}", phase=phase, launch=launch)


def history(counts: Sequence[int], *, first: Sequence[int] = (1, 1)) -> list[Order]:
    """All orders that a node gets while two jobs are relaunched so many times; the last ones want the newest to run.

    A stop stays in an order until it is proven.
    """
    orders: list[Order] = []
    present: dict[str, Order] = dict.fromkeys(JOBS, ())
    for turn in range(max(counts)):
        for job, count, start in zip(JOBS, counts, first, strict=True):
            if turn >= count:
                continue
            number = start + turn
            stops = tuple(assignment(P.STOP, job, old) for old in range(1, number))
            for phase in (P.PREPARE, P.RUN):
                present[job] = (*stops, assignment(phase, job, number))
                orders.append(present["j"] + present["k"])
    return orders


def in_sequence(orders: Sequence[Order]) -> FinalState:
    with tempfile.TemporaryDirectory() as directory:
        node = Node(Path(directory))
        for order in orders:
            node.take(order)
            node.settle()
        return node.final(orders[-1])


counts = st.tuples(st.integers(1, 4), st.integers(1, 3))
lives = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def live_through(node: Node, orders: Sequence[Order], data: st.DataObject) -> None:
    """Orders of any time come in any sequence, while the agent works, dies and comes back.

    A server that has heard a proof does not name that stop any more.
    """
    for whole in data.draw(st.lists(st.sampled_from(orders), max_size=12), label="received"):
        order = whole
        if data.draw(st.booleans()):
            order = tuple(one for one in whole if one.phase is not P.STOP or not node.has_proven(one))
        node.take(order)
        for event in data.draw(st.lists(st.sampled_from(["work", "work", "restart", "again"]), max_size=3)):
            match event:
                case "work":
                    node.work()
                case "restart":
                    node.restart()
                case "again":
                    node.take(order)


@lives
@given(data=st.data(), counts=counts)
def test_shuffled_repeated_delayed_and_replayed_orders_end_where_orders_in_sequence_do(
    data: st.DataObject, counts: tuple[int, int]
) -> None:
    orders = history(counts)
    with tempfile.TemporaryDirectory() as directory:
        node = Node(Path(directory))
        live_through(node, orders, data)
        assert node.final(orders[-1]) == in_sequence(orders)


@lives
@given(data=st.data(), counts=counts, back=st.integers(1, 6))
def test_orders_of_a_restored_backup_end_where_a_server_that_never_lost_its_rows_ends(
    data: st.DataObject, counts: tuple[int, int], back: int
) -> None:
    lived = history(counts)
    restored = lived[: max(1, len(lived) - back)]
    with tempfile.TemporaryDirectory() as directory:
        node = Node(Path(directory))
        for order in lived:
            node.take(order)
            node.settle()
        # The server goes on from its old rows: it wants what was, and plans numbers that are taken.
        taken = {one.job: one for one in restored[-1] if one.phase is not P.STOP}
        known = {high.job: high.generation for high in node.store.for_hello()}
        rivals = tuple(
            assignment(P.RUN, job, one.generation + 1, f"rival-{job}")
            for job, one in taken.items()
            if one.generation < known[job]
        )
        before = frozenset(node.processes)
        live_through(node, [*restored, rivals], data)
        assert node.processes <= before, "nothing of the lost past, and no rival, is started"
        # It learns what agents know, and goes on above it.
        above = {high.job: high.generation + 1 for high in node.store.for_hello()}
        later = history((2, 1), first=[above[job] for job in JOBS])
        live_through(node, later, data)
        final = node.final(later[-1])
    expected = in_sequence([*lived, *later])
    assert (final.running, final.highest) == (expected.running, expected.highest)
    assert final.reports == expected.reports


def test_refusal_of_a_rival_leaves_the_proof_of_the_plan_that_had_its_number_first(tmp_path: Path) -> None:
    """The server keeps reports by plan (`recovery/ingest.py`): what is refused of one says nothing of another."""
    node = Node(tmp_path)
    lived = history((1, 3))
    for order in lived:
        node.take(order)
        node.settle()
    node.restart()
    rival = assignment(P.RUN, "k", 2, "rival-k")
    node.take((*lived[-1], rival))
    assert node.said("k", 2, "rival-k") is S.REFUSED
    assert node.said("k", 2, "k2") is S.STOPPED
    assert node.final(lived[-1]) == in_sequence(lived)


@lives
@given(data=st.data(), counts=counts)
def test_what_ended_by_itself_does_not_run_again_however_late_its_orders_come(
    data: st.DataObject, counts: tuple[int, int]
) -> None:
    orders = history(counts)
    with tempfile.TemporaryDirectory() as directory:
        node = Node(Path(directory))
        for order in orders:
            node.take(order)
            node.settle()
        for key in list(node.processes):
            node.end(key)
        live_through(node, orders, data)
        node.settle()
        assert not node.processes


@given(numbers=st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["a", "b"])), min_size=1, max_size=8))
def test_the_first_plan_of_the_newest_generation_stays_the_one_on_record(numbers: list[tuple[int, str]]) -> None:
    high: dict[str, HighWater] = {}
    expected: dict[int, str] = {}
    for number, plan in numbers:
        high = reconcile([assignment(P.PREPARE, "j", number, plan)], known={}, high=high, slots=1).high
        if number > max(expected, default=0):
            expected[number] = plan
    newest = max(expected)
    assert high["j"] == HighWater(generation=newest, plan_id=expected[newest])
