"""`make single-node`: a job on one node, of which nobody else can tell whether it trains. The last line is JSON.

First the node is cut from the server while it trains on: it waits for a fence, a human is paged, nothing is relaunched,
and once the node is heard again all of it was a false alarm. Then the node dies with all that runs on it: it is
relaunched elsewhere only once an operator attests that it is off.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from demo_check.auditor import Fence, audit, disagreements, read_stories
from demo_check.rest import RestError
from demo_check.run import tell
from demo_check.system import HarnessError, RunningSystem, order_drill, steady_job, unix_seconds
from demo_check.unharmed import recompute
from demo_check.witness import Witness, marked_processes

PROJECT = Path(__file__).resolve().parents[2]
CUT_S = 50.0
"""Longer than the 30 s after which a human is asked."""
GONE_S = 300.0
SAVE_EVERY = 80
"""Four seconds: a keeper that was called some steps after a save strikes before the next, though it starts slowly."""
STEPS_AFTER_SAVE = 8
UNTOUCHED_S = 5.0
"""For so long it is watched that an incident which waits for a fence relaunches nothing."""


def main() -> int:
    result: dict[str, Any] = {}
    errors: list[str] = []
    tell("Starting the system on free ports ...")
    system = RunningSystem(
        options=["--no-job"], environment={"EVERSTEP_BEATS": "1"}, keep=os.environ.get("KEEP") == "1"
    )
    try:
        with system, Witness(system.agents) as witness:
            _submit(system)
            errors += _cut(system, witness, result)
            errors += _gone(system, witness, result)
            tell("Stopping everything ...")
    except (HarnessError, RestError, OSError, ValueError) as error:
        errors.append(str(error))
    errors += [f"A process was left behind: {pid} {command}" for pid, command in system.leftovers().items()]
    system.kill_leftovers()
    for words in errors:
        tell(f"WRONG: {words}")
    print(json.dumps(result | ({"error": " | ".join(errors)} if errors else {})), flush=True)
    return 1 if errors else 0


def _submit(system: RunningSystem) -> None:
    script = PROJECT / "examples" / "train_tiny_gpt.py"
    spec = {
        "name": "alone",
        "argv": [sys.executable, str(script), "--steps", "100000", "--save-every", str(SAVE_EVERY), "--leave-child"],
        "working_directory": str(PROJECT),
        "environment": {"EVERSTEP_BEATS": "1"},
        "nodes": 1,
        "checkpoint_directory": str(system.home / "checkpoints" / "alone"),
    }
    system.rest.post("jobs", spec, key=str(uuid.uuid4()))


def _cut(system: RunningSystem, witness: Witness, result: dict[str, Any]) -> list[str]:
    """The agent is cut off, the rank trains on."""
    job = steady_job(system)
    generation = job["generation"]
    stories = read_stories(system.agents, job["id"])
    pids = {rank: story.pid for (number, rank), story in stories.items() if number == generation}
    asked_at = time.time()
    tell(f"Cutting {job['nodes'][0]} off for {CUT_S:.0f} s ...")
    _refused_unless_confirmed(system, {"kind": "partition", "job": job["id"], "duration_s": CUT_S})
    body = {"kind": "partition", "job": job["id"], "duration_s": CUT_S, "allow_waiting": True}
    drill = order_drill(system, body, key=str(uuid.uuid4()))
    incident = _await_waiting(system, job["id"], since=asked_at)
    errors = _untouched(system, incident, generation=generation)
    incident = _await_end(system, incident["id"])
    drill = system.wait_until(lambda: _ended_drill(system, drill["id"]), what="the drill to end", limit_s=150)
    if incident["state"] != "false_alarm":
        errors.append(f"The incident ended as {incident['state']}, not as a false alarm.")
    if drill["state"] != "passed":
        errors.append(f"The drill is {drill['state']}: {drill['result'].get('reasons')}")
    found = recompute(system, job["id"], generation=generation, pids=pids, since=asked_at)
    result |= {
        "cut": incident["state"],
        "steps_lost": found.steps_lost,
        "events_lost": found.events_lost,
        "largest_step_gap_s": round(found.largest_step_gap_s, 3),
    }
    errors += [f"Rank {rank}, process {pid}, is gone." for rank, pid in pids.items() if pid in witness.exits]
    return [*errors, *found.wrong]


def _gone(system: RunningSystem, witness: Witness, result: dict[str, Any]) -> list[str]:
    """Agent, runner and rank die together; only a human can say that they did."""
    job = steady_job(system, least_saved_step=SAVE_EVERY)
    node, generation = job["nodes"][0], job["generation"]
    asked_at = time.time()
    tell(f"Killing all of {node} ...")
    body = {
        "kind": "kill-agent",
        "job": job["id"],
        "duration_s": GONE_S,
        "steps_after_save": STEPS_AFTER_SAVE,
        "allow_waiting": True,
    }
    order_drill(system, body, key=str(uuid.uuid4()))
    incident = _await_waiting(system, job["id"], since=asked_at)
    errors = _untouched(system, incident, generation=generation, trains=False)
    tell(f"Attesting that {node} is off ...")
    path = f"nodes/{node}/attestations"
    try:
        system.rest.post(path, {"confirm": "yes", "statement": "pulled the plug"}, key=str(uuid.uuid4()))
        errors.append("An attestation that does not name the node was taken.")
    except RestError:
        pass
    system.rest.post(path, {"confirm": node, "statement": "pulled the plug"}, key=str(uuid.uuid4()))
    incident = _await_end(system, incident["id"])
    receipt = incident["receipt"]
    result["gone"] = incident["state"]
    if receipt is None:
        return [*errors, f"The incident ended as {incident['state']} and has no receipt."]
    fences = [Fence(one["node"], one["kind"], one["at"]) for one in receipt["fences"]]
    found = audit(
        read_stories(system.agents, job["id"]),
        old=generation,
        opened_at=unix_seconds(incident["opened_at"]),
        exits=witness.exits,
        hit=0,
        fences=fences,
    )
    errors += [
        f"a process of generation {generation} outlived the stop: pid {pid} carries its mark"
        for pid in marked_processes(job["id"], generation)
    ]
    errors += [*found.wrong, *disagreements(found, receipt, of_silence=True)]
    if [(fence.node, fence.kind) for fence in fences] != [(node, "attestation")]:
        errors.append(f"The receipt's proofs are {fences}, not an operator's word on {node}.")
    if receipt["new_nodes"] == [node]:
        errors.append(f"The job was relaunched on {node}, which is off.")
    result |= {
        "continuity": found.continuity,
        "fence": {fence.node: fence.kind for fence in fences},
        "fence_s": round(receipt["stop_s"], 3),
        "overlap_margin_s": round(found.overlap_margin_s, 3),
    }
    return errors


def _refused_unless_confirmed(system: RunningSystem, body: dict[str, Any]) -> None:
    try:
        system.rest.post("drills", body, key=str(uuid.uuid4()))
    except RestError as error:
        if error.status == 409:
            return
        raise
    raise HarnessError("A drill that makes a human wait was taken without being confirmed.")


def _await_waiting(system: RunningSystem, job: str, *, since: float) -> dict[str, Any]:
    """The job's fresh incident, once it waits for a fence."""
    seen: list[dict[str, Any]] = []

    def waiting() -> dict[str, Any] | None:
        seen[:] = [one for one in system.rest.items(f"incidents?job={job}") if unix_seconds(one["opened_at"]) > since]
        return next((one for one in seen if one["state"] == "waiting_for_fence"), None)

    try:
        found = system.wait_until(waiting, what="an incident that waits for a fence", limit_s=90)
    except HarnessError as error:
        (drill, *_) = system.rest.items(f"drills?job={job}")
        words = "; ".join(f"{one['id']} is {one['state']}" for one in seen) or "there is no incident"
        raise HarnessError(f"{error} The drill is {drill['state']} ({drill['detail']}); {words}.") from error
    tell(f"Incident {found['id']} waits for a fence, {time.time() - since:.0f} s after the drill was ordered.")
    return found


