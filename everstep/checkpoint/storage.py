"""The tensors of a checkpoint as torch.distributed.checkpoint reads them: any part of any tensor, checked on the way.

`reader.py` makes one for each load. Each block is read whole and hashed before a byte of it is used, so that every rank
checks exactly what it loads.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from everstep.checkpoint.manifest import Manifest, shard_file
from everstep.checkpoint.plain_files import open_plain
from everstep.checkpoint.verify import Fault, FaultKind, damaged
from everstep.errors import CheckpointDamaged


class ShardReader(StorageReader):
    """Reads shards. `described` holds each rank's file, in rank order.

    `hashes` maps (key, offsets, sizes) to the SHA-256 of each block that was read.
    """

    def __init__(self, directory: Path, manifest: Manifest, described: Sequence[Mapping[str, Any]]) -> None:
        self.hashes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
        self._directory = directory
        self._manifest = manifest
        self._chunks: dict[MetadataIndex, tuple[int, Mapping[str, Any]]] = {}
        tensors: dict[str, TensorStorageMetadata] = {}
        for rank, part in enumerate(described):
            for chunk in part["chunks"]:
                found = tensors.setdefault(
                    chunk["key"],
                    TensorStorageMetadata(
                        properties=TensorProperties(dtype=dtype_of(chunk)), size=torch.Size(chunk["shape"]), chunks=[]
                    ),
                )
                if not chunk["size_bytes"] and found.size.numel():
                    continue  # an empty part; another one may begin at the same place
                offsets = torch.Size(chunk["offsets"])
                found.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk["sizes"])))
                self._chunks[MetadataIndex(chunk["key"], offsets)] = (rank, chunk)
        self.tensors = tensors

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(state_dict_metadata=dict(self.tensors), storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises `CheckpointDamaged`."""
        wanted: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)].append(item)
        for index, items in wanted.items():
            rank, chunk = self._chunks[index]
            block = self._read(rank, chunk)
            for item in items:
                part = block
                for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dimension, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        return _done()

    def _read(self, rank: int, chunk: Mapping[str, Any]) -> torch.Tensor:
        name, size_bytes = shard_file(rank), chunk["size_bytes"]
        content = bytearray(size_bytes)
        try:
            with open_plain(self._directory / name) as file:
                file.seek(chunk["at"])
                view, got = memoryview(content), 0
                while got < size_bytes and (count := file.readinto(view[got:])):
                    got += count
        except OSError as err:
            raise self._damaged("unreadable", name, f"cannot be read ({err.strerror})") from err
        digest = hashlib.sha256(content).hexdigest()
        if digest != chunk["sha256"]:
            raise self._damaged("hash", name, f"is not what was saved: {chunk['key']} differs")
        sizes = tuple(chunk["sizes"])
        self.hashes[chunk["key"], tuple(chunk["offsets"]), sizes] = digest
        if not size_bytes:
            return torch.empty(sizes, dtype=dtype_of(chunk))
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype_of(chunk)).view(sizes)

    def _damaged(self, kind: FaultKind, name: str, what: str) -> CheckpointDamaged:
        return damaged(self._manifest, self._directory, [Fault(kind=kind, file=name, what=what)])


@dataclass(frozen=True, kw_only=True)
class Block:
    """Bytes of the shard that a rank wrote."""

    rank: int
    at: int
    size_bytes: int


class BlockFinder(ShardReader):
    """Reads nothing: `blocks` are those that a load of the same tensors reads."""

    def __init__(self, directory: Path, manifest: Manifest, described: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(directory, manifest, described)
        self.blocks: set[Block] = set()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            rank, chunk = self._chunks[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            self.blocks.add(Block(rank=rank, at=chunk["at"], size_bytes=chunk["size_bytes"]))
        return _done()


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def dtype_of(described: Mapping[str, Any]) -> torch.dtype:
    """The type that a chunk or an entry of a structure names, with or without "torch."."""
    found = getattr(torch, described["dtype"].removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointDamaged(
            f"This torch ({torch.__version__}) has no type {described['dtype']}, which the checkpoint holds. "
            "Load it with the release of torch that wrote it."
        )
    return found
