"""`make planted-bugs`: every bug with and without a promise of equal bits and with noise, and a hundred clean resumes.

The last line is JSON. Exit code 0 only if each bug was found and named, and at most one clean resume was called broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from planted_bugs.bugs import BUGS
from planted_bugs.proof import MODES, Mode, clean_resumes, planted_resumes
from planted_bugs.training import warm_up

CLEAN = 100
"""Without noise, and once more with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clean", type=int, default=CLEAN)
    arguments = parser.parse_args()
    started = time.monotonic()
    warm_up()
    planted = []
    for mode in MODES:
        print(f"\n{mode}", flush=True)
        for result in planted_resumes(mode, seed=arguments.seed):
            print(f"  {'found ' if result.found else 'MISSED'} {result.bug:<36} {result.said}", flush=True)
            planted.append(result)
    alarms, clean = [], 0
    for modes in ([Mode()], [Mode(False, 1e-4), Mode(False, 1e-3)]):
        print(f"\n{arguments.clean} clean resumes: {'; '.join(map(str, modes))}", flush=True)
        for result in clean_resumes(modes, seed=arguments.seed, count=arguments.clean):
            clean += 1
            if not result.found:
                continue
            alarms.append(result)
            print(f"  FALSE ALARM, seed {result.seed}, {result.mode}: {result.said}", flush=True)
    found = sum(result.found for result in planted)
    print(f"\n{time.monotonic() - started:.0f} s")
    print(
        json.dumps(
            {
                "planted": len(planted),
                "found": found,
                "clean": clean,
                "false_alarms": len(alarms),
                "said": {bug: sorted({r.said for r in planted if r.bug == bug}) for bug in BUGS},
                "missed": [f"{r.bug} ({r.mode})" for r in planted if not r.found],
                "seed": arguments.seed,
            }
        )
    )
    return 0 if found == len(planted) and len(alarms) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
