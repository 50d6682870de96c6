"""Does a checkpoint hold what was saved? Every byte is read and hashed again. Standard library only.

The writer calls it in the background after a save, `everstep checkpoint verify` by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.checkpoint.manifest import FORMAT, FileEntry, Manifest, rank_file, read_manifest, shard_file
from everstep.errors import CheckpointDamaged

_BLOCK_BYTES = 4 << 20


def verify(directory: Path, *, from_storage: bool = False) -> Manifest:
    """Read a whole checkpoint and compare. Raises `CheckpointMissing` or `CheckpointDamaged` with what is wrong.

    from_storage: forget what the kernel has cached of it first, so that the medium is read and not memory.
    """
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    for rank in range(manifest.world_size):
        described = read_rank_file(directory, manifest, rank)
        _verify_shard(directory, manifest, rank, described["chunks"], from_storage=from_storage)
    return manifest


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raises `CheckpointDamaged` where a file is missing or has another size: enough for torn and half deleted ones."""
    names = {entry.name for entry in manifest.files}
    wanted = {name(rank) for rank in range(manifest.world_size) for name in (rank_file, shard_file)}
    if names != wanted:
        raise CheckpointDamaged(
            f"Checkpoint {manifest.name} in {directory}: its manifest lists {len(names)} files, but "
            f"{manifest.world_size} ranks have written it. Choose another checkpoint."
        )
    for entry in manifest.files:
        try:
            size_bytes: int | None = (directory / entry.name).stat().st_size
        except OSError:
            size_bytes = None
        if size_bytes != entry.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise CheckpointDamaged(
                f"Checkpoint {manifest.name} in {directory}: {entry.name} {found}, the manifest says "
                f"{entry.size_bytes} bytes. Choose another checkpoint."
            )


def read_rank_file(directory: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """What a rank says of its part, checked by the manifest's hash. Raises `CheckpointDamaged`."""
    name = rank_file(rank)
    entry = manifest.file(name)
    assert entry is not None
    try:
        content = (directory / name).read_bytes()
    except OSError as err:
        raise damaged(manifest, directory, name, f"cannot be read ({err})") from err
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise damaged(manifest, directory, name, "is not what was saved (SHA-256 differs)")
    described: dict[str, Any] = json.loads(content)
    said = tuple(described.get(field) for field in ("format", "generation", "step", "rank", "world_size"))
    if said != (FORMAT, manifest.name.generation, manifest.name.step, rank, manifest.world_size):
        raise damaged(manifest, directory, name, f"belongs to another save: {said}")
    return described


def damaged(manifest: Manifest, directory: Path, name: str, what: str) -> CheckpointDamaged:
    """The error for a file of a checkpoint."""
    return CheckpointDamaged(
        f"Checkpoint {manifest.name} in {directory}: {name} {what}. Choose another checkpoint and check the storage."
    )


def _verify_shard(
    directory: Path, manifest: Manifest, rank: int, chunks: list[dict[str, Any]], *, from_storage: bool
) -> None:
    name, at = shard_file(rank), 0
    entry: FileEntry | None = manifest.file(name)
    assert entry is not None
    try:
        with (directory / name).open("rb", buffering=0) as file:
            if from_storage:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for chunk in chunks:
                if chunk["at"] != at:
                    raise damaged(manifest, directory, name, f"is not described without gaps, at byte {at}")
                digest = hashlib.sha256()
                for block in _read(file.fileno(), at, chunk["size_bytes"]):
                    digest.update(block)
                if digest.hexdigest() != chunk["sha256"]:
                    raise damaged(manifest, directory, name, f"is not what was saved: {chunk['key']} differs")
                at += chunk["size_bytes"]
    except OSError as err:
        raise damaged(manifest, directory, name, f"cannot be read ({err})") from err
    if at != entry.size_bytes:
        raise damaged(manifest, directory, name, f"has {entry.size_bytes} bytes, of which {at} are described")


def _read(fd: int, at: int, size_bytes: int) -> Iterator[bytes]:
    end = at + size_bytes
    while at < end:
        block = os.pread(fd, min(_BLOCK_BYTES, end - at), at)
        if not block:
            return
        at += len(block)
        yield block
