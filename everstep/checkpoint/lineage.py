"""The line that training really followed, through all its generations: what is off it is never resumed from.

`Run` asks where a run without a plan goes on; retention and `everstep checkpoint` ask what is on the line.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from everstep.checkpoint.manifest import CheckpointName, Manifest, complete_checkpoints, name_of
from everstep.checkpoint.sealed import put_sealed, read_sealed, sync_directory
from everstep.errors import CheckpointDamaged, CheckpointMissing

LINEAGE = "lineage.json"

Parents = Mapping[int, CheckpointName | None]
"""What generations resumed from, by number; None where training began anew."""


def line_of(
    head_generation: int,
    manifests: Iterable[Manifest],
    *,
    parent: CheckpointName | None,
    parents: Parents | None = None,
) -> list[Manifest]:
    """The checkpoints that training which is now in `head_generation` really went through, oldest first.

    `parent` is what that generation resumed from. A generation contributes its checkpoints up to the one that the next
    generation resumed from; later ones, and whole generations that nobody resumed from, are off the line. `parents`
    leads on where a generation on the line has no checkpoint left that would.
    """
    by_generation: dict[int, list[Manifest]] = {}
    for manifest in manifests:
        by_generation.setdefault(manifest.name.generation, []).append(manifest)
    line = list(by_generation.get(head_generation, []))
    generation = head_generation
    while parent is not None and parent.generation < generation:
        generation, last_step = parent.generation, parent.step
        members = by_generation.get(generation, [])
        line += [m for m in members if m.name.step <= last_step]
        parent = members[0].parent if members else (parents or {}).get(generation)
    return sorted(line, key=lambda manifest: manifest.name)


def followed_line(root: Path) -> list[Manifest]:
    """The checkpoints that training under `root` went through until now, oldest first.

    A generation that saved nothing stands where its own parent does, not where another one wrote meanwhile. Raises
    `CheckpointDamaged` where the note of what it resumed from cannot be read.
    """
    complete = complete_checkpoints(root)
    for generation in range(newest_generation(root), 0, -1):
        own = [manifest for manifest in complete if manifest.name.generation == generation]
        if own:
            return line_of(generation, complete, parent=own[-1].parent, parents=recorded_parents(root))
        if not os.path.lexists(_lineage_path(root, generation)):
            continue  # it was killed before it could note what it resumes from, so it has trained nothing
        parent = read_lineage(root, generation)
        line = line_of(generation, complete, parent=parent, parents=recorded_parents(root))
        if parent is not None and not line:
            raise CheckpointMissing(
                f"Generation {generation} in {root} went on from checkpoint {parent}, and neither that nor any before "
                "it is complete. Bring one back, or begin anew in another directory."
            )
        return line
    return []


def newest_checkpoint(root: Path) -> Manifest | None:
    """Where a run without a plan goes on: the newest checkpoint on the line of the newest generation; None at first.

    Raises `CheckpointDamaged` or `CheckpointMissing` where that cannot be told or is not there any more.
    """
    line = followed_line(root)
    return line[-1] if line else None


def newest_snapshot(root: Path, in_memory: Collection[CheckpointName]) -> CheckpointName | None:
    """The same, where the nodes' memory may hold something newer than the disk: `in_memory` are whole snapshots there.

    A generation that has nothing on disk goes on from what it kept in memory, or from its parent there.
    """
    complete = complete_checkpoints(root)
    for generation in range(newest_generation(root), 0, -1):
        kept = max((name for name in in_memory if name.generation == generation), default=None)
        saved = max((m.name for m in complete if m.name.generation == generation), default=None)
        if kept is not None and (saved is None or saved < kept):
            return kept
        if saved is not None:
            return saved
        if os.path.lexists(_lineage_path(root, generation)):
            parent = read_lineage(root, generation)
            if parent in in_memory:
                return parent
            break
    newest = newest_checkpoint(root)
    return newest.name if newest else None


def record_lineage(root: Path, generation: int, *, parent: CheckpointName | None) -> str:
    """Note what a generation resumed from before it has saved anything, so that its line is known from the start.

    Returns a token that is drawn anew each time: it tells the generation from another one of the same number.
    """
    path = _lineage_path(root, generation)
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    put_sealed(path, {"parent": asdict(parent) if parent else None, "token": token})
    sync_directory(root)
    return token


def read_lineage(root: Path, generation: int) -> CheckpointName | None:
    """What a generation resumed from, by its own note; None where it began anew. Raises `CheckpointDamaged`."""
    path = _lineage_path(root, generation)
    try:
        parent = read_sealed(path)["parent"]
        return None if parent is None else name_of(parent)
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise CheckpointDamaged(
            f"{path} cannot be read ({err}), so nobody can tell where generation {generation} went on from. "
            "Say which checkpoint to resume from: EVERSTEP_RESUME=<generation>:<step>."
        ) from err


def lineage_token(root: Path, generation: int) -> str:
    """The token that `record_lineage` returned; "" where it noted none that can be read."""
    try:
        return str(read_sealed(_lineage_path(root, generation)).get("token", ""))
    except (OSError, ValueError):
        return ""


def recorded_parents(root: Path) -> dict[int, CheckpointName | None]:
    """What each generation under `root` resumed from, as far as their notes can be read."""
    found = {}
    for generation in range(1, newest_generation(root) + 1):
        with contextlib.suppress(CheckpointDamaged):
            found[generation] = read_lineage(root, generation)
    return found


def damaged_notes(root: Path) -> list[str]:
    """What is wrong with the notes of the generations under `root`, in sentences."""
    problems = []
    for generation in range(1, newest_generation(root) + 1):
        if os.path.lexists(_lineage_path(root, generation)):
            try:
                read_lineage(root, generation)
            except CheckpointDamaged as err:
                problems.append(str(err))
    return problems


def newest_generation(root: Path) -> int:
    """The highest generation that has a directory under `root`; 0 if none."""
    names = (re.fullmatch(r"generation-(\d{5,})", path.name) for path in root.glob("generation-*"))
    return max((int(match[1]) for match in names if match), default=0)


def _lineage_path(root: Path, generation: int) -> Path:
    return root / f"generation-{generation:05d}" / LINEAGE
