"""`make corruptions`: cases drawn by the seed, a table of their kinds, and a last line of JSON.

Exit code 0 only if no bad checkpoint was accepted and no good one refused.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter

from corruptions.crew import warm_up
from corruptions.judges import Result
from corruptions.proof import KINDS, draw, run_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only such cases; may be given again")
    arguments = parser.parse_args()
    started = time.monotonic()
    warm_up()
    rng = random.Random(f"kinds {arguments.seed}")
    kinds = rng.choices(arguments.kind, k=arguments.cases) if arguments.kind else draw(arguments.cases, rng)
    results = []
    for result in run_cases(kinds, seed=arguments.seed):
        results.append(result)
        if not result.right:
            verdict = f"ACCEPTED: {result.accepted_bad}" if result.accepted_bad else f"REFUSED: {result.refused_good}"
            print(f"{result.kind}, {result.shape}: {result.what}\n  {verdict}", flush=True)
    print_table(results)
    accepted = [result for result in results if result.accepted_bad]
    refused = [result for result in results if result.refused_good]
    print(f"\n{time.monotonic() - started:.0f} s")
    print(
        json.dumps(
            {
                "cases": len(results),
                "accepted_bad": len(accepted),
                "refused_good": len(refused),
                "wrong": sorted({result.kind for result in results if not result.right}),
                "seed": arguments.seed,
            }
        )
    )
    return 1 if accepted or refused else 0


def print_table(results: list[Result]) -> None:
    """One line for each kind: cases, and by what they were found."""
    width = max(len(kind) for kind in KINDS)
    print(f"\n{'kind':<{width}}  cases  wrong  found by")
    for kind in KINDS:
        mine = [result for result in results if result.kind == kind]
        if not mine:
            continue
        found = Counter(" + ".join(result.found) or "nothing, and harmless" for result in mine)
        words = ", ".join(f"{by} {count}" for by, count in found.most_common())
        print(f"{kind:<{width}}  {len(mine):5}  {sum(not result.right for result in mine):5}  {words}")


if __name__ == "__main__":
    sys.exit(main())
