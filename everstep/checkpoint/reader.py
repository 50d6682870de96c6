"""Reads one checkpoint on one rank: sizes of all files, hashes of what this rank loads, then the state.

`Run.resume` calls it on each rank. No collectives: ranks agree afterwards whether all of them have loaded.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.checkpoint.manifest import Manifest, read_manifest
from everstep.checkpoint.snapshot import RNG
from everstep.checkpoint.tree import tensor_entries, unflatten
from everstep.checkpoint.writer import file_hash, rank_file
from everstep.errors import CheckpointDamaged


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint's state for one rank. `digests` is what was taken from that rank's live objects at the save.

    After a change of the world size the random generators cannot be mapped: `states` and `digests` lack them.
    """

    manifest: Manifest
    states: dict[str, Any]
    digests: dict[str, str]


def read_checkpoint(directory: Path, *, rank: int, world_size: int) -> Loaded:
    """Load a checkpoint's state into fresh host tensors.

    Raises `CheckpointMissing` where there is no complete checkpoint, `CheckpointDamaged` where its files are not what
    its manifest says.
    """
    manifest = read_manifest(directory)
    _check_sizes(directory, manifest)
    source = rank if world_size == manifest.world_size else 0
    needed = [entry.name for entry in manifest.files if not entry.name.startswith("rank-")]
    for name in [rank_file(source), *needed]:
        _check_hash(directory, manifest, name)
    content = json.loads((directory / rank_file(source)).read_bytes())
    parts, own_keys = content["parts"], content["own_keys"]
    tensors = _read_tensors(directory, parts, own_keys)
    digests = dict(manifest.digests[source])
    if world_size != manifest.world_size:
        parts.pop(RNG, None)
        digests.pop(RNG, None)
    states = {part: unflatten(structure, tensors) for part, structure in parts.items()}
    return Loaded(manifest=manifest, states=states, digests=digests)


def _check_sizes(directory: Path, manifest: Manifest) -> None:
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


def _check_hash(directory: Path, manifest: Manifest, name: str) -> None:
    entry = manifest.file(name)
    if entry is None or file_hash(directory / name) != entry.sha256:
        raise CheckpointDamaged(
            f"Checkpoint {manifest.name} in {directory}: {name} is not what was saved (SHA-256 differs). "
            "Choose another checkpoint and check the storage."
        )


def _read_tensors(directory: Path, parts: dict[str, Any], own_keys: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors = {
        entry["path"]: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"].removeprefix("torch.")))
        for structure in parts.values()
        for entry in tensor_entries(structure)
    }
    by_key = {own_keys.get(path, path): tensor for path, tensor in tensors.items()}
    try:
        _load_quietly(by_key, storage_reader=FileSystemReader(directory), no_dist=True)
    except CheckpointException as err:  # a BaseException: `except Exception` would miss it
        raise CheckpointDamaged(f"Checkpoint in {directory} cannot be loaded: {err}. Choose another one.") from err
    return tensors


def _load_quietly(by_key: dict[str, Any], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank loads for itself
        load(by_key, **options)
