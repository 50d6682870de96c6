"""A checkpoint's manifest and where checkpoints lie: the last file written, and what makes a directory count.

    <checkpoint directory>/generation-00001/lineage.json
    <checkpoint directory>/generation-00001/step-00000060/{manifest.json, rank-00000.json, shard-00000.bin}

A shard holds the bytes of the tensors that one rank wrote, one after the other; the rank's own file says what lies
where in it, with a SHA-256 each, and holds whatever is no tensor. The manifest holds the SHA-256 of each rank's file,
so that it vouches for every byte. Manifests carry their lineage (the checkpoint that their generation resumed from),
so that the line which training really followed can be told from a ghost's writing without any database.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint.sealed import FORMAT, put_sealed, read_sealed
from everstep.errors import CheckpointDamaged, CheckpointMissing

MANIFEST = "manifest.json"
ASIDE = ".writing-"
"""Prefix of directories that are being written, or that a killed save left behind."""
_LATEST_S = 1e12
"""No moment lies so far behind the epoch."""


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
        match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
        if match is None:
            raise CheckpointMissing(f"Cannot resume from {text!r}: say <generation>:<step>, like 1:60.")
        return cls(generation=int(match[1]), step=int(match[2]))

    @classmethod
    def of_place(cls, directory: Path) -> CheckpointName | None:
        """The checkpoint that a directory is for, by its last two names; None if it is none's."""
        match = re.fullmatch(r"generation-([0-9]{1,18})/step-([0-9]{1,18})", "/".join(directory.absolute().parts[-2:]))
        return None if match is None else cls(generation=int(match[1]), step=int(match[2]))

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
    put_sealed(directory / MANIFEST, body, may_put=may_publish)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises `CheckpointMissing` where there is none (never written, or not finished), `CheckpointDamaged` where it is
    not whole, or is that of a checkpoint with another name.
    """
    path = directory / MANIFEST
    try:
        manifest = _manifest_of(read_sealed(path))
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CheckpointMissing(
            f"There is no complete checkpoint at {directory}: it has no {MANIFEST}. Choose another one."
        ) from err
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise CheckpointDamaged(f"{path} cannot be read: {err}. Choose another checkpoint.") from err
    belongs = manifest.name.directory(Path())
    if directory.absolute().parts[-2:] != belongs.parts:
        raise CheckpointDamaged(
            f"{directory} holds checkpoint {manifest.name}, which belongs into {belongs}: it was renamed, or copied "
            "from there. Choose another checkpoint."
        )
    return manifest


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    """Raises ValueError, KeyError or TypeError for what no manifest says."""
    created_at, torch_version, job = body["created_at"], body["torch_version"], body["job"]
    if not isinstance(created_at, int | float) or not 0 <= created_at < _LATEST_S:
        raise ValueError(f"it was written at {created_at!r}, which is no moment")
    if not isinstance(torch_version, str) or not isinstance(job, str):
        raise ValueError("its job or its torch version is no text")
    return Manifest(
        name=name_of({field: body[field] for field in ("generation", "step")}),
        parent=None if body["parent"] is None else name_of(body["parent"]),
        job=job,
        total_steps=_count(body["total_steps"]),
        world_size=_count(body["world_size"]),
        created_at=created_at,
        torch_version=torch_version,
        files=tuple(_entry_of(entry) for entry in body["files"]),
    )


def name_of(said: Mapping[str, Any]) -> CheckpointName:
    """From a JSON object. Raises TypeError or ValueError where it names no checkpoint."""
    name = CheckpointName(**said)
    return CheckpointName(generation=_count(name.generation), step=_count(name.step))


def _entry_of(said: Mapping[str, Any]) -> FileEntry:
    entry = FileEntry(**said)
    if not isinstance(entry.name, str) or not isinstance(entry.sha256, str | None):
        raise ValueError("a file in it has no name, or a hash that is none")
    return FileEntry(name=entry.name, size_bytes=_count(entry.size_bytes), sha256=entry.sha256)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"it says {value!r} where a count belongs")
    return value


def complete_checkpoints(root: Path) -> list[Manifest]:
    """Every checkpoint under `root` with a readable manifest, oldest first."""
    found = []
    for path in root.glob(f"generation-*/step-*/{MANIFEST}"):
        try:
            found.append(read_manifest(path.parent))
        except (CheckpointDamaged, CheckpointMissing):
            continue
    return sorted(found, key=lambda manifest: manifest.name)
