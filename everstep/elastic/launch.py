"""`launch.json`: what one runner starts. The agent writes it, the runner and the rank entry read it.

Standard library only: each rank reads it before it becomes the training script.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from everstep.elastic.lease_files import LEASE_VARIABLES, LeasePaths
from everstep.errors import BadLaunch

PROTOCOL = 2
"""What this release speaks: 1 starts and reports ranks, 2 adds the lease."""
OLDEST_PROTOCOL = 1
"""What an agent of the release before may still write."""
LAUNCH_FILE = "launch.json"
_SINCE_2 = {"contact", "progress", "lease"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One node's share of one generation. `environment` is the job's, complete; ranks get it and nothing of ours."""

    protocol: int
    job: str
    generation: int
    plan_id: str
    argv: list[str]
    working_directory: str
    environment: dict[str, str]
    run_id: str
    node_rank: int
    node_count: int
    ranks_per_node: int
    first_rank: int
    world_size: int
    master_address: str
    master_port: int
    checkpoint_directory: str
    parent_generation: int | None
    parent_step: int | None
    socket: str | None
    mark: str
    stop_limit_s: float
    log_directory: str
    cgroup: str | None
    # The files of the lease (`lease_files`), absolute; all None where none is kept. Since protocol 2.
    contact: str | None = None
    progress: str | None = None
    lease: str | None = None

    @classmethod
    def read(cls, directory: Path) -> Launch:
        """Raises `BadLaunch` when the file is missing, incomplete, or of a protocol that this release cannot run."""
        path = directory / LAUNCH_FILE
        try:
            content = json.loads(path.read_bytes())
            names = {field.name for field in fields(cls)} - (_SINCE_2 if content["protocol"] < 2 else set())
            launch = cls(**{name: content[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise BadLaunch(f"{path} does not describe a launch ({type(err).__name__}: {err}).") from err
        if not OLDEST_PROTOCOL <= launch.protocol <= PROTOCOL:
            raise BadLaunch(
                f"{path} has protocol {launch.protocol}; this runner speaks {OLDEST_PROTOCOL} to {PROTOCOL}."
            )
        if len({getattr(launch, name) is None for name in _SINCE_2}) > 1:
            raise BadLaunch(f"{path}: contact, progress and lease belong together; give all three, or null for each.")
        if launch.first_rank != launch.node_rank * launch.ranks_per_node:
            raise BadLaunch(f"{path}: node rank {launch.node_rank} cannot start at rank {launch.first_rank}.")
        if not launch.argv:
            raise BadLaunch(f"{path}: argv is empty; it needs at least the interpreter.")
        return launch

    @property
    def lease_paths(self) -> LeasePaths | None:
        """The lease that runner and ranks keep; None where the agent gave none."""
        if self.contact is None or self.progress is None or self.lease is None:
            return None
        return LeasePaths(contact=Path(self.contact), progress=Path(self.progress), terms=Path(self.lease))

    def rank_environment(self, *, runner_pid: int) -> dict[str, str]:
        """The environment of each rank, before torch elastic adds RANK, WORLD_SIZE, MASTER_ADDR and the like."""
        has_parent = self.parent_generation is not None
        added = {
            "EVERSTEP_JOB": self.job,
            "EVERSTEP_GENERATION": str(self.generation),
            "EVERSTEP_PLAN": self.plan_id,
            "EVERSTEP_CHECKPOINT_DIR": self.checkpoint_directory,
            "EVERSTEP_RESUME": f"{self.parent_generation}:{self.parent_step}" if has_parent else "",
            "EVERSTEP_LOG_DIR": self.log_directory,
            "EVERSTEP_MARK": self.mark,
            "EVERSTEP_RUNNER_PID": str(runner_pid),
        }
        if self.socket:
            added["EVERSTEP_SOCKET"] = self.socket
        if self.lease_paths is not None:
            added.update(self.lease_paths.as_environment())
        # A job that was submitted from within a rank must not bring that rank's lease along.
        wanted = {name: value for name, value in self.environment.items() if name not in LEASE_VARIABLES}
        # One thread per rank unless the job says otherwise: another count changes the order of sums.
        return {"OMP_NUM_THREADS": "1", **wanted, **added}
