"""A checkpoint's manifest and where checkpoints lie: the last file written, and what makes a directory count.

    <checkpoint directory>/generation-00001/lineage.json
    <checkpoint directory>/generation-00001/step-00000060/{manifest.json, rank-00000.json, shard-00000.bin}

A shard holds the bytes of the tensors that one rank wrote, one after the other; the rank's own file says what lies
where in it, with a SHA-256 each, and holds whatever is no tensor. The manifest holds the SHA-256 of each rank's file,
so that it vouches for every byte. Manifests carry their lineage (the checkpoint that their generation resumed from),
so that the line which training really followed can be told from a ghost's writing without any database.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep.errors import CheckpointDamaged, CheckpointMissing

FORMAT = 2
MANIFEST = "manifest.json"
LINEAGE = "lineage.json"
ASIDE = ".writing-"
"""Prefix of directories that are being written, or that a killed save left behind."""
_NAME = re.compile(r"generation-(\d{5,})/step-(\d{8,})")


@dataclass(frozen=True, kw_only=True, order=True)
class CheckpointName:
    """Which checkpoint: steps are those done when it was taken."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"{self.generation}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """From `<generation>:<step>`, as in EVERSTEP_RESUME. Raises `CheckpointMissing` for anything else."""
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None:
            raise CheckpointMissing(f"Cannot resume from {text!r}: say <generation>:<step>, like 1:60.")
        return cls(generation=int(match[1]), step=int(match[2]))

    def directory(self, root: Path) -> Path:
        return root / f"generation-{self.generation:05d}" / f"step-{self.step:08d}"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """`sha256` is None for a shard: the hashes of its tensors stand in the file of the rank that wrote it."""

    name: str
    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a whole checkpoint consists of."""

    name: CheckpointName
    parent: CheckpointName | None
    job: str
    total_steps: int
    world_size: int
    created_at: float
    torch_version: str
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)


def rank_file(rank: int) -> str:
    """Name of the file that describes what one rank wrote."""
    return f"rank-{rank:05d}.json"


def shard_file(rank: int) -> str:
    """Name of the file with the bytes of the tensors that one rank wrote."""
    return f"shard-{rank:05d}.bin"


def write_manifest(directory: Path, manifest: Manifest, *, may_publish: Callable[[], None]) -> None:
    """Make the directory a checkpoint: written aside, synced, renamed, and the directory synced. Raises OSError.

    may_publish: called between all the slow work and the rename.
    """
    body = {
        "format": FORMAT,
        "generation": manifest.name.generation,
        "step": manifest.name.step,
        "parent": asdict(manifest.parent) if manifest.parent else None,
        "job": manifest.job,
        "total_steps": manifest.total_steps,
        "world_size": manifest.world_size,
        "created_at": manifest.created_at,
        "torch_version": manifest.torch_version,
        "size_bytes": manifest.size_bytes,
        "files": [asdict(entry) for entry in manifest.files],
    }
    text = json.dumps({**body, "self_sha256": _self_hash(body)}, indent=1)
    aside = directory / (MANIFEST + ".tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    may_publish()
    aside.rename(directory / MANIFEST)
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises `CheckpointMissing` where there is none (never written, or not finished), `CheckpointDamaged` where it is
    not whole.
    """
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        claimed = body.pop("self_sha256")
        if body.get("format") != FORMAT:
            raise CheckpointDamaged(f"{path}: format {body.get('format')!r}; this release reads format {FORMAT}.")
        if _self_hash(body) != claimed:
            raise CheckpointDamaged(f"{path}: the manifest is not what was written. Choose another checkpoint.")
        parent = body["parent"]
        return Manifest(
            name=CheckpointName(generation=body["generation"], step=body["step"]),
            parent=CheckpointName(**parent) if parent else None,
            job=body["job"],
            total_steps=body["total_steps"],
            world_size=body["world_size"],
            created_at=body["created_at"],
            torch_version=body["torch_version"],
            files=tuple(FileEntry(**entry) for entry in body["files"]),
        )
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CheckpointMissing(
            f"There is no complete checkpoint at {directory}: it has no {MANIFEST}. Choose another one."
        ) from err
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointDamaged(f"{path} cannot be read: {err}. Choose another checkpoint.") from err


