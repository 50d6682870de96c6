"""`make demo-check`: start all, run one drill, have it recomputed, stop all. The last line is one JSON object.

Progress goes to standard error, timeline, receipt and result to standard output. BUG=optimizer, scheduler, sampler or
ghost plants that bug, and must make this fail. KEEP=1 keeps the temporary folder.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from typing import Any

from demo_check.auditor import Audit, audit, disagreements, read_stories
from demo_check.rest import RestError
from demo_check.system import BLIND_EVERSTEP, EVERSTEP, HarnessError, RunningSystem, steady_job, unix_seconds
from demo_check.witness import Witness, marked_processes

FORGETTABLE = ("optimizer", "scheduler", "sampler")
STEPS_AFTER_SAVE = 8
RECOVERED_WITHIN_S = 120.0
DRILL_LIMIT_S = 170.0


def main() -> int:
    bug = os.environ.get("BUG", "")
    if bug not in ("", "ghost", *FORGETTABLE):
        return _finish({}, [f"BUG={bug} is unknown: use one of {', '.join((*FORGETTABLE, 'ghost'))}."])
    # Ranks always leave a child behind, forked twice and in a session of its own: a stop must find it, too.
    script = ["--leave-child", *(["--forget", bug] if bug in FORGETTABLE else [])]
    _progress("Starting the system on free ports ...")
    system = RunningSystem(
        script=script,
        program=BLIND_EVERSTEP if bug == "ghost" else EVERSTEP,
        environment={"EVERSTEP_BEATS": "1"},
        keep=os.environ.get("KEEP") == "1",
    )
    result: dict[str, Any] = {}
    errors: list[str] = []
    try:
        with system, Witness(system.agents) as witness:
            errors += _drill(system, witness, result)
            _progress("Stopping everything ...")
    except (HarnessError, RestError, OSError, ValueError) as error:
        errors.append(str(error))
    errors += [f"A process was left behind: {pid} {command}" for pid, command in system.leftovers().items()]
    system.kill_leftovers()
    return _finish(result, errors)


def _drill(system: RunningSystem, witness: Witness, result: dict[str, Any]) -> list[str]:
    """One drill from the order to the receipt. Fills `result`; returns what is wrong."""
    # With an older checkpoint beneath it, broken continuity is rolled back once, is broken again, and pages a person.
    job = steady_job(system, least_saved_step=50)
    _progress(f"Job {job['id']} is at step {job['last_step']}; ordering a drill ...")
    body = {
        "kind": "kill-rank",
        "job": job["id"],
        "rank": 1,
        "steps_after_save": STEPS_AFTER_SAVE,
        "recovered_within_s": RECOVERED_WITHIN_S,
    }
    key = str(uuid.uuid4())
    drill = system.rest.post("drills", body, key=key)
    repeated = system.rest.post("drills", body, key=key)
    errors = [] if repeated["id"] == drill["id"] else ["A repeated POST with one Idempotency-Key made a second drill."]
    drill, incident = _follow(system, drill["id"])
    _print_story(system, incident)
    result |= {"state": incident["state"], "drill": drill["state"]}
    errors += _judge(system, witness, drill=drill, incident=incident, result=result)
    return errors


def _follow(system: RunningSystem, drill_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
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
            _progress(words)
            told = words
        if drill["ended_at"] and not incident:
            raise HarnessError(f"The drill ended as {drill['state']} without an incident: {drill['detail']}")
        if incident and ((drill["ended_at"] and incident["ended"]) or incident["state"] == "escalated"):
            return drill, incident
        return None

    return system.wait_until(over, what="the drill to end", limit_s=DRILL_LIMIT_S)


def _print_story(system: RunningSystem, incident: dict[str, Any]) -> None:
    print(f"Timeline of incident {incident['id']}")
    entries = system.rest.items(f"incidents/{incident['id']}/timeline")
    for entry in entries:
        print(f"  {entry['occurred_at']}  {entry['kind']:<9} {entry['text']}")
    print("Receipt")
    print(json.dumps(incident["receipt"], indent=2))


def _judge(
    system: RunningSystem, witness: Witness, *, drill: dict[str, Any], incident: dict[str, Any], result: dict[str, Any]
) -> list[str]:
    """Everything that is wrong, from the ranks' own logs first, then from the server's words."""
    opened_at = unix_seconds(incident["opened_at"])
    job, old = incident["job"], drill["generation"]
    errors = [
        f"a process of generation {old} outlived the stop: pid {pid} carries its mark"
        for pid in marked_processes(job, old)
    ]
    found = audit(read_stories(system.agents, job), old=old, opened_at=opened_at, exits=witness.exits)
    result |= _numbers(found)
    errors += found.wrong
    if found.killed_rank != drill["rank"]:
        errors.append(f"Rank {found.killed_rank} died first, the drill was to kill rank {drill['rank']}.")
    if incident["receipt"]:
        errors += disagreements(found, incident["receipt"])
    else:
        errors.append("The incident has no receipt.")
    if incident["state"] != "recovered":
        errors.append(f"The incident is {incident['state']}, not recovered. {incident['escalation']}")
    if drill["state"] != "passed":
        errors.append(f"The drill is {drill['state']}: {'; '.join(drill['result'].get('reasons', []))}")
    if found.steps_compared < 5:
        errors.append(f"Only {found.steps_compared} steps were compared, at least 5 are needed.")
    return errors


def _numbers(found: Audit) -> dict[str, Any]:
    seconds = {name: getattr(found, name) for name in ("detect_s", "stop_s", "first_step_s", "caught_up_s")}
    return {
        "continuity": found.continuity,
        "steps_lost": found.steps_lost,
        "steps_compared": found.steps_compared,
        **{name: None if value is None else round(value, 3) for name, value in seconds.items()},
        "generation": found.generation,
        "largest_beat_gap_s": round(found.largest_beat_gap_s, 3),
        "overlap_margin_s": round(found.overlap_margin_s, 3),
    }


def _progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _finish(result: dict[str, Any], errors: list[str]) -> int:
    unique = list(dict.fromkeys(errors))
    for words in unique:
        _progress(f"WRONG: {words}")
    print(json.dumps(result | ({"error": " | ".join(unique)} if unique else {})), flush=True)
    return 1 if unique else 0


if __name__ == "__main__":
    sys.exit(main())
