"""The pure machine against a simulated fleet, under random faults and virtual time: what `make simulate` runs.

    python tests/simulation/simulate.py --schedules 500 --seed 1
    python tests/simulation/simulate.py --replay 1:137

Progress goes to standard error; the last line of standard output is one JSON object. The exit code is 1 if an invariant
was violated: then the schedule is told in its shortest form that still fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial

from planted import PLANTS
from schedules import Schedule, make_schedule
from shrinking import shorten
from simulated_world import Result, SimulatedWorld

from recovery.domain.invariants import Violation

TOLD_AT_MOST = 3
"""Violated schedules that are shortened and printed; the rest is only counted."""


@dataclass(frozen=True, kw_only=True)
class Run:
    index: int
    result: Result


def run_schedule(schedule: Schedule, *, plant: str) -> Result:
    """Run one schedule; a decision that raises is a violation too."""
    world = SimulatedWorld(schedule, plant=plant)
    try:
        return world.run()
    except Exception as err:
        last = traceback.extract_tb(err.__traceback__)[-1]
        sentence = f"{type(err).__name__} in {os.path.basename(last.filename)}:{last.lineno}: {err}"
        world.violations.append(Violation(rule="decisions-never-raise", sentence=sentence))
        return world.result()


def _run_index(index: int, *, seed: int, plant: str) -> Run:
    return Run(index=index, result=run_schedule(make_schedule(seed, index), plant=plant))


def main(argv: list[str] | None = None) -> int:
    """Run as the command line says; returns the exit code."""
    options = _parse(argv)
    if options.replay:
        seed, index = (int(part) for part in options.replay.split(":"))
        return _replay(seed, index, plant=options.plant)
    return _run_all(options)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=500, help="how many to run (default: 500)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    parser.add_argument(
        "--plant", choices=sorted(PLANTS), default="", help="run with a planted bug, which must be found"
    )
    parser.add_argument("--replay", metavar="SEED:INDEX", default="", help="run one schedule and tell it")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    return parser.parse_args(argv)


def _run_all(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    violated: list[Run] = []
    faults, decisions = 0, 0
    ends: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    fences: Counter[str] = Counter()
    breakers = 0
    work = partial(_run_index, seed=options.seed, plant=options.plant)
    with multiprocessing.Pool(options.processes) as pool:
        for done, run in enumerate(pool.imap(work, range(options.schedules), chunksize=8), start=1):
            faults += run.result.faults
            decisions += run.result.decisions
            ends += run.result.ends
            moves += run.result.moves
            fences += run.result.fences
            breakers += run.result.breakers
            if run.result.violations:
                violated.append(run)
            if done % 100 == 0 or done == options.schedules:
                print(f"{done} schedules, {faults} faults, {len(violated)} violated", file=sys.stderr, flush=True)
    for run in violated[:TOLD_AT_MOST]:
        _tell(make_schedule(options.seed, run.index), run.result, plant=options.plant)
    summary = {
        "schedules": options.schedules,
        "faults": faults,
        "violations": len(violated),
        "violated": dict(Counter(run.result.violations[0].rule for run in violated).most_common()),
        "seed": options.seed,
        "plant": options.plant or None,
        "decisions": decisions,
        "ends": dict(ends.most_common()),
        "moves": dict(moves.most_common()),
        "fences": dict(fences.most_common()),
        "breakers": breakers,
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(summary))
    return 1 if violated else 0


def _tell(schedule: Schedule, result: Result, *, plant: str) -> None:
    """Print a violated schedule in its shortest form."""
    rule = result.violations[0].rule

    def fails(candidate: Schedule) -> bool:
        return any(found.rule == rule for found in run_schedule(candidate, plant=plant).violations)

    short = shorten(schedule, fails)
    found = next(v for v in run_schedule(short, plant=plant).violations if v.rule == rule)
    print(f"VIOLATED {found.rule}: {found.sentence}")
    print(f"  shortened from {len(schedule.events)} to {len(short.events)} events:")
    print("\n".join(f"  {line}" for line in str(short).splitlines()))
    planted = f" --plant {plant}" if plant else ""
    print(f"  replay: python tests/simulation/simulate.py --replay {schedule.seed}:{schedule.index}{planted}\n")


def _replay(seed: int, index: int, *, plant: str) -> int:
    schedule = make_schedule(seed, index)
    result = run_schedule(schedule, plant=plant)
    print(schedule)
    print(f"ends after {result.elapsed_s:.1f} virtual seconds: {dict(result.ends)}")
    if not result.violations:
        print("no rule was violated")
        return 0
    _tell(schedule, result, plant=plant)
    return 1


if __name__ == "__main__":
    sys.exit(main())
