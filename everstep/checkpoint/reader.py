"""Reads one checkpoint on one rank: sizes of all files, hashes of what this rank loads, then the state.

`Run.resume` calls it on each rank. No collectives: ranks agree afterwards whether all of them have loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from everstep.checkpoint.description import SAME, tensor_entries
from everstep.checkpoint.manifest import Manifest, rank_file, read_manifest
from everstep.checkpoint.snapshot import RNG, Snapshot, unwrap
from everstep.checkpoint.storage import Block, BlockFinder, ShardReader, dtype_of
from everstep.checkpoint.tree import Structure, flatten, unflatten
from everstep.checkpoint.verify import Fault, check_sizes, damaged, read_rank_file
from everstep.checkpoint.wholeness import check_whole
from everstep.checkpoint.world_change import check_world_change
from everstep.errors import CheckpointDamaged, UsageError


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint's state for one rank. `digests` is over what was loaded, by part; its bytes are those of the save.

    After a change of the world size the random generators cannot be mapped: `states` and `digests` lack them.
    """

    manifest: Manifest
    states: dict[str, Any]
    digests: dict[str, str]


def read_checkpoint(directory: Path, *, rank: int, world_size: int, tracked: Mapping[str, Any]) -> Loaded:
    """Load a checkpoint's state into fresh tensors, sharded as the tracked objects are now.

    Raises `CheckpointMissing` where there is no complete checkpoint, `CheckpointDamaged` where its files are not what
    its manifest says, `UsageError` where this number of ranks cannot take the state over.
    """
    wanted = _look_up(directory, rank=rank, world_size=world_size, tracked=tracked)
    reader = ShardReader(directory, wanted.manifest, wanted.described)
    _load(wanted.by_key, reader, directory)
    try:
        states = {part: unflatten(structure, wanted.tensors) for part, structure in wanted.parts.items()}
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as err:
        own = rank_file(rank if world_size == wanted.manifest.world_size else 0)
        fault = Fault(kind="description", file=own, what=f"holds a value that cannot be made ({err})")
        raise damaged(wanted.manifest, directory, [fault]) from err
    known = {
        path: digest
        for path, tensor in wanted.tensors.items()
        if not isinstance(tensor, DTensor)
        and (digest := reader.hashes.get((wanted.key(path), (0,) * tensor.dim(), tuple(tensor.shape))))
    }
    return Loaded(manifest=wanted.manifest, states=states, digests=Snapshot.of(states).digests(known))


def needed_blocks(directory: Path, *, rank: int, world_size: int, tracked: Mapping[str, Any]) -> list[Block]:
    """What `read_checkpoint` would read of the shards, in order. Raises what it raises, and reads no shard."""
    wanted = _look_up(directory, rank=rank, world_size=world_size, tracked=tracked)
    finder = BlockFinder(directory, wanted.manifest, wanted.described)
    _load(wanted.by_key, finder, directory)
    return sorted(finder.blocks, key=lambda block: (block.rank, block.at))


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What one rank loads: structures by part, and by path fresh tensors to load into."""

    manifest: Manifest
    described: list[dict[str, Any]]
    own_keys: dict[str, str]
    parts: dict[str, Structure]
    tensors: dict[str, torch.Tensor]

    def key(self, path: str) -> str:
        return self.own_keys.get(path, path)

    @property
    def by_key(self) -> dict[str, torch.Tensor]:
        return {self.key(path): tensor for path, tensor in self.tensors.items()}


def _look_up(directory: Path, *, rank: int, world_size: int, tracked: Mapping[str, Any]) -> _Wanted:
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    described = [read_rank_file(directory, manifest, source) for source in range(manifest.world_size)]
    try:
        check_whole(described)
    except ValueError as err:
        fault = Fault(kind="description", file="the state", what=f"is not whole: {err}")
        raise damaged(manifest, directory, [fault]) from err
    source = rank if world_size == manifest.world_size else 0
    own_keys: dict[str, str] = described[source]["own_keys"]
    parts: dict[str, Structure] = {
        part: described[0]["parts"][part] if structure == SAME else structure
        for part, structure in described[source]["parts"].items()
    }
    if world_size != manifest.world_size:
        check_world_change(manifest, described, tracked, world_size=world_size)
        parts.pop(RNG, None)
    places = _places(tracked)
    tensors = {
        entry["path"]: _empty(entry, places.get(entry["path"], _place_of_moment(entry["path"], tracked)))
        for structure in parts.values()
        for entry in tensor_entries(structure)
    }
    return _Wanted(manifest=manifest, described=described, own_keys=own_keys, parts=parts, tensors=tensors)


def _places(tracked: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Sharded tensors of the tracked objects by path: where the loaded ones must lie."""
    found: dict[str, torch.Tensor] = {}
    for part, target in tracked.items():
        found.update(
            {
                path: tensor
                for path, tensor in flatten(unwrap(target).state_dict(), path=part)[1].items()
                if isinstance(tensor, DTensor)
            }
        )
    return found


def _place_of_moment(path: str, tracked: Mapping[str, Any]) -> torch.Tensor | None:
    """The sharded parameter that an optimizer's moment belongs to: a fresh optimizer holds no moments yet.

    Paths are `<optimizer>/state/<index>/<name>`, the index counting parameters over all groups.
    """
    part, _, rest = path.partition("/")
    words = rest.split("/")
    optimizer = tracked.get(part)
    if not isinstance(optimizer, torch.optim.Optimizer) or len(words) < 3 or words[0] != "state":
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = int(words[1]) if words[1].isdigit() else -1
    return parameters[index] if 0 <= index < len(parameters) and isinstance(parameters[index], DTensor) else None


def _empty(entry: Mapping[str, Any], place: torch.Tensor | None) -> torch.Tensor:
    """A tensor to load into: like its place where that is sharded and has the same shape, else on the host."""
    shape, dtype = torch.Size(entry["shape"]), dtype_of(entry)
    if isinstance(place, DTensor) and place.shape == shape:
        return torch.empty_like(place.detach(), dtype=dtype)
    if "strides" in entry:
        return torch.empty_strided(shape, entry["strides"], dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def _load(by_key: dict[str, Any], reader: ShardReader, directory: Path) -> None:
    missing = sorted(by_key.keys() - reader.tensors.keys())
    if missing:  # of a rank that the checkpoint's own ranks do not have
        raise CheckpointDamaged(
            f"Checkpoint in {directory} holds no {missing[0]}, which a rank of this number needs. Choose another one."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank loads for itself
            load(by_key, storage_reader=reader, no_dist=True)
    except CheckpointException as err:  # a BaseException: `except Exception` would miss it
        for cause, _ in err.failures.values():
            if isinstance(cause, CheckpointDamaged | UsageError):
                raise cause from err
        raise CheckpointDamaged(f"Checkpoint in {directory} cannot be loaded: {err}. Choose another one.") from err
