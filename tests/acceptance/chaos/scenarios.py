"""One system under disturbance: each scenario is a drill during which something else breaks, too.

Whatever is broken: the incident ends recovered, by exactly one relaunch, with continuity proven by the ranks' own logs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_check.auditor import audit, read_stories
from demo_check.rest import RestError
from demo_check.system import HarnessError, RunningSystem, steady_job, unix_seconds
from demo_check.witness import Witness

from tests.servers.broker import Broker
from tests.servers.postgresql import Postgresql

STATES = ("detected", "stopping", "placing", "launching", "verifying")
BEFORE = tuple(f"incident.{state}.before_save" for state in STATES)
AFTER = tuple(f"incident.{state}.after_save" for state in (*STATES[1:], "recovered"))
"""Not `detected`: an incident is stored as that together with the fact that opened it, not by a worker."""
STEPS_AFTER_SAVE = 6
RECOVERED_WITHIN_S = 200.0


@dataclass(frozen=True)
class Scenario:
    """`disturb` is called once the drill is ordered, with the id of its job."""

    name: str
    failpoints: Sequence[str] = ()
    disturb: Callable[[ChaosSystem, str], None] = lambda *_: None


@dataclass(frozen=True)
class Outcome:
    """What one scenario showed. `wrong` is empty if everything held."""

    name: str
    state: str
    relaunches: int
    worker_kills: int
    seconds: float
    wrong: tuple[str, ...]


class ChaosSystem:
    """A running system whose broker and failpoints are ours."""

    def __init__(self, system: RunningSystem, broker: Broker, failpoints: Path, witness: Witness) -> None:
        self.system = system
        self.broker = broker
        self.witness = witness
        self._failpoints = failpoints

    def run(self, scenario: Scenario) -> Outcome:
        """One drill under the scenario's disturbance, to the end of its incident."""
        job = steady_job(self.system, steps_beyond=STEPS_AFTER_SAVE)
        before = job["generation"]
        started = time.monotonic()
        killer = WorkerKiller(self.system, self._failpoints, scenario.failpoints)
        with killer:
            drill = self._order_drill(job["id"])
            scenario.disturb(self, job["id"])
            drill, incident = self._follow(drill["id"])
        wrong = [f"Failpoint {name} was never reached." for name in killer.armed()]
        wrong += self._judge(drill, incident)
        relaunches = self.system.rest.get(f"jobs/{job['id']}")["generation"] - before
        if relaunches != 1:
            wrong.append(f"There were {relaunches} relaunches, not one.")
        return Outcome(
            name=scenario.name,
            state=incident["state"],
            relaunches=relaunches,
            worker_kills=killer.kills,
            seconds=round(time.monotonic() - started, 1),
            wrong=tuple(wrong),
        )

    def await_mid_recovery(self, job: str) -> None:
        """Return as soon as the job has an open incident that is past its detection."""

        def is_recovering() -> bool:
            with contextlib.suppress(OSError, RestError):
                found = self.system.rest.items(f"incidents?job={job}&ended=false")
                return bool(found) and found[0]["state"] in STATES[1:]
            return False

        self.system.wait_until(is_recovering, what="an open incident", limit_s=60, every_s=0.02)

    def _order_drill(self, job: str) -> dict[str, Any]:
        body = {
            "kind": "kill-rank",
            "job": job,
            "steps_after_save": STEPS_AFTER_SAVE,
            "recovered_within_s": RECOVERED_WITHIN_S,
        }
        drill: dict[str, Any] = self.system.rest.post("drills", body, key=str(uuid.uuid4()))
        return drill

    def _follow(self, drill_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        def over() -> tuple[dict[str, Any], dict[str, Any]] | None:
            with contextlib.suppress(OSError, RestError):
                drill = self.system.rest.get(f"drills/{drill_id}")
                if drill["ended"] and not drill["incident"]:
                    raise HarnessError(f"The drill ended as {drill['state']}: {drill['detail']} {drill['result']}")
                if drill["ended"]:
                    return drill, self.system.rest.get(f"incidents/{drill['incident']}")
            return None

        return self.system.wait_until(over, what="the drill to end", limit_s=RECOVERED_WITHIN_S + 40)

    def _judge(self, drill: dict[str, Any], incident: dict[str, Any]) -> list[str]:
        found = audit(
            read_stories(self.system.agents, incident["job"]),
            old=drill["generation"],
            opened_at=unix_seconds(incident["opened_at"]),
            exits=self.witness.exits,
        )
        wrong = list(found.wrong)
        if incident["state"] != "recovered":
            wrong.append(f"The incident is {incident['state']}, not recovered: {incident.get('escalation', '')}")
        if found.continuity != "bit-equal":
            wrong.append(f"Continuity is {found.continuity}.")
        return wrong


class WorkerKiller:
    """Arms failpoints; a process that reaches one dies there, and with it we kill the whole Celery worker at once."""

    def __init__(self, system: RunningSystem, folder: Path, names: Sequence[str]) -> None:
        self.kills = 0
        self._system = system
        self._folder = folder
        self._names = names
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="worker-killer", daemon=True)

    def __enter__(self) -> WorkerKiller:
        for name in self._names:
            (self._folder / name).touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def armed(self) -> list[str]:
        """Failpoints that nobody reached."""
        return sorted(os.listdir(self._folder))

    def _watch(self) -> None:
        left = set(self.armed())
        while not self._over.is_set():
            now = set(self.armed())
            for _ in left - now:
                self._kill_worker()
            left = now
            time.sleep(0.002)

    def _kill_worker(self) -> None:
        pid = self._system.service_pid(SERVICES["worker"])
        if pid is not None:
            self.kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


