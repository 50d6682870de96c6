"""Saves that were killed before their manifest was in place: they never count, and `Run` says which it passes by."""

from __future__ import annotations

import re
from pathlib import Path

from everstep.checkpoint.manifest import ASIDE, MANIFEST, CheckpointName

_PLACE = re.compile(rf"generation-(\d+)/(?:{re.escape(ASIDE)})?step-(\d+)(?:-\w+)?")


def unfinished_saves(root: Path, *, after: CheckpointName | None) -> list[CheckpointName]:
    """Names of the checkpoints that were never finished, later than `after`, oldest first. Raises OSError."""
    found = set()
    for directory in [*root.glob(f"generation-*/{ASIDE}step-*"), *root.glob("generation-*/step-*")]:
        match = _PLACE.fullmatch(str(directory.relative_to(root)))
        if match is not None and not (directory / MANIFEST).exists():
            found.add(CheckpointName(generation=int(match[1]), step=int(match[2])))
    return sorted(name for name in found if after is None or name > after)
