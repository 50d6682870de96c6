"""Drills that promise no harm: while they last, the harness sees to it that something really is broken; then the ranks'
own logs are compared with what the server holds, step by step.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from demo_check.auditor import read_stories
from demo_check.rest import RestError
from demo_check.step_audit import Unharmed, audit_unharmed
from demo_check.system import RunningSystem, order_drill, steady_job, unix_seconds
from demo_check.witness import Witness

DURATIONS_S = {"restart-agent": None, "partition": 20.0, "server-down": 30.0}
DRILL_LIMIT_S = 200.0
STALL_LIMIT_S = 10.0
"""A rank without a step for so long has noticed; the lease of a step lasts 15 s."""
ARRIVES_WITHIN_S = 20.0
"""Steps travel in a moment; on a busy machine a few are on their way at any time."""


def check_unharmed(
    system: RunningSystem,
    witness: Witness,
    kind: str,
    *,
    duration_s: float | None,
    result: dict[str, Any],
    tell: Callable[[str], None],
) -> list[str]:
    """One drill from the order to its end. Fills `result`; returns what is wrong."""
    job = steady_job(system, least_saved_step=0)
    generation = job["generation"]
    pids = {
        story.rank: story.pid
        for (number, _), story in read_stories(system.agents, job["id"]).items()
        if number == generation
    }
    tell(f"Job {job['id']} is at step {job['last_step']}; ordering a drill: {kind} ...")
    asked_at = time.time()
    body = {"kind": kind, "job": job["id"], "duration_s": duration_s}
    sight = Sight(system, kind, node=job["nodes"][-1])
    drill = order_drill(system, body, key=str(uuid.uuid4()))
    drill = _follow(system, drill["id"], sight, tell)
    result |= {"drill_kind": kind, "drill": drill["state"]}
    errors = [] if drill["state"] == "passed" else [f"The drill is {drill['state']}: {drill['result'].get('reasons')}"]
    errors += sight.doubts(drill)
    incidents = [
        one for one in system.rest.items(f"incidents?job={job['id']}") if unix_seconds(one["opened_at"]) > asked_at
    ]
    errors += [f"Incident {one['id']} was opened against the job; it is {one['state']}." for one in incidents]
    found = recompute(system, job["id"], generation=generation, pids=pids, since=asked_at)
    errors += found.wrong
    errors += [f"Rank {rank}, process {pid}, is gone." for rank, pid in pids.items() if pid in witness.exits]
    result |= {
        "steps_lost": found.steps_lost,
        "incidents": len(incidents),
        "events_lost": found.events_lost,
        "largest_step_gap_s": round(found.largest_step_gap_s, 3),
        "steps_checked": found.steps_checked,
        "away_s": round(sight.away_s, 1),
    }
    return errors


def recompute(system: RunningSystem, job: str, *, generation: int, pids: Mapping[int, int], since: float) -> Unharmed:
    """The ranks' logs up to now against the server's rows, once these had the time to arrive.

    `pids`: rank -> process before the fault, which came at `since`.
    """
    until = time.time()
    while True:
        # The server first: what it holds by then, the logs must have.
        rows = {rank: _rows(system, job, generation, rank) for rank in pids}
        checkpoints = _checkpoints(system, job)
        found = audit_unharmed(
            read_stories(system.agents, job),
            generation=generation,
            pids=pids,
            since=since,
            until=until,
            rows=rows,
            checkpoints=checkpoints,
            stall_limit_s=STALL_LIMIT_S,
        )
        if not found.events_lost or time.time() > until + ARRIVES_WITHIN_S:
            return found
        time.sleep(1.0)


class Sight:
    """What of a fault can be seen from outside: how long the server did not answer, or did not hear the node."""

    def __init__(self, system: RunningSystem, kind: str, *, node: str) -> None:
        self.away_s = 0.0
        self._system = system
        self._kind = kind
        self._node = node
        self._agent = self._agent_pid()
        self._since: float | None = None

    def look(self) -> None:
        try:
            connected = self._system.rest.get(f"nodes/{self._node}")["connected"]
            here = True if self._kind == "server-down" else connected
        except (OSError, RestError):
            here = self._kind != "server-down"
        now = time.monotonic()
        if here:
            self._since = None
        elif self._since is None:
            self._since = now
        else:
            self.away_s = max(self.away_s, now - self._since)

    def doubts(self, drill: dict[str, Any]) -> list[str]:
        """A drill that broke nothing proves nothing."""
        if self._kind == "restart-agent":
            same = self._agent_pid() == self._agent
            return ["The agent is the same process as before: it was not killed."] if same else []
        least_s = drill["duration_s"] - 4.0
        if self.away_s < least_s:
            return [f"{drill['kind']} lasted {drill['duration_s']:.0f} s, but was seen for {self.away_s:.1f} s only."]
        return []

    def _agent_pid(self) -> int | None:
        return self._system.service_pid(f"agents --server {self._system.rest.server} --name {self._node} ")


def _follow(system: RunningSystem, drill_id: str, sight: Sight, tell: Callable[[str], None]) -> dict[str, Any]:
    told = ""

    def over() -> dict[str, Any] | None:
        nonlocal told
        sight.look()
        try:
            drill: dict[str, Any] = system.rest.get(f"drills/{drill_id}")
        except (OSError, RestError):
            return None
        words = f"drill {drill['state']}: {drill['detail']}"
        if words != told:
            tell(words)
            told = words
        return drill if drill["ended"] else None

    return system.wait_until(over, what="the drill to end", limit_s=DRILL_LIMIT_S)


def _rows(system: RunningSystem, job: str, generation: int, rank: int) -> list[dict[str, Any]]:
    """All step rows of one rank that the server has."""
    rows: list[dict[str, Any]] = []
    while True:
        after = f"&after_step={rows[-1]['step']}" if rows else ""
        answer = system.rest.get(f"jobs/{job}/metrics?generation={generation}&rank={rank}{after}")
        rows += [point for one in answer["series"] for point in one["points"]]
        if not answer["more"]:
            return rows


def _checkpoints(system: RunningSystem, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    path = f"jobs/{job}/checkpoints?limit=200"
    while True:
        answer = system.rest.get(path)
        found += answer["items"]
        if not answer["next"]:
            return found
        path = f"jobs/{job}/checkpoints?limit=200&cursor={answer['next']}"
