"""Does a checkpoint hold what was saved? Every byte is read and hashed again. Standard library only.

The writer calls it in the background after a save, `everstep checkpoint verify` by hand. `reader.py` uses its parts:
sizes of all files, then hashes only of what a rank loads.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from everstep.checkpoint.description import parse_description, whose
from everstep.checkpoint.manifest import MANIFEST, FileEntry, Manifest, rank_file, read_manifest, shard_file
from everstep.checkpoint.plain_files import open_plain, plain_size, read_plain
from everstep.checkpoint.wholeness import check_whole
from everstep.errors import CheckpointDamaged

_BLOCK_BYTES = 4 << 20
_TOLD = 3
"""Faults that an error tells; `examine` lists all."""

FaultKind = Literal["manifest", "size", "unreadable", "hash", "description"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong with a checkpoint: `what` goes on from the file's name.

    kind: found by the manifest, by a file's size, in reading, by a hash, or in what the files say of the state.
    found_sha256: what a block has instead of its hash, so that it can be found where it belongs.
    """

    kind: FaultKind
    file: str
    what: str
    found_sha256: str = ""

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What is wrong with one checkpoint; nothing is if there are no faults. Without a readable manifest it is None."""

    manifest: Manifest | None
    faults: tuple[Fault, ...]


def verify(directory: Path, *, from_storage: bool = False) -> Manifest:
    """Read a whole checkpoint and compare. Raises `CheckpointMissing` or `CheckpointDamaged` with what is wrong.

    from_storage: forget what the kernel has cached of it first, so that the medium is read and not memory.
    """
    manifest = read_manifest(directory)
    faults = list(_faults(directory, manifest, from_storage=from_storage, progress=lambda count: None))
    if faults:
        raise damaged(manifest, directory, faults)
    return manifest


def examine(
    directory: Path, *, from_storage: bool = False, progress: Callable[[int], None] = lambda count: None
) -> Examination:
    """Everything that is wrong with a checkpoint. Raises `CheckpointMissing` where none is there, or no complete one.

    progress: called with the number of bytes after each block that was read.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointDamaged as err:
        return Examination(manifest=None, faults=(Fault(kind="manifest", file=MANIFEST, what=f"is unusable: {err}"),))
    faults = tuple(_faults(directory, manifest, from_storage=from_storage, progress=progress))
    return Examination(manifest=manifest, faults=faults)


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raises `CheckpointDamaged` where a file is missing or has another size: enough for torn and half deleted ones."""
    faults = list(_size_faults(directory, manifest))
    if faults:
        raise damaged(manifest, directory, faults)


def read_rank_file(directory: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """What a rank says of its part, checked by the manifest's hash and for sense. Raises `CheckpointDamaged`."""
    described = _described(directory, manifest, rank)
    if isinstance(described, Fault):
        raise damaged(manifest, directory, [described])
    return described


def damaged(manifest: Manifest, directory: Path, faults: list[Fault]) -> CheckpointDamaged:
    """The error for what is wrong with a checkpoint."""
    told = "; ".join(str(fault) for fault in faults[:_TOLD])
    more = f"; and {len(faults) - _TOLD} more" if len(faults) > _TOLD else ""
    return CheckpointDamaged(
        f"Checkpoint {manifest.name} in {directory}: {told}{more}. Choose another checkpoint and check the storage."
    )


def _faults(
    directory: Path, manifest: Manifest, *, from_storage: bool, progress: Callable[[int], None]
) -> Iterator[Fault]:
    wrong = list(_size_faults(directory, manifest))
    yield from wrong
    if any(fault.kind == "manifest" for fault in wrong):
        return  # it does not say what belongs here
    torn = {fault.file for fault in wrong}
    described: list[dict[str, Any]] = []
    for rank in range(manifest.world_size):
        if rank_file(rank) in torn:
            continue
        part = _described(directory, manifest, rank)
        if isinstance(part, Fault):
            yield part
            continue
        described.append(part)
        if shard_file(rank) not in torn:
            yield from _shard_faults(directory, rank, part["chunks"], from_storage=from_storage, progress=progress)
    if len(described) == manifest.world_size:
        yield from _missing_state(described)


