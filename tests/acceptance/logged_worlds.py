"""Rank logs of told recoveries, for the tests of the auditors: a good one, to be planted with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo_check.auditor import Audit, audit, read_stories

JOB = "job_a"
SAVED, REACHED, LAST = 25, 33, 40
FAULT = 1000.0
DIGEST = {"model": "aa", "optimizer": "bb"}

Log = list[dict[str, Any]]
World = dict[tuple[int, int], Log]
"""(generation, rank) -> lines of its log."""


def step_line(step: int, at: float) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "at": at,
        "loss": 4.0 - step / 100,
        "loss_hex": (4.0 - step / 100).hex(),
        "learning_rate": 0.001 * step,
        "epoch": 0,
        "span_start": 8 * (step - 1),
        "span_stop": 8 * step,
    }


def good_world() -> World:
    """Two ranks: saved at 25, rank 1 killed after step 33 at t=1000, generation 2 starts at t=1001."""
    world: World = {}
    for rank in (0, 1):
        pid = 100 + rank
        first = [{"kind": "start", "pid": pid, "at": 990.0, "generation": 1, "rank": rank}]
        steps = [step_line(step, FAULT - (REACHED - step) * 0.05 - 0.01) for step in range(1, REACHED + 1)]
        steps.insert(SAVED, {"kind": "saved", "step": SAVED, "at": steps[SAVED - 1]["at"]})
        world[1, rank] = [*first, *steps]
        again = [
            {"kind": "start", "pid": 200 + rank, "at": 1001.0, "generation": 2, "rank": rank},
            {
                "kind": "resumed",
                "step": SAVED,
                "at": 1002.0,
                "parent_generation": 1,
                "saved_digest": dict(DIGEST),
                "live_digest": dict(DIGEST),
            },
        ]
        more = [step_line(step, 1002.0 + (step - SAVED) * 0.05) for step in range(SAVED + 1, LAST + 1)]
        world[2, rank] = [*again, *more]
    return world


def write_world(folder: Path, world: World) -> None:
    for (generation, rank), lines in world.items():
        logs = folder / f"gpu-0{rank + 1}" / "runs" / JOB / str(generation) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
        start, stop = (990.0, FAULT - rank * 0.001 + (1 - rank) * 0.3) if generation == 1 else (1001.0, 1003.0)
        beats = [start + 0.02 * index for index in range(int((stop - start) / 0.02) + 1)]
        (logs / f"rank-{rank}.beats").write_text("".join(f"{beat:.6f}\n" for beat in beats))


def shrunk_world() -> World:
    """The same, but the new generation goes on with rank 0 alone."""
    world = good_world()
    del world[2, 1]
    return world


def judge(
    folder: Path,
    world: World,
    *,
    exits: dict[int, float] | None = None,
    new_world: int | None = None,
    lateness_s: float = 0.0,
) -> Audit:
    write_world(folder, world)
    return audit(
        read_stories(folder, JOB),
        old=1,
        opened_at=FAULT + 0.1,
        exits={100: FAULT + 0.31, 101: FAULT} if exits is None else exits,
        new_world=new_world,
        lateness_s=lateness_s,
    )
