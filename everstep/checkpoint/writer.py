"""Writes one checkpoint, all ranks together: shards aside, hashed and synced, renamed, the manifest last.

`Run` calls `write_checkpoint` on every rank. At each stage the ranks tell each other whether theirs worked, so that
one rank's full disk is a failed save on all of them and never a rank left behind in a collective.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.checkpoint.manifest import (
    MANIFEST,
    CheckpointName,
    FileEntry,
    Manifest,
    sync_directory,
    write_manifest,
)
from everstep.checkpoint.snapshot import Snapshot
from everstep.errors import SaveFailed
from everstep.ranks import Team

ASIDE = ".writing-"
"""Prefix of directories that are being written, or that a killed save left behind."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Everything about a checkpoint that is not state. `parent` is what this generation resumed from."""

    root: Path
    name: CheckpointName
    parent: CheckpointName | None
    job: str
    total_steps: int


def write_checkpoint(
    request: SaveRequest, take_snapshot: Callable[[], Snapshot], team: Team, *, may_publish: Callable[[], None]
) -> Manifest:
    """Take a snapshot on every rank and write it; returns when the checkpoint is durable.

    may_publish: called on rank 0 just before the manifest is put in place, the last moment to end the process.
    Raises `SaveFailed` on every rank alike when any rank's part failed; nothing then counts as a checkpoint.
    """
    aside = request.name.directory(request.root).with_name(f"{ASIDE}{request.name.step:08d}-{os.getpid()}")
    aside = Path(team.broadcast(str(aside)))
    try:
        _agree(team, request, _attempt(lambda: _make_fresh(aside) if team.leads else None))
        taken: list[Snapshot] = []
        _agree(team, request, _attempt(lambda: taken.append(take_snapshot())))
        snapshot = taken[0]
        own_keys = _keys_that_differ(snapshot, team)
        _agree(team, request, _attempt(lambda: _write_tensors(aside, snapshot, own_keys, team)))
        outcomes = _agree(team, request, _attempt(lambda: _write_rank_file(aside, snapshot, own_keys, team)))
        digests = dict(enumerate(team.gather(snapshot.digests)))
        files = tuple(sorted((e for entries in outcomes for e in entries), key=lambda entry: entry.name))
        manifest = Manifest(
            name=request.name,
            parent=request.parent,
            job=request.job,
            total_steps=request.total_steps,
            world_size=team.world_size,
            created_at=time.time(),
            torch_version=torch.__version__,
            files=files,
            digests=digests,
        )
        _agree(team, request, _attempt(lambda: _publish(aside, request, manifest, may_publish) if team.leads else None))
    except SaveFailed:
        if team.leads:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return manifest


def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") or (None, what went wrong). torch's CheckpointException is a BaseException: caught by name."""
    try:
        return work(), ""
    except CheckpointException as err:
        return None, "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in err.failures.values()) or str(err)
    except Exception as err:  # whatever storage or serialization throws must not leave the other ranks waiting
        return None, f"{type(err).__name__}: {err}"


def _agree(team: Team, request: SaveRequest, outcome: tuple[Any, str]) -> list[Any]:
    outcomes = team.gather(outcome)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem]
    if problems:
        raise SaveFailed(
            f"Checkpoint {request.name} was not saved under {request.root}: {'; '.join(problems)[:2000]}. "
            "Training goes on and the next save tries again; check space and permissions there."
        )
    return [result for result, _ in outcomes]


def _make_fresh(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _keys_that_differ(snapshot: Snapshot, team: Team) -> dict[str, str]:
    """Tensors that are not the same on every rank (batch norm's averages under DDP), with a key of this rank's own.

    torch.distributed.checkpoint stores one copy of a plain tensor, whichever rank's: right only for equal ones.
    """
    hashes: dict[str, set[str]] = {}
    for theirs in team.gather(snapshot.hashes):
        for path, value in theirs.items():
            hashes.setdefault(path, set()).add(value)
    return {path: f"{path}@rank-{team.rank:05d}" for path in snapshot.tensors if len(hashes[path]) > 1}


def _write_tensors(aside: Path, snapshot: Snapshot, own_keys: Mapping[str, str], team: Team) -> None:
    tensors = {own_keys.get(path, path): tensor for path, tensor in snapshot.tensors.items()}
    writer = FileSystemWriter(aside, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a run without ranks is meant
        save(tensors, storage_writer=writer, process_group=team.group, no_dist=team.world_size == 1)


def _write_rank_file(aside: Path, snapshot: Snapshot, own_keys: Mapping[str, str], team: Team) -> list[FileEntry]:
    """Write this rank's structures; returns the entries of all files that this rank wrote."""
    path = aside / rank_file(team.rank)
    with path.open("w") as file:
        json.dump({"parts": snapshot.structures, "own_keys": own_keys}, file)
        file.flush()
        os.fsync(file.fileno())
    mine = [path, *aside.glob(f"__{team.rank}_*.distcp")]
    if team.leads:
        mine.append(aside / ".metadata")
    return [FileEntry(name=p.name, size_bytes=p.stat().st_size, sha256=file_hash(p)) for p in mine]


def _publish(aside: Path, request: SaveRequest, manifest: Manifest, may_publish: Callable[[], None]) -> None:
    for entry in manifest.files:
        size_bytes = (aside / entry.name).stat().st_size if (aside / entry.name).exists() else None
        if size_bytes != entry.size_bytes:
            raise SaveFailed(
                f"{entry.name} has {size_bytes} bytes here, its writer says {entry.size_bytes}: "
                "the checkpoint directory must be storage that all nodes share"
            )
    sync_directory(aside)
    directory = request.name.directory(request.root)
    if (directory / MANIFEST).exists():
        raise SaveFailed(f"{directory} holds a complete checkpoint already; each generation writes into its own")
    shutil.rmtree(directory, ignore_errors=True)  # an earlier attempt that never got its manifest
    aside.rename(directory)
    sync_directory(directory.parent)
    write_manifest(directory, manifest, may_publish=may_publish)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
