"""Which checkpoints are kept, and the removal of the others. The writer calls it after each save."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from everstep.checkpoint.manifest import ASIDE, MANIFEST, CheckpointName, Manifest, complete_checkpoints, line_of

KEEP = 10


def choose_expired(
    manifests: Iterable[Manifest], *, generation: int, parent: CheckpointName | None, keep: int = KEEP
) -> list[CheckpointName]:
    """Names of the checkpoints to remove, oldest first.

    The newest `keep` on the line of `generation` stay, and always the one that the run resumed from. What lies off the
    line can never be resumed from again: it stays only as evidence, as long as the line does not fill its place.
    Generations newer than this one are not ours to judge.
    """
    manifests = [m for m in manifests if m.name.generation <= generation]
    line = [m.name for m in line_of(generation, manifests, parent=parent)]
    off_line = sorted(m.name for m in manifests if m.name not in set(line))
    ranked = [*off_line, *line]
    return [name for name in ranked[: max(0, len(ranked) - keep)] if name != parent]


def remove_expired(root: Path, *, generation: int, parent: CheckpointName | None, keep: int = KEEP) -> None:
    """Remove what `choose_expired` names, and what killed saves left behind. Raises OSError."""
    for name in choose_expired(complete_checkpoints(root), generation=generation, parent=parent, keep=keep):
        directory = name.directory(root)
        (directory / MANIFEST).unlink(missing_ok=True)  # first, so that a half removed one does not count
        shutil.rmtree(directory, ignore_errors=True)
    for left_over in root.glob(f"generation-*/{ASIDE}*"):
        if int(left_over.parent.name.removeprefix("generation-")) <= generation:
            shutil.rmtree(left_over, ignore_errors=True)
