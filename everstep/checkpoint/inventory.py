"""What lies in a checkpoint directory: complete ones, unfinished ones, damaged ones, and which of them count.

`everstep checkpoint list` shows it. No byte of the state is read: manifests and sizes tell. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from everstep.checkpoint.lineage import followed_line
from everstep.checkpoint.manifest import ASIDE, CheckpointName, Manifest, read_manifest
from everstep.checkpoint.verify import check_sizes
from everstep.errors import CheckpointDamaged, CheckpointMissing

_GENERATION = re.compile(r"generation-([0-9]{1,18})")
_STEP = re.compile(rf"(?:{re.escape(ASIDE)}step-([0-9]{{1,18}}).*|step-([0-9]{{1,18}}))")


class Condition(StrEnum):
    """COMPLETE: by its manifest and its sizes. UNFINISHED: without a manifest, so it never counted."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    DAMAGED = "damaged"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One directory. `name` is what its place says; `why` is "" for a complete one.

    on_line: whether training went through it; None where nobody can tell. changed_at: Unix seconds.
    """

    name: CheckpointName
    directory: Path
    condition: Condition
    why: str
    manifest: Manifest | None
    size_bytes: int
    changed_at: float
    on_line: bool | None
    pinned: bool


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """`found` by generation and step. `line_problem` says why nobody can tell what is on the line; "" where one can."""

    found: tuple[Found, ...]
    line_problem: str


def take_inventory(root: Path, *, now: float, pinned: Collection[CheckpointName] = ()) -> Inventory:
    """Everything under `root` that is, was, or is about to be a checkpoint. `now`: Unix seconds."""
    line, line_problem = followed(root)
    found = []
    for name, directory in _directories(root):
        one = _look(name, directory, line=line, pinned=pinned, now=now)
        if one is not None:
            found.append(one)
    return Inventory(found=tuple(found), line_problem=line_problem)


def followed(root: Path) -> tuple[frozenset[CheckpointName] | None, str]:
    """Names on the line of training, and ""; or None and why nobody can tell."""
    try:
        return frozenset(manifest.name for manifest in followed_line(root)), ""
    except (CheckpointDamaged, CheckpointMissing) as err:
        return None, str(err)


def _directories(root: Path) -> Iterator[tuple[CheckpointName, Path]]:
    places = []
    for parent in root.iterdir():
        generation = _GENERATION.fullmatch(parent.name)
        if generation is None or not parent.is_dir():
            continue
        for directory in parent.iterdir():
            step = _STEP.fullmatch(directory.name)
            if step is not None:
                places.append((CheckpointName(generation=int(generation[1]), step=int(step[1] or step[2])), directory))
    yield from sorted(places)


def _look(
    name: CheckpointName,
    directory: Path,
    *,
    line: frozenset[CheckpointName] | None,
    pinned: Collection[CheckpointName],
    now: float,
) -> Found | None:
    """None where it went away meanwhile."""
    manifest, condition, why = None, Condition.COMPLETE, ""
    sizes, changed_at = _on_disk(directory)
    try:
        manifest = read_manifest(directory)
        check_sizes(directory, manifest)
    except CheckpointMissing:
        if not directory.exists():
            return None
        condition, why = Condition.UNFINISHED, _unfinished(directory, quiet_s=max(0.0, now - changed_at))
    except CheckpointDamaged as err:
        condition, why = Condition.DAMAGED, str(err)
    counts = manifest is not None and line is not None
    return Found(
        name=name,
        directory=directory,
        condition=condition,
        why=why,
        manifest=manifest,
        size_bytes=manifest.size_bytes if manifest and condition is Condition.COMPLETE else sizes,
        changed_at=manifest.created_at if manifest else changed_at,
        on_line=name in line if counts and line is not None else None,
        pinned=name in pinned,
    )


def _unfinished(directory: Path, *, quiet_s: float) -> str:
    if directory.name.startswith(ASIDE):
        return f"being written, or left half written: nothing has changed in {directory.name} for {quiet_s:.0f} s"
    return f"it has no manifest: its save or its removal was cut off, {quiet_s:.0f} s ago or more"


def _on_disk(directory: Path) -> tuple[int, float]:
    """Bytes of the files, and when the newest of them changed."""
    sizes, changed_at = 0, 0.0
    try:
        for path in [directory, *directory.iterdir()]:
            found = path.lstat()
            changed_at = max(changed_at, found.st_mtime)
            sizes += 0 if path == directory else found.st_size
    except OSError:
        return sizes, changed_at
    return sizes, changed_at
