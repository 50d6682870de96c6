"""Whose checkpoints a directory holds: two jobs that share one would number their generations alike and mix them up."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint.manifest import Manifest, complete_checkpoints


def foreign_owner(root: Path, job: str) -> str:
    """Another job that has checkpoints under `root`; "" where there is none. Raises OSError."""
    return next((manifest.job for manifest in complete_checkpoints(root) if manifest.job != job), "")


def not_ours(manifest: Manifest, job: str) -> str:
    """Why this job does not resume from a checkpoint; "" where it is its own."""
    if manifest.job == job:
        return ""
    return (
        f"Checkpoint {manifest.name} was saved by job {manifest.job}, not by {job}: the two share a directory. "
        "Give each job a checkpoint directory of its own."
    )
