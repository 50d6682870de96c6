"""The server's life: web, worker, Redis and database die, stand still or come back, and agents fall silent at once.

Real processes and real sockets; only the ranks are scripted (`tests/fakes/scripted_agents.py`). Each life is one system
whose stories happen one after the other; lives go on side by side, since most of their time is waiting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from recovery.domain.silence import Contact, ObserverView, judge_silence
from tests.fakes.scripted_agents import ScriptedFleet
from tests.servers.broker import Broker, debian_redis, embedded
from tests.servers.control_plane import ControlPlane, home_folder
from tests.servers.database import PostgresqlOfSystem, Sqlite, SystemDatabase
from tests.servers.postgresql import Postgresql

pytestmark = pytest.mark.slow

PRODUCTION = settings.SERVERS == "production"
RECOVERED_WITHIN_S = 90.0
BACK_WITHIN_S = 120.0
"""Patience: an agent waits up to 30 s between two tries, the first may be too early, and a slow disk takes its time."""
TRAIN_WITHIN_S = 180.0
"""Patience, too: six jobs are launched at once, and each step of that is flushed to the disk."""
DATABASE_AWAY_S = 12.0 if PRODUCTION else 20.0
"""SQLite gives up a wait for its lock after 20 s; PostgreSQL refuses at once."""
FROZEN_S = 12.0
BROKER_FULL_S = 7.0
"""The worker writes to the broker at least every 5 s: by then it has met the refusal."""
GRANT_S = 5.0
"""After its last word to the database, the web process grants leases for 3 s; replies take a moment."""


@dataclass
class World:
    """One system and what runs on it."""

    home: Path
    plane: ControlPlane
    broker: Broker
    database: SystemDatabase
    fleet: ScriptedFleet
    jobs: list[str] = field(default_factory=list)

    def incidents(self) -> list[tuple[str, str, str]]:
        """(kind, state, job) of each, oldest first."""
        rows = self.database.rows(
            "SELECT kind, state, COALESCE(job_id, '') FROM recovery_incidentrow ORDER BY opened_at"
        )
        return [(str(kind), str(state), str(job)) for kind, state, job in rows]

    def generation(self, job: str) -> int:
        return int(self.database.rows(f"SELECT generation FROM recovery_job WHERE id = '{job}'")[0][0])

    def orders(self) -> list[tuple[Any, ...]]:
        """What is wanted of every generation."""
        return self.database.rows("SELECT job_id, number, wanted FROM recovery_generationrow ORDER BY job_id, number")

    def states(self) -> set[str]:
        return {str(state) for (state,) in self.database.rows("SELECT state FROM recovery_job")}

    def contacts(self) -> dict[str, Contact]:
        """Each node's contact, by the server's own rule."""
        observers = [
            ObserverView(name=name, since=since, beat_at=beat_at, lag_s=lag_s)
            for name, since, beat_at, lag_s in self.database.rows(
                "SELECT name, since, beat_at, lag_s FROM recovery_observer"
            )
        ]
        nodes = self.database.rows("SELECT name, last_heard_at, observer FROM recovery_node")
        return {
            name: judge_silence(last_heard_at=heard_at, observer=observer, observers=observers, now=time.time()).contact
            for name, heard_at, observer in nodes
        }

    def wait_until_all_are_seen(self) -> None:
        def seen() -> bool:
            connected = all(agent.connected for agent in self.fleet.agents.values())
            return connected and set(self.contacts().values()) == {Contact.SEEN}

        self.plane.wait_until(seen, what="all nodes to be in contact", limit_s=BACK_WITHIN_S, instead=self.contacts)

    def wait_until_recovered(self, job: str, generation: int) -> None:
        """Its newest incident has ended well, and this generation trains."""

        def recovered() -> bool:
            states = [state for _, state, of in self.incidents() if of == job]
            return bool(states) and states[-1] == "recovered" and self.generation(job) == generation

        self.plane.wait_until(recovered, what=f"{job} to recover", limit_s=RECOVERED_WITHIN_S, instead=self.incidents)
        self.wait_until_it_trains(job)

    def wait_until_it_trains(self, job: str) -> None:
        def steps() -> int:
            return max((share.step for _, _, share in self.fleet.holders(job)), default=0)

        before = steps()
        self.plane.wait_until(lambda: steps() > before + 3, what=f"{job} to make steps", limit_s=60)

    def submit(self, name: str) -> str:
        spec = {
            "name": name,
            "argv": ["/usr/bin/python3", "train.py"],
            "working_directory": "/tmp",
            "checkpoint_directory": "/tmp/checkpoints",
            "nodes": 2,
        }
        job = str(self.plane.post("jobs", spec)["id"])
        self.jobs.append(job)
        return job


@contextlib.contextmanager
def world(*, nodes: int, jobs: int) -> Iterator[World]:
    """A system with jobs that train, each on two nodes; the other nodes are spare."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(home_folder())
        broker = stack.enter_context(Broker(debian_redis() if PRODUCTION else embedded()))
        database: SystemDatabase = Sqlite(home)
        if PRODUCTION:
            database = PostgresqlOfSystem(stack.enter_context(Postgresql()))
        names = [f"gpu-{number:02}" for number in range(1, nodes + 1)]
        plane = stack.enter_context(ControlPlane(home, broker, database, nodes=names))
        fleet = stack.enter_context(ScriptedFleet(plane.agents_url, plane.credentials))
        made = World(home, plane, broker, database, fleet)
        made.wait_until_all_are_seen()
        for number in range(jobs):
            made.submit(f"job-{number}")
        plane.wait_until(
            lambda: made.states() == {"running"}, what="all jobs to train", limit_s=TRAIN_WITHIN_S, instead=made.states
        )
        yield made
        assert fleet.overlaps() == []