def _size_faults(directory: Path, manifest: Manifest) -> Iterator[Fault]:
    if not manifest.world_size or len(manifest.files) != 2 * manifest.world_size:
        listed = f"lists {len(manifest.files)} files, but {manifest.world_size} ranks have written the checkpoint"
        yield Fault(kind="manifest", file=MANIFEST, what=listed)
        return
    names = {entry.name for entry in manifest.files}
    if names != {name(rank) for rank in range(manifest.world_size) for name in (rank_file, shard_file)}:
        yield Fault(kind="manifest", file=MANIFEST, what="lists other files than the ranks have written")
        return
    for entry in manifest.files:
        try:
            size_bytes = plain_size(directory / entry.name)
        except FileNotFoundError:
            yield Fault(kind="size", file=entry.name, what="is missing")
        except OSError as err:
            yield Fault(kind="unreadable", file=entry.name, what=f"cannot be read ({err.strerror})")
        else:
            if size_bytes != entry.size_bytes:
                has = f"has {size_bytes} bytes, the manifest says {entry.size_bytes}"
                yield Fault(kind="size", file=entry.name, what=has)


def _described(directory: Path, manifest: Manifest, rank: int) -> dict[str, Any] | Fault:
    name = rank_file(rank)
    entry = _entry(manifest, name)
    try:
        content = read_plain(directory / name, limit_bytes=entry.size_bytes)
    except OSError as err:
        return Fault(kind="unreadable", file=name, what=f"cannot be read ({err.strerror})")
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        other = _other_save(content, manifest, rank)
        return Fault(kind="hash", file=name, what=other or "is not what was saved (SHA-256 differs)")
    try:
        return parse_description(content, manifest, rank)
    except ValueError as err:
        return Fault(kind="description", file=name, what=str(err))


def _other_save(content: bytes, manifest: Manifest, rank: int) -> str:
    """In words, where a file with another hash is from, if it says that it is from elsewhere."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(said, dict) or not isinstance(said.get("step"), int):
        return ""
    mine = {
        "generation": manifest.name.generation,
        "step": manifest.name.step,
        "rank": rank,
        "world_size": manifest.world_size,
    }
    return "" if mine.items() <= said.items() else f"is {whose(said)}: two saves are mixed"


def _shard_faults(
    directory: Path, rank: int, chunks: list[Mapping[str, Any]], *, from_storage: bool, progress: Callable[[int], None]
) -> Iterator[Fault]:
    name = shard_file(rank)
    try:
        with open_plain(directory / name) as file:
            if from_storage:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for chunk in chunks:
                found = _hash_next(file, chunk["size_bytes"], progress)
                if found != chunk["sha256"]:
                    what = f"is not what was saved: {chunk['key']} differs"
                    yield Fault(kind="hash", file=name, what=what, found_sha256=found)
    except OSError as err:
        yield Fault(kind="unreadable", file=name, what=f"cannot be read ({err.strerror})")


def _hash_next(file: io.FileIO, size_bytes: int, progress: Callable[[int], None]) -> str:
    digest, left = hashlib.sha256(), size_bytes
    while left and (block := file.read(min(_BLOCK_BYTES, left))):
        digest.update(block)
        left -= len(block)
        progress(len(block))
    return digest.hexdigest()


def _missing_state(described: list[dict[str, Any]]) -> Iterator[Fault]:
    try:
        check_whole(described)
    except ValueError as err:
        yield Fault(kind="description", file="the state", what=f"is not whole: {err}")


def _entry(manifest: Manifest, name: str) -> FileEntry:
    """Once sizes are checked, every rank's files are listed."""
    entry = manifest.file(name)
    if entry is None:
        raise CheckpointDamaged(f"Checkpoint {manifest.name}: its manifest lists no {name}. Choose another checkpoint.")
    return entry
