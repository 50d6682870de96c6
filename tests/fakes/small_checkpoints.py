"""Checkpoints of a few bytes, put on disk by the writer's own functions: one replicated tensor and one sharded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from everstep.checkpoint.manifest import CheckpointName
from everstep.checkpoint.publish import Publication, publish, tell_done
from everstep.checkpoint.shards import Pace, Part, write_part

ROWS = 3
"""Of the sharded tensor, on each rank; a row has four numbers of four bytes."""


def write_checkpoint(root: Path, text: str, *, world_size: int = 2, parent: str = "", fill: int | None = None) -> Path:
    """Write `<generation>:<step>`; its bytes count up from `fill`, by default from its step. Returns its directory."""
    name = CheckpointName.parse(text)
    aside = name.directory(root).with_name(f".writing-{name.step}")
    aside.mkdir(parents=True)
    for rank in range(world_size):
        tell_done(aside, rank, _write_rank(aside, name, rank, world_size, name.step if fill is None else fill))
    publication = Publication(
        root=root,
        aside=aside,
        name=name,
        parent=CheckpointName.parse(parent) if parent else None,
        job="small",
        total_steps=100,
        world_size=world_size,
        torch_version="2",
    )
    publish(publication, limit_s=0, abandoned=lambda: False, may_publish=lambda: None)
    return name.directory(root)


def reseal(directory: Path, **changes: Any) -> None:
    """Change what a checkpoint's files say and give them hashes that fit: `manifest`, or `rank_<number>`."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for key, change in changes.items():
        if key == "manifest":
            continue
        file = directory / f"rank-{int(key.removeprefix('rank_')):05d}.json"
        described = json.loads(file.read_bytes())
        change(described)
        content = json.dumps(described).encode()
        file.write_bytes(content)
        (entry,) = (entry for entry in manifest["files"] if entry["name"] == file.name)
        entry |= {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if "manifest" in changes:
        changes["manifest"](manifest)
    manifest.pop("self_sha256")
    sealed = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**manifest, "self_sha256": sealed}))


def _write_rank(aside: Path, name: CheckpointName, rank: int, world_size: int, fill: int) -> Any:
    shape = [ROWS * world_size, 4]
    chunks = [_chunk("model/weight", shape, [ROWS * rank, 0], [ROWS, 4], at=0)]
    if rank == 0:
        chunks.append(_chunk("model/bias", [2], [0], [2], at=chunks[0]["size_bytes"]))
    structure = {
        "$": "dict",
        "items": [["weight", _tensor("model/weight", shape)], ["bias", _tensor("model/bias", [2])]],
    }
    described = {
        "chunks": chunks,
        "parts": {
            "model": structure if rank == 0 else {"$": "same"},
            "steps": {"$": "tuple", "items": [name.step, rank]},
        },
        "own_keys": {},
        "handed_on": [],
    }
    size_bytes = sum(chunk["size_bytes"] for chunk in chunks)
    text = json.dumps(described).encode()
    memory = memoryview(bytes((fill + rank * 100 + at) % 256 for at in range(size_bytes)) + text)
    part = Part(
        name=name,
        rank=rank,
        world_size=world_size,
        shard_bytes=size_bytes,
        described_at=size_bytes,
        described_bytes=len(text),
    )
    return write_part(aside, part, memory, Pace(None))


def _chunk(key: str, shape: list[int], offsets: list[int], sizes: list[int], *, at: int) -> dict[str, Any]:
    size_bytes = 4
    for size in sizes:
        size_bytes *= size
    return {
        "key": key,
        "dtype": "float32",
        "shape": shape,
        "offsets": offsets,
        "sizes": sizes,
        "at": at,
        "size_bytes": size_bytes,
    }


def _tensor(path: str, shape: list[int]) -> dict[str, Any]:
    return {"$": "tensor", "path": path, "dtype": "torch.float32", "shape": shape}