class Watch:
    """Looks at the fleet while something happens to it, and remembers who was ever called lost."""

    def __init__(self, of: World) -> None:
        self.lost: set[str] = set()
        self._world = of
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.25):
            self.lost |= {name for name, contact in self._world.contacts().items() if contact is Contact.LOST}


@contextlib.contextmanager
def nothing_is_concluded(of: World) -> Iterator[None]:
    """No node is called lost, no incident is opened, and what is wanted of every generation stays as it is."""
    incidents, orders = of.incidents(), of.orders()
    with Watch(of) as watch:
        yield
        of.wait_until_all_are_seen()
        time.sleep(3.0)  # a sweep or two look at it
    assert watch.lost == set()
    assert of.incidents() == incidents
    assert of.orders() == orders
    for job in of.jobs:
        of.wait_until_it_trains(job)


# --- Stories ------------------------------------------------------------------------------------------------------


def three_ranks_die_at_once(of: World) -> None:
    dying, before = of.jobs[:3], {job: of.generation(job) for job in of.jobs}
    for job in dying:
        of.fleet.kill_rank(job)
    for job in dying:
        of.wait_until_recovered(job, before[job] + 1)
    assert sorted(of.incidents()) == sorted(("job", "recovered", job) for job in dying)
    assert all(of.generation(job) == before[job] for job in of.jobs[3:])


def the_web_process_stands_still(of: World) -> None:
    with nothing_is_concluded(of), of.plane.frozen("web"):
        time.sleep(FROZEN_S)


def all_agents_fall_silent_at_once(of: World) -> None:
    incidents, orders = of.incidents(), of.orders()

    def opened() -> list[tuple[str, str, str]]:
        return [incident for incident in of.incidents() if incident not in incidents]

    for agent in of.fleet.agents.values():
        of.fleet.call(agent.cut)
    of.plane.wait_until(opened, what="the breaker to open", limit_s=30, instead=of.contacts)

    def all_are_lost() -> bool:
        return set(of.contacts().values()) == {Contact.LOST}

    of.plane.wait_until(all_are_lost, what="all nodes to be lost", limit_s=30, instead=of.contacts)
    time.sleep(6.0)  # some sweeps look at it
    assert opened() == [("control_plane", "breaker_open", "")]
    assert of.orders() == orders
    assert of.states() == {"running"}
    for agent in of.fleet.agents.values():
        of.fleet.call(agent.mend)
    of.wait_until_all_are_seen()
    restored = [("control_plane", "contact_restored", "")]
    of.plane.wait_until(lambda: opened() == restored, what="contact to be told restored", limit_s=60)
    (incident,) = of.database.rows("SELECT id FROM recovery_incidentrow WHERE kind = 'control_plane'")[0]
    of.plane.post(f"incidents/{incident}/actions", {"kind": "rearm"})
    assert opened() == [("control_plane", "rearmed", "")]
    assert of.orders() == orders
    for job in of.jobs:
        of.wait_until_it_trains(job)