def _untouched(system: RunningSystem, incident: dict[str, Any], *, generation: int, trains: bool = True) -> list[str]:
    """What was done though nothing is known; and that a human was told."""
    before = _last_step(system, incident["job"], generation)
    time.sleep(UNTOUCHED_S)
    errors = []
    job = system.rest.get(f"jobs/{incident['job']}")
    if job["generation"] != generation:
        errors.append(f"The job was relaunched as generation {job['generation']} though nothing was proven.")
    if trains and _last_step(system, incident["job"], generation) <= before:
        errors.append("The rank does not train on.")
    kinds = {entry["kind"] for entry in system.rest.items(f"incidents/{incident['id']}/timeline")}
    if "page" not in kinds:
        errors.append("Nobody was paged.")
    return errors


def _last_step(system: RunningSystem, job: str, generation: int) -> int:
    stories = read_stories(system.agents, job)
    return max((step for (number, _), one in stories.items() if number == generation for step in one.steps), default=0)


def _await_end(system: RunningSystem, incident_id: str) -> dict[str, Any]:
    def ended() -> dict[str, Any] | None:
        try:
            incident: dict[str, Any] = system.rest.get(f"incidents/{incident_id}")
        except (OSError, RestError):
            return None
        return incident if incident["ended"] else None

    return system.wait_until(ended, what="the incident to end", limit_s=170)


def _ended_drill(system: RunningSystem, drill_id: str) -> dict[str, Any] | None:
    drill: dict[str, Any] = system.rest.get(f"drills/{drill_id}")
    return drill if drill["ended"] else None


if __name__ == "__main__":
    sys.exit(main())
