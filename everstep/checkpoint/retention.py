"""Which checkpoints are kept, and the removal of the others. The writer calls it after each save."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from everstep.checkpoint.left_overs import left_over_directories
from everstep.checkpoint.lineage import Parents, line_of, recorded_parents
from everstep.checkpoint.manifest import MANIFEST, CheckpointName, Manifest, complete_checkpoints
from everstep.errors import CheckpointMissing

KEEP = 10
PINNED = "pinned.json"
"""In the run's directory (EVERSTEP_RUN_DIR), written by the agent: what the server has found worth keeping."""


def choose_expired(
    manifests: Iterable[Manifest],
    *,
    generation: int,
    parent: CheckpointName | None,
    keep: int = KEEP,
    pinned: Collection[CheckpointName] = (),
    parents: Parents | None = None,
) -> list[CheckpointName]:
    """Names of the checkpoints to remove, oldest first.

    The newest `keep` on the line of `generation` stay, and always the one that the run resumed from. What lies off the
    line can never be resumed from again: it stays only as evidence, as long as the line does not fill its place.
    What is `pinned` stays whatever its age: the newest ones may turn out bad, and it may be the last good copy.
    Generations newer than this one are not ours to judge. `parents` as for `line_of`.
    """
    manifests = [m for m in manifests if m.name.generation <= generation]
    line = [m.name for m in line_of(generation, manifests, parent=parent, parents=parents)]
    off_line = sorted(m.name for m in manifests if m.name not in set(line))
    ranked = [*off_line, *line]
    return [name for name in ranked[: max(0, len(ranked) - keep)] if name != parent and name not in pinned]


def remove_expired(root: Path, *, generation: int, parent: CheckpointName | None, keep: int = KEEP) -> None:
    """Remove what `choose_expired` names, and what killed saves left behind. Raises OSError."""
    pinned = pinned_by_server(os.environ.get("EVERSTEP_RUN_DIR"))
    complete, parents = complete_checkpoints(root), recorded_parents(root)
    for name in choose_expired(
        complete, generation=generation, parent=parent, keep=keep, pinned=pinned, parents=parents
    ):
        directory = name.directory(root)
        (directory / MANIFEST).unlink(missing_ok=True)  # first, so that a half removed one does not count
        shutil.rmtree(directory, ignore_errors=True)
    for name, left_over in left_over_directories(root):
        if name.generation <= generation:
            shutil.rmtree(left_over, ignore_errors=True)


def pinned_by_server(run_directory: str | None) -> frozenset[CheckpointName]:
    """What may not be removed by the word of the server; nothing where there is none, or where it cannot be read."""
    if not run_directory:
        return frozenset()
    pinned = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for text in json.loads((Path(run_directory) / PINNED).read_bytes())["keep"]:
            with contextlib.suppress(CheckpointMissing):
                pinned.add(CheckpointName.parse(text))
    return frozenset(pinned)
