"""The memory tier's files: what each rank keeps of its state in tmpfs, where it outlives the rank.

    <memory root>/rank-00003-<token>/generation-00001/step-00000060/{manifest.json, rank-00003.json, shard-00003.bin}
    <memory root>/copy-00003-<token>/generation-00001/...   the same, held for another node's rank

The files are those of a checkpoint on disk; each rank's part has a manifest of its own and counts by itself, and only
at a resume, when ranks look together, does it show whether the parts that all nodes hold are a whole. The token is that
of the generation's lineage file: what was kept for an earlier training in the same place never matches.

The node's writer calls `keep_part`, `Run` the rest. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint.manifest import (
    ASIDE,
    MANIFEST,
    CheckpointName,
    Manifest,
    read_manifest,
    write_manifest,
)
from everstep.checkpoint.shards import Pace, Part, write_part
from everstep.errors import CheckpointDamaged, CheckpointMissing, SaveFailed

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the root below it belongs to one user and is closed to others
_PLACE = re.compile(r"(rank|copy)-(\d{5,})-([0-9a-f]+)")


@dataclass(frozen=True, kw_only=True, order=True)
class Held:
    """One rank's part of a snapshot in one node's memory. `copied`: a node holds it for another one's rank."""

    name: CheckpointName
    token: str
    world_size: int
    rank: int
    copied: bool

    def directory(self, root: Path) -> Path:
        return self.name.directory(root / f"{'copy' if self.copied else 'rank'}-{self.rank:05d}-{self.token}")


def default_root(job: str, checkpoint_directory: Path) -> Path:
    """Where a run keeps its snapshots that no agent gave a place: its own for each user, job and directory."""
    place = hashlib.sha256(str(checkpoint_directory.absolute()).encode()).hexdigest()[:12]
    return SHARED_MEMORY / f"everstep-{os.getuid()}" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', job)}-{place}"


def prepare_root(root: Path) -> None:
    """Make the directory, for this user alone. Raises `SaveFailed` where it or the one above is somebody else's."""
    for directory in (root.parent, root):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
        except OSError as err:
            raise SaveFailed(f"{directory} cannot be made: {err}") from err
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if directory == root and not ours:
            raise SaveFailed(f"{directory} is not a directory of user {os.getuid()}: remove it")
        if not ours and found.st_uid and not found.st_mode & stat.S_ISVTX:
            raise SaveFailed(f"{directory} is not a directory of user {os.getuid()}: remove it, or say another place")


def keep_part(
    piece: Held,
    root: Path,
    part: Part,
    memory: memoryview,
    *,
    described: dict[str, Any],
    may_publish: Callable[[], None],
) -> int:
    """Write a rank's part, then let it count; returns its bytes. `described` completes the manifest. Raises OSError."""
    final = piece.directory(root)
    aside = final.with_name(f"{ASIDE}{final.name}-{uuid.uuid4().hex[:8]}")
    aside.mkdir(mode=0o700, parents=True)
    try:
        entries = write_part(aside, part, memory, Pace(None))
        manifest = Manifest(
            name=piece.name,
            world_size=piece.world_size,
            created_at=time.time(),
            files=tuple(sorted(entries, key=lambda entry: entry.name)),
            **described,
        )
        write_manifest(aside, manifest, may_publish=may_publish)
        put_in_place(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return manifest.size_bytes


def put_in_place(aside: Path, final: Path) -> None:
    """Let a finished directory count instead of one that was there. Raises OSError."""
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)


def held_in(root: Path) -> list[Held]:
    """Every part that counts under `root`."""
    found = []
    for path in root.glob(f"*/generation-*/step-*/{MANIFEST}"):
        place = _PLACE.fullmatch(path.parts[-4])
        try:
            manifest = read_manifest(path.parent)
        except (CheckpointDamaged, CheckpointMissing):
            continue
        if place is not None and _sizes_fit(path.parent, manifest):
            found.append(
                Held(
                    name=manifest.name,
                    token=place[3],
                    world_size=manifest.world_size,
                    rank=int(place[2]),
                    copied=place[1] == "copy",
                )
            )
    return sorted(found)


def _sizes_fit(directory: Path, manifest: Manifest) -> bool:
    """A part that is torn is none: perhaps another node holds a copy of it."""
    try:
        return all((directory / entry.name).stat().st_size == entry.size_bytes for entry in manifest.files)
    except OSError:
        return False


def whole_snapshots(held: Iterable[Held]) -> dict[CheckpointName, str]:
    """The snapshots of which some node holds every rank's part, with their tokens."""
    ranks: dict[tuple[CheckpointName, str, int], set[int]] = defaultdict(set)
    for piece in held:
        ranks[piece.name, piece.token, piece.world_size].add(piece.rank)
    return {name: token for (name, token, world_size), found in ranks.items() if found == set(range(world_size))}


def keep_only(
    root: Path,
    keep: Collection[tuple[CheckpointName, str]],
    *,
    token: str,
    ranks: Collection[int],
    flushed: CheckpointName | None = None,
) -> None:
    """Remove every snapshot under `root` but those in `keep` (with their tokens). What is gone already is no error.

    Of the parts of this `token`, only those of `ranks`: what others are writing at this moment is theirs to remove.
    flushed: the one that is on its way to disk; a rank's own part of it stays, and copies of others' parts go.
    """
    for place in root.glob("*"):
        named = _PLACE.fullmatch(place.name)
        if named is None or (named[3] == token and int(named[2]) not in ranks):
            continue
        kept = {name.directory(place) for name, its_token in keep if its_token == named[3]}
        if flushed is not None and named[3] == token and named[1] == "rank":
            kept.add(flushed.directory(place))
        if not kept:
            shutil.rmtree(place, ignore_errors=True)
        for directory in place.glob("generation-*/*"):
            if directory not in kept:
                shutil.rmtree(directory, ignore_errors=True)


def forget(root: Path) -> None:
    """Remove all that is kept under `root`."""
    shutil.rmtree(root, ignore_errors=True)
    if root.parent.name.startswith("everstep-"):
        with contextlib.suppress(OSError):
            root.parent.rmdir()


def used_bytes(root: Path) -> int:
    """Memory that the files under `root` take now."""
    total = 0
    for path in root.glob("*/generation-*/*/*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total