SERVICES = {
    "web": "uvicorn dashboard.asgi:application",
    "worker": "celery -A dashboard.celery worker",
    "beat": "celery -A dashboard.celery beat",
}
"""What tells a service's process by its command line."""


def kill_services(*names: str, redis_too: bool = False) -> Callable[[ChaosSystem, str], None]:
    """SIGKILL for these services at once, in mid-recovery; their supervisor starts them again."""

    def disturb(chaos: ChaosSystem, job: str) -> None:
        chaos.await_mid_recovery(job)
        pids = [chaos.system.service_pid(SERVICES[name]) for name in names]
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        if redis_too:
            chaos.broker.stop()
            time.sleep(5.0)
            chaos.broker.start()

    return disturb


def fill_redis(seconds: float) -> Callable[[ChaosSystem, str], None]:
    """Redis takes no writes for so long, from mid-recovery on."""

    def disturb(chaos: ChaosSystem, job: str) -> None:
        chaos.await_mid_recovery(job)
        chaos.broker.fill()
        try:
            time.sleep(seconds)
        finally:
            chaos.broker.empty()

    return disturb


def restart_postgresql(server: Postgresql, *, away_s: float) -> Callable[[ChaosSystem, str], None]:
    """The database's server is killed in mid-recovery and comes back after a while."""

    def disturb(chaos: ChaosSystem, job: str) -> None:
        chaos.await_mid_recovery(job)
        server.stop()
        try:
            time.sleep(away_s)
        finally:
            server.start()

    return disturb


def flush_redis(chaos: ChaosSystem, job: str) -> None:
    """FLUSHALL in mid-recovery, and twice again shortly after."""
    chaos.await_mid_recovery(job)
    for _ in range(3):
        chaos.broker.flush()
        time.sleep(0.5)


def stop_redis(seconds: float) -> Callable[[ChaosSystem, str], None]:
    """No Redis for so long, from mid-recovery on."""

    def disturb(chaos: ChaosSystem, job: str) -> None:
        chaos.await_mid_recovery(job)
        chaos.broker.stop()
        try:
            time.sleep(seconds)
        finally:
            chaos.broker.start()

    return disturb


@contextlib.contextmanager
def chaos_system(
    *, broker_program: Path | None = None, database_url: str = "", script: Sequence[str] = ()
) -> Iterator[ChaosSystem]:
    """Everything running, with a job that trains; on Valkey and SQLite unless told otherwise.

    script: more arguments for the job.
    """
    with Broker(broker_program) as broker:
        failpoints = broker.folder / "failpoints"
        failpoints.mkdir()
        environment = {
            "EVERSTEP_BEATS": "1",
            "EVERSTEP_REDIS_URL": broker.url,
            "EVERSTEP_DATABASE_URL": database_url,
            "EVERSTEP_FAILPOINTS": str(failpoints),
        }
        with RunningSystem(script=script, environment=environment) as system, Witness(system.agents) as witness:
            yield ChaosSystem(system, broker, failpoints, witness)


def tell(outcome: Outcome) -> None:
    words = "as it should" if not outcome.wrong else "WRONG: " + " | ".join(outcome.wrong)
    print(
        f"{outcome.name}: {outcome.state} in {outcome.seconds} s, {outcome.worker_kills} workers killed, "
        f"{outcome.relaunches} relaunches, {words}",
        file=sys.stderr,
        flush=True,
    )
