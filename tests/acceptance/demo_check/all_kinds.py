"""`make drills SEED=1`: every kind of drill, one after the other on one running system. The last line is JSON.

The seed decides on the order.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

from demo_check.rest import RestError
from demo_check.run import KINDS, SCRIPT, check_drill, tell
from demo_check.system import HarnessError, RunningSystem
from demo_check.witness import Witness


def main() -> int:
    seed = int(os.environ.get("SEED") or 1)
    kinds = list(KINDS)
    random.Random(seed).shuffle(kinds)
    wrong: list[str] = []
    passed, slowest_s = 0, 0.0
    tell("Starting the system on free ports ...")
    system = RunningSystem(script=SCRIPT, environment={"EVERSTEP_BEATS": "1"}, keep=os.environ.get("KEEP") == "1")
    try:
        with system, Witness(system.agents) as witness:
            for kind in kinds:
                began = time.monotonic()
                result, errors = _one(system, witness, kind)
                seconds = time.monotonic() - began
                passed += not errors
                slowest_s = max(slowest_s, seconds)
                wrong += [f"{kind}: {words}" for words in errors]
                print(json.dumps(result | {"seconds": round(seconds, 1)}), flush=True)
    except (HarnessError, OSError) as error:
        wrong.append(str(error))
    wrong += [f"A process was left behind: {pid} {command}" for pid, command in system.leftovers().items()]
    system.kill_leftovers()
    for words in wrong:
        tell(f"WRONG: {words}")
    outcome = {"drills": len(kinds), "passed": passed, "slowest_s": round(slowest_s, 1), "seed": seed}
    print(json.dumps(outcome | ({"error": " | ".join(wrong)} if wrong else {})), flush=True)
    return 1 if wrong or passed < len(kinds) else 0


def _one(system: RunningSystem, witness: Witness, kind: str) -> tuple[dict[str, Any], list[str]]:
    result: dict[str, Any] = {"drill_kind": kind}
    try:
        return result, check_drill(system, witness, kind, result=result)
    except (HarnessError, RestError, OSError, ValueError) as error:
        return result, [str(error)]


if __name__ == "__main__":
    sys.exit(main())
