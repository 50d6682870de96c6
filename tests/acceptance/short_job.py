"""A job without torch that ends soon, in a way that its arguments choose; submitted by `test_whole_system.py`.

Each rank says that it begins, makes its steps, and says that it is done unless it was told to leave early.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from everstep.telemetry import Telemetry


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--leave-at", type=int, help="exit with code 0 after this step, as if all were done")
    parser.add_argument("--linger-s", type=float, default=0.0, help="how much longer than the others rank 0 lives")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    telemetry = Telemetry(
        socket_path=os.environ["EVERSTEP_SOCKET"],
        job=os.environ["EVERSTEP_JOB"],
        generation=int(os.environ["EVERSTEP_GENERATION"]),
        rank=rank,
    )
    telemetry.send(
        "resumed",
        step=0,
        total_steps=arguments.steps,
        parent_generation=None,
        saved_digest={},
        live_digest={},
        deterministic=False,
    )
    last = arguments.leave_at or arguments.steps
    for step in range(1, last + 1):
        time.sleep(0.05)
        telemetry.send("step", step=step, loss=1.0 / step, epoch=0, span_start=step - 1, span_stop=step)
    if last == arguments.steps:
        telemetry.send("finished", step=last)
    telemetry.close()
    if rank == 0:
        time.sleep(arguments.linger_s)
        checkpoints = Path(os.environ["EVERSTEP_CHECKPOINT_DIR"])
        checkpoints.mkdir(parents=True, exist_ok=True)
        (checkpoints / "rank-0-left-at").write_text(str(time.time()))


if __name__ == "__main__":
    main()