def complete_checkpoints(root: Path) -> list[Manifest]:
    """Every checkpoint under `root` with a readable manifest, oldest first."""
    found = []
    for path in sorted(root.glob(f"generation-*/step-*/{MANIFEST}")):
        match = _NAME.fullmatch(str(path.parent.relative_to(root)))
        if match is None:
            continue
        try:
            manifest = read_manifest(path.parent)
        except (CheckpointDamaged, CheckpointMissing):
            continue
        if manifest.name == CheckpointName(generation=int(match[1]), step=int(match[2])):
            found.append(manifest)
    return sorted(found, key=lambda manifest: manifest.name)


def line_of(
    head_generation: int,
    manifests: Iterable[Manifest],
    *,
    parent: CheckpointName | None,
    recorded: Mapping[int, CheckpointName | None] = {},
) -> list[Manifest]:
    """The checkpoints that training which is now in `head_generation` really went through, oldest first.

    `parent` is what that generation resumed from; `recorded` is what others did, of which no checkpoint may be left:
    they may have kept theirs in memory alone. A generation contributes its checkpoints up to the one that the next
    generation resumed from; later ones, and whole generations that nobody resumed from, are off the line.
    """
    by_generation: dict[int, list[Manifest]] = {}
    for manifest in manifests:
        by_generation.setdefault(manifest.name.generation, []).append(manifest)
    line = list(by_generation.get(head_generation, []))
    generation = head_generation
    while parent is not None and parent.generation < generation:
        generation, last_step = parent.generation, parent.step
        members = [m for m in by_generation.get(generation, []) if m.name.step <= last_step]
        line += members
        parent = members[-1].parent if members else recorded.get(generation)
    return sorted(line, key=lambda manifest: manifest.name)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What a generation resumed from. The token is drawn at its start, and tells it from another of the same number."""

    parent: CheckpointName | None
    token: str


def record_lineage(root: Path, generation: int, *, parent: CheckpointName | None) -> Lineage:
    """Note what a generation resumed from before it has saved anything, so that its line is known from the start."""
    lineage = Lineage(parent=parent, token=secrets.token_hex(4))
    directory = root / f"generation-{generation:05d}"
    directory.mkdir(parents=True, exist_ok=True)
    aside = directory / (LINEAGE + ".tmp")
    aside.write_text(json.dumps({"parent": asdict(parent) if parent else None, "token": lineage.token}))
    aside.rename(directory / LINEAGE)
    return lineage


def read_lineage(root: Path, generation: int) -> Lineage | None:
    """What `record_lineage` noted; None where it noted nothing that can be read."""
    try:
        said = json.loads((root / f"generation-{generation:05d}" / LINEAGE).read_bytes())
        parent = CheckpointName(**said["parent"]) if said["parent"] else None
        return Lineage(parent=parent, token=str(said.get("token", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def newest_checkpoint(root: Path, *, in_memory: Iterable[CheckpointName] = ()) -> CheckpointName | None:
    """Where a run without a plan goes on: the newest checkpoint on the line of the newest generation.

    A generation that saved nothing goes on from its own parent, not from what another one wrote meanwhile, and where
    that parent was in memory and is gone, from what is older. `in_memory` are whole snapshots there.
    """
    there = {manifest.name for manifest in complete_checkpoints(root)} | set(in_memory)
    before: CheckpointName | None = None
    for generation in range(newest_generation(root), 0, -1):
        if before is not None and generation > before.generation:
            continue
        own = [name for name in there if name.generation == generation and (before is None or name <= before)]
        if own:
            return max(own)
        lineage = read_lineage(root, generation)
        if lineage is None:
            continue
        if lineage.parent is None:
            return None
        if lineage.parent in there:
            return lineage.parent
        before = lineage.parent
    return None


def newest_generation(root: Path) -> int:
    """The highest generation that has a directory under `root`; 0 if none."""
    names = (re.fullmatch(r"generation-(\d{5,})", path.name) for path in root.glob("generation-*"))
    return max((int(match[1]) for match in names if match), default=0)


def sync_directory(path: Path) -> None:
    """A rename is durable only when its directory has been synced."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _self_hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
