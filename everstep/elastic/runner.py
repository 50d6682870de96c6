"""The runner: starts one generation's ranks on one node through torch elastic, and reports how they fare.

The agent starts it as `<interpreter> -m everstep.elastic.runner --directory DIR` in a session of its own; it lives on
when the agent dies, and its ranks die with it. It restarts nothing: that is decided elsewhere. Runner and agent share
DIR: `launch.json` in, `events.jsonl` and `logs/` out.

The rendezvous port of torch listens on all interfaces and knows no password: it belongs on a trusted network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.elastic.journal import Journal
from everstep.elastic.launch import PROTOCOL, Launch
from everstep.elastic.watch import RankWatch
from everstep.errors import BadLaunch
from everstep.telemetry import Telemetry

if TYPE_CHECKING:
    from everstep.elastic.worker_group import Outcome

_ending = threading.Lock()

REPORT_LIMIT_S = 5.0
"""How long exits of killed ranks may take to be reported before the runner ends without them."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: all ranks of this node ended with 0. Code 2: there was nothing that could be started."""
    parser = argparse.ArgumentParser(prog="python -m everstep.elastic.runner", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="folder with launch.json")
    directory: Path = parser.parse_args(arguments).directory.absolute()
    try:
        launch = Launch.read(directory)
        join_cgroup(launch.cgroup)
        Path(launch.log_directory).mkdir(parents=True, exist_ok=True)
    except (BadLaunch, OSError) as err:
        print(f"The runner cannot start: {err}", file=sys.stderr)
        return 2
    telemetry = Telemetry(socket_path=launch.socket, job=launch.job, generation=launch.generation)
    journal = Journal(directory, telemetry)
    journal.write("runner_started", pid=os.getpid(), protocol=PROTOCOL)
    watch = RankWatch(
        journal,
        log_directory=Path(launch.log_directory),
        on_signal=lambda number: _end_by_signal(number, watch, journal),
    )
    outcome = _run(launch, directory, watch)
    watch.kill_all()
    watch.wait_until_reported(REPORT_LIMIT_S)
    _write_end(journal, reason=outcome.reason, detail=outcome.detail)
    telemetry.close()
    return 1 if outcome.reason else 0


def join_cgroup(path: str | None) -> None:
    """Enter the generation's cgroup first of all, so that everything started from here on is in it."""
    if path is None or _is_in_cgroup(path):
        return
    try:
        (Path(path) / "cgroup.procs").write_text(f"{os.getpid()}\n")
    except OSError as err:
        raise BadLaunch(
            f"Cannot enter cgroup {path}: {err}. Without it nobody could prove that this generation has stopped."
        ) from err


def _is_in_cgroup(path: str) -> bool:
    with contextlib.suppress(OSError):
        return str(os.getpid()) in (Path(path) / "cgroup.procs").read_text().split()
    return False


def _run(launch: Launch, directory: Path, watch: RankWatch) -> Outcome:
    os.environ.clear()  # what the agent's environment holds is none of the job's business
    os.environ.update(launch.rank_environment(runner_pid=os.getpid()))
    # Imported late: torch takes seconds, and until it is there the agent should know that this process lives.
    from everstep.elastic.worker_group import run_worker_group

    return run_worker_group(launch, directory, on_start=watch.add)


def _write_end(journal: Journal, *, reason: str, detail: str) -> None:
    """Once only: a signal makes elastic's run raise in the main thread while the watch is ending the process too."""
    if _ending.acquire(blocking=False):
        journal.write("runner_ended", reason=reason, detail=detail)


def _end_by_signal(number: int, watch: RankWatch, journal: Journal) -> None:
    deadline = time.monotonic() + REPORT_LIMIT_S
    watch.kill_all()
    while not watch.wait_until_reported(0.1) and time.monotonic() < deadline:
        watch.kill_all()  # a rank may have been started after the first round
    _write_end(journal, reason="error", detail=f"The runner was told to end by signal {number}.")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
