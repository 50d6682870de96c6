"""`make shrink`: a job of one or two nodes loses one of its two, and there is no spare. The last line is JSON.

The node dies with its agent and all that runs on it. The job has to go on without the lost slot, by a lease and its
survivor's own proof of stop, from its checkpoint, with the same samples in the same order.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from demo_check.recovered import check_recovered
from demo_check.rest import RestError
from demo_check.run import tell
from demo_check.system import HarnessError, RunningSystem, steady_job
from demo_check.witness import Witness, world_size_of

PROJECT = Path(__file__).resolve().parents[2]


def main() -> int:
    result: dict[str, Any] = {}
    errors: list[str] = []
    tell("Starting the system with two agents on free ports ...")
    system = RunningSystem(
        options=["--no-job", "--agents", "2"], environment={"EVERSTEP_BEATS": "1"}, keep=os.environ.get("KEEP") == "1"
    )
    try:
        with system, Witness(system.agents) as witness:
            errors += _shrink(system, witness, result)
            tell("Stopping everything ...")
    except (HarnessError, RestError, OSError, ValueError) as error:
        errors.append(str(error))
    errors += [f"A process was left behind: {pid} {command}" for pid, command in system.leftovers().items()]
    system.kill_leftovers()
    for words in errors:
        tell(f"WRONG: {words}")
    print(json.dumps(result | ({"error": " | ".join(errors)} if errors else {})), flush=True)
    return 1 if errors else 0


def _shrink(system: RunningSystem, witness: Witness, result: dict[str, Any]) -> list[str]:
    _submit(system)
    job = steady_job(system)
    old_nodes, old_sizes = job["nodes"], world_size_of(witness.alive())
    errors = check_recovered(system, witness, "kill-agent", result=result, tell=tell, new_world=1)
    # It trains on with one rank, though the other node is back by now.
    job = steady_job(system)
    receipt = _receipt(system, job["id"])
    new_sizes = world_size_of(witness.alive())
    result |= {
        "old_world_size": max(old_sizes, default=None),
        "new_world_size": max(new_sizes, default=None),
        "old_nodes": old_nodes,
        "new_nodes": job["nodes"],
    }
    if (len(old_nodes), old_sizes) != (2, {2}):
        errors.append(f"The job began on {old_nodes} with ranks of a world of {sorted(old_sizes)}, not 2.")
    if (job["nodes"], new_sizes) != (old_nodes[:1], {1}):
        errors.append(f"The job went on on {job['nodes']} with ranks of a world of {sorted(new_sizes)}, not 1.")
    if receipt and (receipt["old_nodes"], receipt["new_nodes"]) != (old_nodes, old_nodes[:1]):
        errors.append(f"The receipt says that it went from {receipt['old_nodes']} to {receipt['new_nodes']}.")
    return errors


def _submit(system: RunningSystem) -> None:
    script = PROJECT / "examples" / "train_tiny_gpt.py"
    spec = {
        "name": "shrinks",
        "argv": [sys.executable, str(script), "--steps", "100000", "--save-every", "40", "--leave-child"],
        "working_directory": str(PROJECT),
        "environment": {"EVERSTEP_BEATS": "1"},
        "nodes": {"min": 1, "max": 2},
        "checkpoint_directory": str(system.home / "checkpoints" / "shrinks"),
    }
    system.rest.post("jobs", spec, key=str(uuid.uuid4()))


def _receipt(system: RunningSystem, job: str) -> dict[str, Any] | None:
    (incident,) = system.rest.items(f"incidents?job={job}")
    receipt: dict[str, Any] | None = system.rest.get(f"incidents/{incident['id']}")["receipt"]
    return receipt


if __name__ == "__main__":
    sys.exit(main())
