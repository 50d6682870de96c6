"""A node agent with a planted bug: its proof of stop sees runners and ranks, and overlooks what ranks started.

Run by `blind_demo.py` in place of `python -m agents`, for `make demo-check BUG=ghost`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from agents.supervisor import process_table, stopping
from agents.supervisor.process_table import Process

SEEN = (b"everstep.elastic.runner", b"starter.py", b"rank_entry.py", b"train_tiny_gpt.py")


def only_runners_and_ranks() -> dict[int, Process]:
    return {pid: process for pid, process in process_table.all_processes().items() if not is_overlooked(pid)}


def is_overlooked(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return process_table.MARK_VARIABLE.encode() in environment and not any(name in command for name in SEEN)


if __name__ == "__main__":
    stopping.all_processes = only_runners_and_ranks
    sys.argv.append("--no-cgroup")  # a control group would see the child
    runpy.run_module("agents", run_name="__main__", alter_sys=True)
