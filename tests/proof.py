"""`make proof`: every long proof in full, one after the other, and one table at the end. Each is a make target too.

A proof is a command whose last line is a JSON object. One that must fail (a planted bug) is proven by exit code 1 and
by the words that name the bug.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 1800


@dataclass(frozen=True)
class Proof:
    """`shows` names the fields of the last line that the table tells. `fails_with`: it must fail with these words."""

    name: str
    arguments: Sequence[str]
    shows: Sequence[str] = ()
    fails_with: str = ""


@dataclass
class Result:
    proof: Proof
    passed: bool
    seconds: float
    words: str
    last_line: dict[str, Any] = field(default_factory=dict)


def planted(bug: str, words: str, *, target: str = "demo-check") -> Proof:
    return Proof(f"{target} finds BUG={bug}", [target, f"BUG={bug}"], fails_with=words)


PROOFS = [
    Proof("simulated schedules", ["simulate", "SCHEDULES=2000"], ["schedules", "faults", "violations"]),
    planted("no-fence", '"fenced-before-run"', target="simulate"),
    planted("no-lease-margin", '"lease-proof-is-true"', target="simulate"),
    planted("lease-without-stopped-peer", '"lease-proof-is-true"', target="simulate"),
    planted("old-plan-accepted", '"one-generation-alive"', target="simulate"),
    planted("one-witness", '"healthy-jobs-are-left-alone"', target="simulate"),
    planted("no-taint", '"tainted-is-never-loaded"', target="simulate"),
    Proof("24 node-days of heartbeats", ["silence"], ["false_lost", "breaker_openings", "silences", "detect_p99_s"]),
    Proof("bugs planted in resumes", ["planted-bugs"], ["planted", "found", "clean", "false_alarms"]),
    Proof("damaged checkpoints, failing storage", ["corruptions"], ["cases", "accepted_bad", "refused_good"]),
    Proof(
        "runs that end bit for bit as uninterrupted", ["exactness"], ["cases", "identical", "faults", "steps_replayed"]
    ),
    Proof("exactness finds BUG=rng", ["exactness", "BUG=rng", "ONLY=4 ranks on 2 nodes"], fails_with="loss_hex"),
    Proof("demo-check", ["demo-check"], ["state", "continuity", "steps_lost", "steps_compared", "caught_up_s"]),
    planted("optimizer", "the optimizer was not restored"),
    planted("scheduler", "the scheduler was not restored"),
    planted("sampler", "the sampler was not restored"),
    planted("ghost", "a process of generation 1 outlived the stop"),
    Proof("drills of every kind", ["drills"], ["drills", "passed", "slowest_s"]),
    Proof("every page, both colours, both widths", ["axe"], ["looks", "complaints"]),
    Proof("a job on a single node", ["single-node"], ["cut", "steps_lost", "gone", "fence", "overlap_margin_s"]),
    Proof(
        "a job that shrinks",
        ["shrink"],
        ["state", "continuity", "old_world_size", "new_world_size", "steps_lost", "fence_s"],
    ),
    Proof("dying servers, Redis gone or full", ["chaos"], ["scenarios", "recovered", "worker_kills", "slowest_s"]),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    results = []
    for proof in PROOFS:
        print(f"\n== {proof.name}: make {' '.join(proof.arguments)} SEED={seed}", flush=True)
        results.append(run(proof, seed=seed))
    print_table(results)
    failed = sum(not result.passed for result in results)
    print(json.dumps({"proofs": len(results), "failed": failed, "seed": seed}))
    return 1 if failed else 0


def run(proof: Proof, *, seed: int) -> Result:
    started = time.monotonic()
    done = subprocess.run(
        ["make", "--no-print-directory", *proof.arguments, f"SEED={seed}"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    seconds = time.monotonic() - started
    print(done.stdout, flush=True)
    try:
        last = json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except ValueError:
        return Result(proof, False, seconds, f"ended with code {done.returncode} and without a line of JSON")
    if proof.fails_with:
        found = done.returncode != 0 and proof.fails_with in json.dumps(last)
        words = f"says: {proof.fails_with}" if found else f"ended with code {done.returncode}: {last}"
        return Result(proof, found, seconds, words, last)
    numbers = ", ".join(f"{name} {last.get(name)}" for name in proof.shows)
    return Result(proof, done.returncode == 0, seconds, last.get("error") or numbers, last)


def print_table(results: Sequence[Result]) -> None:
    width = max(len(result.proof.name) for result in results)
    print()
    for result in results:
        mark = "ok  " if result.passed else "FAIL"
        print(f"{mark} {result.proof.name:<{width}} {result.seconds:7.1f} s  {result.words}")


if __name__ == "__main__":
    sys.exit(main())
