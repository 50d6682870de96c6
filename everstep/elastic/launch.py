"""`launch.json`: what one runner starts. The agent writes it, the runner and the rank entry read it.

Standard library only: each rank reads it before it becomes the training script.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from everstep.errors import BadLaunch

PROTOCOL = 1
LAUNCH_FILE = "launch.json"


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

    @classmethod
    def read(cls, directory: Path) -> Launch:
        """Raises `BadLaunch` when the file is missing, incomplete, or of a protocol that this release cannot run."""
        path = directory / LAUNCH_FILE
        try:
            content = json.loads(path.read_bytes())
            launch = cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise BadLaunch(f"{path} does not describe a launch ({type(err).__name__}: {err}).") from err
        if launch.protocol != PROTOCOL:
            raise BadLaunch(f"{path} has protocol {launch.protocol}; this runner speaks {PROTOCOL}.")
        if launch.first_rank != launch.node_rank * launch.ranks_per_node:
            raise BadLaunch(f"{path}: node rank {launch.node_rank} cannot start at rank {launch.first_rank}.")
        if not launch.argv:
            raise BadLaunch(f"{path}: argv is empty; it needs at least the interpreter.")
        return launch

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
        # One thread per rank unless the job says otherwise: another count changes the order of sums.
        return {"OMP_NUM_THREADS": "1", **self.environment, **added}
