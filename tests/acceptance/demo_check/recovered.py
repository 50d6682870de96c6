"""Drills that promise recovery: ordered, followed to the end of the fault, and recomputed from the ranks' own logs."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_check.auditor import Audit, FaultMark, Fence, audit, disagreements, read_stories
from demo_check.rest import RestError
from demo_check.system import HarnessError, RunningSystem, order_drill, steady_job, unix_seconds
from demo_check.witness import Witness, marked_processes

LEAST_SAVED_STEP = 50
STEPS_AFTER_SAVE = 8
RECOVERED_WITHIN_S = 150.0
"""A silent node costs 45 s before anything may be relaunched; the rest is what a busy machine takes to start torch."""
DRILL_LIMIT_S = 240.0
FORGOTTEN_AFTER_S = 30.0
"""A longer step than usual counts for the detection of stalls for about this long."""
SLACK_S = 12.0
BACK_WITHIN_S = 45.0
"""An agent that was cut off tries again after 30 s at most."""


@dataclass(frozen=True)
class Fault:
    """One kind of drill as the harness runs it. The job is lost to a silence, or to a death that is told at once."""

    mark: FaultMark
    silent: bool = True


FAULTS = {
    "kill-rank": Fault(FaultMark.DEATH, silent=False),
    "kill-agent": Fault(FaultMark.DEATH),
    "freeze-node": Fault(FaultMark.FREEZE),
    "isolate-node": Fault(FaultMark.CUT),
}


def check_recovered(
    system: RunningSystem,
    witness: Witness,
    kind: str,
    *,
    result: dict[str, Any],
    tell: Callable[[str], None],
    new_world: int | None = None,
) -> list[str]:
    """One drill from the order to a node that is a spare again. Fills `result`; returns what is wrong.

    `new_world`: with how many ranks the job has to go on, where there is no spare.
    """
    fault = FAULTS[kind]
    # With an older checkpoint beneath it, broken continuity is rolled back once, is broken again, and pages a person.
    job = steady_job(system, least_saved_step=LEAST_SAVED_STEP)
    tell(f"Job {job['id']} is at step {job['last_step']}; ordering a drill: {kind} ...")
    body = {
        "kind": kind,
        "job": job["id"],
        "rank": 1,
        "steps_after_save": STEPS_AFTER_SAVE,
        "recovered_within_s": RECOVERED_WITHIN_S,
        "duration_s": _long_enough_s(system, job) if fault.silent else None,
    }
    key = str(uuid.uuid4())
    drill = order_drill(system, body, key=key)
    repeated = system.rest.post("drills", body, key=key)
    errors = [] if repeated["id"] == drill["id"] else ["A repeated POST with one Idempotency-Key made a second drill."]
    drill, incident = _follow(system, drill["id"], tell)
    if drill["ended"] and fault.silent:
        errors += _await_return(system, drill["node"])
    _print_story(system, incident)
    result |= {"drill_kind": kind, "state": incident["state"], "drill": drill["state"]}
    errors += _judge(system, witness, fault, drill=drill, incident=incident, result=result, new_world=new_world)
    return errors


def _long_enough_s(system: RunningSystem, job: dict[str, Any]) -> float:
    """A silence that outlasts detection and lease, so that the job is relaunched while the node is away.

    Both wait longer for a slow job: a rank stands still after eight of its longest steps.
    """
    pauses = [
        (after, after - before)
        for (generation, _), story in read_stories(system.agents, job["id"]).items()
        if generation == job["generation"]
        for before, after in itertools.pairwise(sorted(step.at for step in story.steps.values()))
    ]
    since = time.time() - FORGOTTEN_AFTER_S
    stall_s = 8 * max((pause for at, pause in pauses if at > since), default=0.0)
    lease_s = 8 * max((pause for _, pause in pauses), default=0.0) + 5.0  # it only rises, in steps of five seconds
    return round(max(10.0, stall_s) + 1.02 * max(30.0, lease_s) + 2.0 + SLACK_S)


def _follow(system: RunningSystem, drill_id: str, tell: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The drill and its incident once both ended, or once the incident asks for a person."""
    told = ""

    def over() -> tuple[dict[str, Any], dict[str, Any]] | None:
        nonlocal told
        try:
            drill = system.rest.get(f"drills/{drill_id}")
            incident = system.rest.get(f"incidents/{drill['incident']}") if drill["incident"] else None
        except (OSError, RestError):
            return None
        words = f"drill {drill['state']}, incident {incident['state'] if incident else 'not open yet'}"
        if words != told:
            tell(words)
            told = words
        if drill["ended_at"] and not incident:
            raise HarnessError(
                f"The drill ended as {drill['state']} without an incident: {drill['detail']} {drill['result']}"
            )
        if incident and ((drill["ended_at"] and incident["ended"]) or incident["state"] == "escalated"):
            return drill, incident
        return None

    return system.wait_until(over, what="the drill to end", limit_s=DRILL_LIMIT_S)


