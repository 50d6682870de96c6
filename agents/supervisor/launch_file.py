"""`launch.json`: what a runner starts, in the newest form that both its release and the agent's know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.errors import CheckFailed
from agents.protocol.messages import LaunchSpec
from agents.supervisor.lease import LeaseFiles

RUNNER_PROTOCOLS = range(1, 3)
"""Forms of `launch.json` that this agent writes."""
LEASE_PROTOCOL = 2
"""From this one on, the runner keeps a lease."""


def choose_protocol(theirs: range, *, interpreter: str) -> int:
    """Return the newest form that both sides know. Raises `CheckFailed` with reason `runner` if there is none."""
    common = set(theirs) & set(RUNNER_PROTOCOLS)
    if not common:
        said = f"protocols {theirs[0]} to {theirs[-1]}" if theirs else "no protocol known here"
        raise CheckFailed(
            f"The runner of {interpreter} speaks {said}; this agent speaks {RUNNER_PROTOCOLS[0]} to "
            f"{RUNNER_PROTOCOLS[-1]}. Install an everstep of the agent's release there.",
            reason="runner",
        )
    return max(common)


def launch_file(
    launch: LaunchSpec,
    *,
    protocol: int,
    job: str,
    generation: int,
    plan_id: str,
    argv: Sequence[str],
    environment: dict[str, str],
    socket: Path,
    mark: str,
    log_directory: Path,
    cgroup: Path | None,
    lease: LeaseFiles | None,
) -> dict[str, Any]:
    """The content of the file. Paths are absolute; without a lease, or before leases, there are none of its."""
    content = {
        "protocol": protocol,
        "job": job,
        "generation": generation,
        "plan_id": plan_id,
        "argv": list(argv),
        "working_directory": launch.working_directory,
        "environment": environment,
        "run_id": launch.run_id,
        "node_rank": launch.node_rank,
        "node_count": launch.node_count,
        "ranks_per_node": launch.ranks_per_node,
        "first_rank": launch.first_rank,
        "world_size": launch.world_size,
        "master_address": launch.master_address,
        "master_port": launch.master_port,
        "checkpoint_directory": launch.checkpoint_directory,
        "parent_generation": launch.parent_generation,
        "parent_step": launch.parent_step,
        "socket": str(socket),
        "mark": mark,
        "stop_limit_s": launch.stop_limit_s,
        "log_directory": str(log_directory),
        "cgroup": None if cgroup is None else str(cgroup),
    }
    if protocol < LEASE_PROTOCOL:
        return content
    return {
        **content,
        "contact": None if lease is None else str(lease.contact),
        "progress": None if lease is None else str(lease.progress),
        "lease": None if lease is None else str(lease.terms),
    }