def the_database_is_away(of: World) -> None:
    connections = {name: agent.connections for name, agent in of.fleet.agents.items()}
    with nothing_is_concluded(of):
        with of.database.away():
            began = time.monotonic()
            time.sleep(DATABASE_AWAY_S)
            ended = time.monotonic()
        for agent in of.fleet.agents.values():
            meanwhile = [granted for at, granted in list(agent.grants) if began + GRANT_S < at < ended]
            assert meanwhile, "the web process did not answer"
            assert not any(meanwhile), "a lease was granted that nobody could write down"
        for agent in of.fleet.agents.values():
            of.plane.wait_until(
                lambda agent=agent: any(granted for at, granted in list(agent.grants) if at > ended),  # type: ignore[misc]
                what="leases to be granted again",
                limit_s=30,
            )
    assert {name: agent.connections for name, agent in of.fleet.agents.items()} == connections
    everything_is_stored_once(of)


def everything_is_stored_once(of: World) -> None:
    """The steps that the server holds are those that the ranks made: none is missing, none is there twice."""
    of.fleet.training = False
    try:
        boxes = [agent.outbox for agent in of.fleet.agents.values()]
        of.plane.wait_until(lambda: not any(len(box) for box in boxes), what="all facts to be stored", limit_s=90)
        held = of.database.rows(
            "SELECT job_id, generation_number, COUNT(*) FROM recovery_steprow GROUP BY job_id, generation_number"
        )
        assert {(job, number): count for job, number, count in held} == of.fleet.steps()
        assert of.database.rows("SELECT SUM(gaps) FROM recovery_node")[0][0] == 0
    finally:
        of.fleet.training = True


def the_web_process_dies(of: World) -> None:
    with nothing_is_concluded(of):
        of.plane.kill("web")
        time.sleep(3.0)
        of.plane.start("web")
    everything_is_stored_once(of)


def all_die_together_in_mid_recovery(of: World) -> None:
    job = of.jobs[0]
    before = of.generation(job)
    holders = [agent for agent, _, _ in of.fleet.holders(job)]
    for agent in holders:
        agent.slow_to_stop.set()
    of.fleet.kill_rank(job)
    is_stopping = ("job", "stopping", job)
    of.plane.wait_until(lambda: is_stopping in of.incidents(), what="recovery to begin", limit_s=30)
    of.plane.kill("web", "worker")
    of.broker.stop()
    time.sleep(2.0)
    for agent in holders:
        agent.slow_to_stop.clear()
    of.broker.start()
    of.plane.start("worker", "web")
    of.wait_until_recovered(job, before + 1)


def the_broker_is_full(of: World) -> None:
    job = of.jobs[-1]
    before = of.generation(job)
    of.broker.fill()
    try:
        time.sleep(BROKER_FULL_S)
        of.fleet.kill_rank(job)
        of.wait_until_recovered(job, before + 1)
    finally:
        of.broker.empty()


def a_backup_is_restored_that_is_older_than_what_runs(of: World) -> None:
    assert isinstance(of.database, Sqlite)
    job, backup = of.jobs[0], of.home / "backup.sqlite3"
    before = of.generation(job)
    of.database.back_up(backup)
    of.fleet.kill_rank(job)
    of.wait_until_recovered(job, before + 1)
    of.plane.kill("web", "worker")
    of.database.restore(backup)
    assert of.generation(job) == before
    running = {agent.name: share for agent, _, share in of.fleet.holders(job)}
    of.plane.start("worker", "web")
    newest = (
        "SELECT number FROM recovery_generationrow g JOIN recovery_job j ON j.id = g.job_id "
        f"WHERE g.job_id = '{job}' AND g.adopted AND g.wanted = 'run' AND j.state = 'running'"
    )
    of.plane.wait_until(lambda: of.database.rows(newest), what="what runs to be taken over", limit_s=BACK_WITHIN_S)
    of.wait_until_it_trains(job)
    assert {agent.name: share for agent, _, share in of.fleet.holders(job)} == running
    assert of.generation(job) == before + 1
    of.fleet.kill_rank(job)
    of.wait_until_recovered(job, before + 2)


# --- Lives --------------------------------------------------------------------------------------------------------

Story = Callable[[World], None]