def _await_return(system: RunningSystem, name: str) -> list[str]:
    """Wait until the node that was broken is a spare again: its agent has called the old generation gone."""
    seen: dict[str, Any] = {}

    def ready() -> bool:
        try:
            seen.update(system.rest.get(f"nodes/{name}"))
        except (OSError, RestError):
            return False
        return bool(seen["state"] == "ready")

    try:
        system.wait_until(ready, what="the node to be a spare again", limit_s=BACK_WITHIN_S)
    except HarnessError:
        return [f"{name} did not come back as a spare: it is {seen.get('state')}. {seen.get('reason')}"]
    return []


def _print_story(system: RunningSystem, incident: dict[str, Any]) -> None:
    print(f"Timeline of incident {incident['id']}")
    for entry in system.rest.items(f"incidents/{incident['id']}/timeline"):
        print(f"  {entry['occurred_at']}  {entry['kind']:<9} {entry['text']}")
    print("Receipt")
    print(json.dumps(incident["receipt"], indent=2))


def _judge(
    system: RunningSystem,
    witness: Witness,
    fault: Fault,
    *,
    drill: dict[str, Any],
    incident: dict[str, Any],
    result: dict[str, Any],
    new_world: int | None,
) -> list[str]:
    """Everything that is wrong, from the ranks' own logs first, then from the server's words."""
    opened_at = unix_seconds(incident["opened_at"])
    job, old, receipt = incident["job"], drill["generation"], incident["receipt"]
    errors = [
        f"a process of generation {old} outlived the stop: pid {pid} carries its mark"
        for pid in marked_processes(job, old)
    ]
    stories = read_stories(system.agents, job)
    fences = [Fence(one["node"], one["kind"], one["at"]) for one in receipt["fences"]] if receipt else []
    found = audit(
        stories,
        old=old,
        opened_at=opened_at,
        exits=witness.exits,
        thaws=witness.thaws,
        hit=drill["rank"] if fault.silent else None,
        mark=fault.mark,
        fences=fences,
        new_world=new_world,
        lateness_s=witness.lateness_s,
    )
    result |= _numbers(found)
    errors += found.wrong
    if found.killed_rank != drill["rank"]:
        errors.append(f"Rank {found.killed_rank} died first, the drill was to kill rank {drill['rank']}.")
    hit = stories[old, drill["rank"]]
    if fault.mark is FaultMark.FREEZE and hit.pid not in witness.thaws:
        errors.append(f"Rank {hit.rank} was never seen frozen.")
    if receipt:
        errors += disagreements(found, receipt, of_silence=fault.silent)
        errors += _fence_words(fences, hit=hit.node, of_silence=fault.silent)
        result |= {"fence": {fence.node: fence.kind for fence in fences}, "fence_s": round(receipt["stop_s"], 3)}
    else:
        errors.append("The incident has no receipt.")
    if incident["state"] != "recovered":
        errors.append(f"The incident is {incident['state']}, not recovered. {incident['escalation']}")
    if drill["state"] != "passed":
        errors.append(f"The drill is {drill['state']}: {'; '.join(drill['result'].get('reasons', []))}")
    if found.steps_compared < 5:
        errors.append(f"Only {found.steps_compared} steps were compared, at least 5 are needed.")
    return errors


def _fence_words(fences: list[Fence], *, hit: str, of_silence: bool) -> list[str]:
    """A node that says nothing can be fenced by its lease alone here; the others say themselves that all is gone."""
    words = []
    for fence in fences:
        by_time = fence.kind == "lease_expired"
        if by_time != (of_silence and fence.node == hit):
            words.append(f"The proof for {fence.node} is {fence.kind}, which cannot be.")
    if hit not in {fence.node for fence in fences}:
        words.append(f"The receipt names no proof for {hit}.")
    return words


def _numbers(found: Audit) -> dict[str, Any]:
    seconds = {name: getattr(found, name) for name in ("detect_s", "stop_s", "first_step_s", "caught_up_s")}
    return {
        "continuity": found.continuity,
        "steps_lost": found.steps_lost,
        "steps_compared": found.steps_compared,
        **{name: None if value is None else round(value, 3) for name, value in seconds.items()},
        "generation": found.generation,
        "largest_beat_gap_s": round(found.largest_beat_gap_s, 3),
        "uncertain_s": round(found.uncertain_s, 3),
        "overlap_margin_s": round(found.overlap_margin_s, 3),
    }
