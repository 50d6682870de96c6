"""`make demo-check DRILL=kind`: start all, run one drill, have it recomputed, stop all. The last line is JSON.

Progress goes to standard error, timeline, receipt and result to standard output. Without DRILL it is kill-rank, for
which BUG=optimizer, scheduler, sampler or ghost plants that bug, and must make this fail. KEEP=1 keeps the temporary
folder.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from demo_check.rest import RestError
from demo_check.run import KINDS, SCRIPT, check_drill, tell
from demo_check.system import BLIND_EVERSTEP, EVERSTEP, HarnessError, RunningSystem
from demo_check.witness import Witness

FORGETTABLE = ("optimizer", "scheduler", "sampler")


def main() -> int:
    bug, kind = os.environ.get("BUG", ""), os.environ.get("DRILL") or "kill-rank"
    if kind not in KINDS:
        return _finish({}, [f"DRILL={kind} is unknown: use one of {', '.join(KINDS)}."])
    if bug not in ("", "ghost", *FORGETTABLE):
        return _finish({}, [f"BUG={bug} is unknown: use one of {', '.join((*FORGETTABLE, 'ghost'))}."])
    if bug and kind != "kill-rank":
        return _finish({}, [f"BUG={bug} is planted with DRILL=kill-rank only."])
    script = [*SCRIPT, *(["--forget", bug] if bug in FORGETTABLE else [])]
    tell("Starting the system on free ports ...")
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
            errors += check_drill(system, witness, kind, result=result)
            tell("Stopping everything ...")
    except (HarnessError, RestError, OSError, ValueError) as error:
        errors.append(str(error))
    errors += [f"A process was left behind: {pid} {command}" for pid, command in system.leftovers().items()]
    system.kill_leftovers()
    return _finish(result, errors)


def _finish(result: dict[str, Any], errors: list[str]) -> int:
    unique = list(dict.fromkeys(errors))
    for words in unique:
        tell(f"WRONG: {words}")
    print(json.dumps(result | ({"error": " | ".join(unique)} if unique else {})), flush=True)
    return 1 if unique else 0


if __name__ == "__main__":
    sys.exit(main())