class Life:
    """A system in a thread of its own, to which stories happen in turn."""

    def __init__(self, *stories: Story, nodes: int, jobs: int) -> None:
        self.stories: Sequence[Story] = stories
        self._told: dict[Story, Future[None]] = {story: Future() for story in stories}
        self._size = {"nodes": nodes, "jobs": jobs}
        self._thread = threading.Thread(target=self._live, name=f"life-{stories[0].__name__}", daemon=True)
        self.over: Future[None] = Future()

    def begin(self) -> None:
        self._thread.start()

    def tell(self, story: Story) -> None:
        """Wait for a story; raises what went wrong in it."""
        self._told[story].result(timeout=590)

    def _live(self) -> None:
        try:
            with world(**self._size) as made:
                for story in self.stories:
                    _keep(self._told[story], lambda story=story: story(made))  # type: ignore[misc]
            self.over.set_result(None)
        except BaseException as err:
            for future in (*self._told.values(), self.over):
                if not future.done():
                    future.set_exception(err)

    def join(self) -> None:
        self._thread.join(60)


def _keep(future: Future[None], work: Callable[[], None]) -> None:
    try:
        future.set_result(work())
    except BaseException as err:
        future.set_exception(err)


FLEET_STORIES: tuple[Story, ...] = (
    three_ranks_die_at_once,
    the_web_process_stands_still,
    all_agents_fall_silent_at_once,
)
HARD_STORIES: tuple[Story, ...] = (
    the_database_is_away,
    the_web_process_dies,
    all_die_together_in_mid_recovery,
    the_broker_is_full,
    a_backup_is_restored_that_is_older_than_what_runs,
)
ON_BOTH_SERVERS = (the_database_is_away, all_die_together_in_mid_recovery, the_broker_is_full)
"""What depends on the kind of database or broker; their tests are marked so. The rest would tell the same twice."""


@pytest.fixture(scope="module")
def lives() -> Iterator[dict[Story, Life]]:
    """A large fleet, and a small one with a hard life; with production's servers only what depends on them."""
    begun = [Life(*ON_BOTH_SERVERS, nodes=6, jobs=2)]
    if not PRODUCTION:
        begun = [Life(*FLEET_STORIES, nodes=20, jobs=6), Life(*HARD_STORIES, nodes=6, jobs=2)]
    for life in begun:
        life.begin()
    yield {story: life for life in begun for story in life.stories}
    for life in begun:
        life.join()


def test_three_real_deaths_at_once_are_all_acted_on(lives: dict[Story, Life]) -> None:
    lives[three_ranks_die_at_once].tell(three_ranks_die_at_once)


def test_no_node_is_lost_when_the_web_process_stands_still(lives: dict[Story, Life]) -> None:
    lives[the_web_process_stands_still].tell(the_web_process_stands_still)


def test_silence_of_all_is_one_incident_of_the_control_plane_and_stops_no_job(lives: dict[Story, Life]) -> None:
    lives[all_agents_fall_silent_at_once].tell(all_agents_fall_silent_at_once)


@pytest.mark.servers
def test_facts_are_stored_once_and_no_lease_is_granted_when_the_database_was_away(lives: dict[Story, Life]) -> None:
    lives[the_database_is_away].tell(the_database_is_away)


def test_nobody_is_lost_when_the_web_process_dies(lives: dict[Story, Life]) -> None:
    lives[the_web_process_dies].tell(the_web_process_dies)


@pytest.mark.servers
def test_recovery_goes_on_after_web_worker_and_redis_died_in_the_midst_of_it(lives: dict[Story, Life]) -> None:
    lives[all_die_together_in_mid_recovery].tell(all_die_together_in_mid_recovery)


@pytest.mark.servers
def test_recovery_needs_no_broker_that_takes_writes(lives: dict[Story, Life]) -> None:
    lives[the_broker_is_full].tell(the_broker_is_full)


def test_what_runs_is_taken_over_by_a_restored_backup_that_does_not_know_it(lives: dict[Story, Life]) -> None:
    story = a_backup_is_restored_that_is_older_than_what_runs
    lives[story].tell(story)


@pytest.mark.servers
def test_no_two_generations_of_a_job_ever_ran_at_once(lives: dict[Story, Life]) -> None:
    for life in {id(life): life for life in lives.values()}.values():
        life.over.result(timeout=300)
