"""Makes a checkpoint of what all ranks have written: the leading writer waits for them and puts the manifest in place.

Writers tell each other through small files in the directory that is being written, since they may run on nodes that
share nothing but the storage. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.checkpoint.manifest import (
    MANIFEST,
    CheckpointName,
    FileEntry,
    Manifest,
    write_manifest,
)
from everstep.checkpoint.sealed import sync_directory
from everstep.errors import SaveFailed

_LOOK_EVERY_S = 0.02
_LOOK_AT_LEAST_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What the manifest says beside the files."""

    root: Path
    aside: Path
    name: CheckpointName
    parent: CheckpointName | None
    job: str
    total_steps: int
    world_size: int
    torch_version: str


def tell_done(aside: Path, rank: int, entries: Sequence[FileEntry]) -> None:
    """This rank's part is on disk. Raises OSError."""
    _put(aside / f"done-{rank:05d}.json", [asdict(entry) for entry in entries])


def tell_failed(aside: Path, rank: int, problem: str) -> None:
    """This rank's part will not come; best effort, since what failed may be this very storage."""
    try:
        _put(aside / f"failed-{rank:05d}.json", problem)
    except OSError:
        return


def publish(
    publication: Publication, *, limit_s: float, abandoned: Callable[[], bool], may_publish: Callable[[], None]
) -> Manifest:
    """Wait for every rank's part, then make the directory count. Raises `SaveFailed` or OSError.

    abandoned: whether the ranks have given this save up. may_publish: called just before the manifest is put in place.
    """
    entries = _await_parts(publication, limit_s=limit_s, abandoned=abandoned)
    aside = publication.aside
    for entry in entries:
        path = aside / entry.name
        size_bytes = path.stat().st_size if path.exists() else None
        if size_bytes != entry.size_bytes:
            raise SaveFailed(
                f"{entry.name} has {size_bytes} bytes here, its writer says {entry.size_bytes}: "
                "the checkpoint directory must be storage that all nodes share"
            )
    for left in aside.glob("done-*.json"):
        left.unlink()
    manifest = Manifest(
        name=publication.name,
        parent=publication.parent,
        job=publication.job,
        total_steps=publication.total_steps,
        world_size=publication.world_size,
        created_at=time.time(),
        torch_version=publication.torch_version,
        files=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
    sync_directory(aside)
    directory = publication.name.directory(publication.root)
    if (directory / MANIFEST).exists():
        raise SaveFailed(f"{directory} holds a complete checkpoint already; each generation writes into its own")
    shutil.rmtree(directory, ignore_errors=True)  # an earlier attempt that never got its manifest
    aside.rename(directory)
    sync_directory(directory.parent)
    write_manifest(directory, manifest, may_publish=may_publish)
    return manifest


def discard(publication: Publication) -> None:
    """Give up what is left of a save that failed, so that the next one finds its space. Best effort."""
    shutil.rmtree(publication.aside, ignore_errors=True)
    directory = publication.name.directory(publication.root)
    if not os.path.lexists(directory / MANIFEST):
        shutil.rmtree(directory, ignore_errors=True)


def _await_parts(publication: Publication, *, limit_s: float, abandoned: Callable[[], bool]) -> list[FileEntry]:
    deadline, pause_s, seen_bytes = time.monotonic() + limit_s, _LOOK_EVERY_S, 0
    waiting = set(range(publication.world_size))
    entries: list[FileEntry] = []
    while True:
        for rank in sorted(waiting):
            path = publication.aside / f"done-{rank:05d}.json"
            if path.exists():
                entries += _entries(path, rank)
                waiting.discard(rank)
                deadline = time.monotonic() + limit_s
        if not waiting:
            return entries
        failed = sorted(publication.aside.glob("failed-*.json"))
        if failed:
            rank = int(failed[0].stem.removeprefix("failed-"))
            raise SaveFailed(f"rank {rank}: {json.loads(failed[0].read_bytes())}")
        if abandoned():
            raise SaveFailed("another rank's part failed")
        if time.monotonic() > deadline:
            # Parts may be large and the store slow: as long as something comes, it is waited for.
            before, seen_bytes = seen_bytes, _size_bytes(publication.aside)
            if seen_bytes > before:
                deadline = time.monotonic() + limit_s
                continue
            raise SaveFailed(f"nothing came from ranks {sorted(waiting)[:8]} for {limit_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, _LOOK_AT_LEAST_EVERY_S)


def _size_bytes(directory: Path) -> int:
    found = 0
    for path in directory.glob("*"):
        with contextlib.suppress(OSError):  # it was renamed meanwhile
            found += path.stat().st_size
    return found


def _entries(path: Path, rank: int) -> list[FileEntry]:
    try:
        return [FileEntry(**entry) for entry in json.loads(path.read_bytes())]
    except (ValueError, TypeError) as err:
        raise SaveFailed(f"rank {rank}'s writer said something that cannot be read: {err}") from err


def _put(path: Path, content: object) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content))
    aside.rename(path)
