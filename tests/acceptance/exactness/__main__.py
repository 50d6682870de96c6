"""`make exactness`: each job uninterrupted once, and once for each tier with faults at random points; then a table.

The last line is JSON. Exit code 0 only if every case was identical and every fault fired at its moment.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from exactness.case import Result, run_case, run_uninterrupted
from exactness.jobs import JOBS, Scale, tiers_of
from exactness.script import FORGETS
from tests.integration.forked_generation import warm_up

_SHOWN = 6
"""Differences of a case that are printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=Scale(seed=0).steps)
    parser.add_argument("--faults", type=int, default=Scale(seed=0).faults)
    parser.add_argument("--only", default="", help="only the jobs with these words in their names, such as '4 ranks'")
    parser.add_argument("--bug", choices=["", *FORGETS], default="", help="what the script forgets after a resume")
    arguments = parser.parse_args()
    scale = Scale(seed=arguments.seed, steps=arguments.steps, faults=arguments.faults, forget=arguments.bug)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave nothing running
    started = time.monotonic()
    warm_up()
    results = []
    for job in [job for job in JOBS if arguments.only in str(job)]:
        with tempfile.TemporaryDirectory(prefix="exactness-", ignore_cleanup_errors=True) as folder:
            whole = run_uninterrupted(job, scale, Path(folder) / "uninterrupted")
            for tier in tiers_of(job):
                results.append(run_case(job, tier, scale, Path(folder) / tier.name, whole=whole))
                show(results[-1], seconds=time.monotonic() - started)
    identical = sum(result.identical for result in results)
    fired = Counter(str(fired.fault.kind) for result in results for fired in result.fired)
    wrong = {
        f"{result.job}, {result.tier}": (result.error or result.differs[0])
        for result in results
        if not result.identical
    }
    print(
        json.dumps(
            {
                "cases": len(results),
                "identical": identical,
                "steps": scale.steps,
                "faults": dict(fired),
                "steps_replayed": sum(result.replayed for result in results),
                "differs": wrong,
                "bug": scale.forget,
                "seed": scale.seed,
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )
    return 0 if identical == len(results) else 1


def show(result: Result, *, seconds: float) -> None:
    """One row of the table, with what happened below it."""
    job = result.job
    how = "runner" if job.by_runner else "forked"
    verdict = "identical" if result.identical else "ERROR" if result.error else "DIFFERS"
    print(
        f"{verdict:<10} {job.ranks} ranks  {job.wrapping:<6} {result.tier.name:<7} {job.nodes} node(s)  {how}  "
        f"{job.workers} workers  {len(result.fired)} faults  {result.generations} generations, "
        f"{result.from_memory} from memory  "
        f"{result.replayed} steps replayed  ({seconds:.0f} s)"
    )
    for fired in result.fired:
        print(f"           {fired}")
    for line in [*([result.error] if result.error else []), *result.differs[:_SHOWN]]:
        print(f"           {line}")
    if len(result.differs) > _SHOWN:
        print(f"           and {len(result.differs) - _SHOWN} more differences")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
