"""The environment of runner and ranks, built fresh: a few names of the node's, the job's own, and Everstep's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agents.policy import Account
from agents.protocol.messages import LaunchSpec
from agents.supervisor.lease import LeaseFiles
from agents.supervisor.process_table import MARK_VARIABLE

_FROM_NODE = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Everything else of the agent's environment stays with the agent, its join token first of all."""


def base_environment(launch: LaunchSpec, *, account: Account, node: Mapping[str, str]) -> dict[str, str]:
    """What the job's interpreter starts with, before Everstep adds its own."""
    kept = {name: node[name] for name in _FROM_NODE if name in node}
    person = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", **kept, **person, **launch.environment}


def rank_environment(
    base: Mapping[str, str],
    launch: LaunchSpec,
    *,
    job: str,
    generation: int,
    plan_id: str,
    mark: str,
    socket: Path,
    run_directory: Path,
    log_directory: Path,
    memory: Path,
    lease: LeaseFiles | None,
) -> dict[str, str]:
    """All that the runner and every rank of it find; what is a rank's own, the runner adds."""
    resume = "" if launch.parent_generation is None else f"{launch.parent_generation}:{launch.parent_step}"
    return {
        **base,
        "EVERSTEP_JOB": job,
        "EVERSTEP_GENERATION": str(generation),
        "EVERSTEP_PLAN": plan_id,
        "EVERSTEP_SOCKET": str(socket),
        "EVERSTEP_CHECKPOINT_DIR": launch.checkpoint_directory,
        "EVERSTEP_RESUME": resume,
        "EVERSTEP_RUN_DIR": str(run_directory),
        "EVERSTEP_LOG_DIR": str(log_directory),
        "EVERSTEP_MEMORY_DIR": str(memory),
        MARK_VARIABLE: mark,
        **({} if lease is None else _lease_environment(lease)),
    }


def _lease_environment(lease: LeaseFiles) -> dict[str, str]:
    return {
        "EVERSTEP_CONTACT": str(lease.contact),
        "EVERSTEP_PROGRESS": str(lease.progress),
        "EVERSTEP_LEASE": str(lease.terms),
    }


def mark_of(job: str, generation: int, plan_id: str, *, node: str) -> str:
    """What tells the processes of one generation on one node from all others.

    The node's name is part of it, since several agents may share a machine: none may kill another's ranks.
    """
    return f"{job}:{generation}:{plan_id}:{node}"
