"""The runner: starts one generation's ranks on one node through torch elastic, and reports how they fare.

The agent starts it as `<interpreter> -m everstep.elastic.runner --directory DIR` in a session of its own; it lives on
when the agent dies, and its ranks die with it. It restarts nothing: that is decided elsewhere. Runner and agent share
DIR: `launch.json` in, `events.jsonl` and `logs/` out, and the files of the lease, which the runner keeps (`lease.py`).

The rendezvous port of torch listens on all interfaces and knows no password: it belongs on a trusted network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.elastic.ending import Ending
from everstep.elastic.journal import Journal
from everstep.elastic.keeper import LeaseKeeper
from everstep.elastic.launch import Launch
from everstep.elastic.lease import EXIT_CODE, NS, Expired
from everstep.elastic.watch import RankWatch
from everstep.errors import BadLaunch, LeaseUnusable
from everstep.telemetry import Telemetry

if TYPE_CHECKING:
    from everstep.elastic.worker_group import Outcome


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: all ranks of this node ended with 0. Code 2: there was nothing that could be started.

    Code 76: the lease had run out. 128 and a signal's number: it was told to end.
    """
    parser = argparse.ArgumentParser(prog="python -m everstep.elastic.runner", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="folder with launch.json")
    directory: Path = parser.parse_args(arguments).directory.absolute()
    try:
        launch = Launch.read(directory)
        join_cgroup(launch.cgroup)
        Path(launch.log_directory).mkdir(parents=True, exist_ok=True)
        telemetry = Telemetry(socket_path=launch.socket, job=launch.job, generation=launch.generation)
        journal = Journal(directory, telemetry)
        watch = RankWatch(journal, log_directory=Path(launch.log_directory))
        ending = Ending(journal, watch)
        watch.start(on_signal=lambda number: _end_by_signal(number, ending))
        keeper = _lease_keeper(launch, watch, ending, journal)
    except (BadLaunch, LeaseUnusable, OSError) as err:
        print(f"The runner cannot start: {err}", file=sys.stderr)
        return 2
    journal.write("runner_started", pid=os.getpid(), protocol=launch.protocol)
    if keeper is not None:
        keeper.start()
    outcome = _run(launch, directory, watch)
    ending.come_to(reason=outcome.reason, detail=outcome.detail)
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


def _lease_keeper(launch: Launch, watch: RankWatch, ending: Ending, journal: Journal) -> LeaseKeeper | None:
    if launch.lease_paths is None:
        return None
    return LeaseKeeper(
        launch.lease_paths,
        rank_count=launch.ranks_per_node,
        ended=lambda: {rank - launch.first_rank for rank in watch.exited()},
        on_expiry=lambda expired: _end_by_lease(expired, ending, journal),
    )


def _end_by_lease(expired: Expired, ending: Ending, journal: Journal) -> None:
    silent_s, limit_s = expired.silent_ns / NS, expired.limit_ns / NS
    ending.force(
        reason="lease",
        detail=f"{expired}.",
        exit_code=EXIT_CODE,
        tell=lambda: journal.write("lease_expired", silent_s=silent_s, limit_s=limit_s, phase=expired.phase),
    )


def _end_by_signal(number: int, ending: Ending) -> None:
    ending.force(reason="error", detail=f"The runner was told to end by signal {number}.", exit_code=128 + number)


if __name__ == "__main__":
    sys.exit(main())
