"""Saves that were killed before their manifest was in place: they never count.

`Run` says which ones it passes by, retention removes them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from everstep.checkpoint.manifest import ASIDE, MANIFEST, CheckpointName

_PLACE = re.compile(rf"generation-([0-9]{{1,18}})/(?:{re.escape(ASIDE)})?step-([0-9]{{1,18}})(?:-\w+)?")


def left_over_directories(root: Path) -> list[tuple[CheckpointName, Path]]:
    """Directories without a manifest, by the checkpoint that they were to become. One of them may be under way.

    Written aside, or renamed and never given a manifest. Raises OSError.
    """
    found = []
    for directory in [*root.glob(f"generation-*/{ASIDE}step-*"), *root.glob("generation-*/step-*")]:
        match = _PLACE.fullmatch(str(directory.relative_to(root)))
        if match is not None and not os.path.lexists(directory / MANIFEST):
            found.append((CheckpointName(generation=int(match[1]), step=int(match[2])), directory))
    return found


def unfinished_saves(root: Path, *, after: CheckpointName | None) -> list[CheckpointName]:
    """Names of the checkpoints that were never finished, later than `after`, oldest first. Raises OSError."""
    return sorted({name for name, _ in left_over_directories(root) if after is None or name > after})
