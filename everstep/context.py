"""What the environment tells a rank about its run: set by the runner, absent when a script runs alone.

`Run` reads it once. The names are the contract between the runner and the training side.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.manifest import CheckpointName
from everstep.elastic.lease_files import LeasePaths

MEMORY_DIRECTORY = "EVERSTEP_MEMORY_DIR"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """`generation` None means that no runner started this process: the run chooses generation and parent itself."""

    job: str
    generation: int | None
    parent: CheckpointName | None
    rank: int
    local_rank: int
    checkpoint_directory: Path | None
    memory_directory: Path | None
    """Where this node's memory tier lies; the agent cleans it."""
    socket_path: str | None
    log_directory: Path | None
    run_directory: Path | None
    """Where the agent puts what the server wishes of this run; None without one."""
    beats: bool
    lease: LeasePaths | None
    """None where nobody counts on this process: alone, or under a runner that keeps no lease."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RunContext:
        """Raises `CheckpointMissing` when EVERSTEP_RESUME is not `<generation>:<step>`, `LeaseUnusable` for half a
        lease."""
        generation = environment.get("EVERSTEP_GENERATION")
        resume = environment.get("EVERSTEP_RESUME", "")
        return cls(
            job=environment.get("EVERSTEP_JOB", "local"),
            generation=int(generation) if generation else None,
            parent=CheckpointName.parse(resume) if resume else None,
            rank=int(environment.get("RANK", "0")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            checkpoint_directory=_path(environment.get("EVERSTEP_CHECKPOINT_DIR")),
            memory_directory=_path(environment.get(MEMORY_DIRECTORY)),
            socket_path=environment.get("EVERSTEP_SOCKET") or None,
            log_directory=_path(environment.get("EVERSTEP_LOG_DIR")),
            run_directory=_path(environment.get("EVERSTEP_RUN_DIR")),
            beats=environment.get("EVERSTEP_BEATS") == "1",
            lease=LeasePaths.from_environment(environment),
        )


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None
