"""The fault of `kill-rank`: SIGKILL for one rank of this node. It needs no undoing; `Faults` says when."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from agents.faults.drill_record import DrillRecord
from agents.faults.impossible import FaultImpossible
from agents.faults.moment import DrilledRun, words_for_moment
from agents.supervisor.process_table import open_exact


def kill_rank(record: DrillRecord, run: DrilledRun, *, write_down: Callable[[], None]) -> str:
    """Kill the rank, after `write_down` has put that on disk; returns what was done, as a sentence.

    Raises `FaultImpossible`, or whatever `write_down` raises, before anything has happened.
    """
    pid = run.rank_pids[record.rank]
    descriptor = open_exact(pid, None)
    if descriptor is None:
        raise FaultImpossible(f"process {pid} is no process of rank {record.rank} any more")
    try:
        # The number came from a file of the job's: the kernel says whether it is a process of this generation.
        if not run.holds_process(pid) or pid == os.getpid():
            raise FaultImpossible(f"process {pid} is no process of rank {record.rank} any more")
        write_down()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError as err:
        raise FaultImpossible(f"rank {record.rank} died by itself just before") from err
    finally:
        os.close(descriptor)
    return f"SIGKILL to rank {record.rank}, process {pid}, {words_for_moment(record, run)}"
