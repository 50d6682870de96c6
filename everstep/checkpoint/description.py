"""What a rank says of its part of a checkpoint, read from its file and checked. Standard library only.

The hash in the manifest says that the file is what was written; this says that what was written makes sense, so that
nothing in it can send a reader astray. `verify.py` calls it for each rank's file.
"""

from __future__ import annotations

import binascii
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from everstep.checkpoint.manifest import Manifest, shard_file
from everstep.checkpoint.sealed import FORMAT

SAME = {"$": "same"}
"""Stands for a part whose structure is that of rank 0."""

_MAPPINGS = frozenset({"dict", "ordered", "counter"})
_CHUNK_FIELDS = frozenset({"key", "dtype", "shape", "offsets", "sizes", "at", "size_bytes", "sha256"})
_INTEGERS = frozenset({int})
"""Without bool, which is an int to Python."""
_LARGEST = 1 << 62
_TYPE = re.compile(
    r"(?:b?float|complex)(16|32|64|128)|float([48])_[a-z0-9_]+|q?u?int([1-8]|16|32|64)(?:x[24])?|bits([1248]|16)(?:x[248])?"
)
"""Names of torch's types, with the bits of an item; several small ones share a byte."""


def parse_description(content: bytes, manifest: Manifest, rank: int) -> dict[str, Any]:
    """The content of a rank's file, as `shards.Part` describes it. Raises ValueError with what is wrong with it."""
    try:
        described = json.loads(content)
    except RecursionError as err:
        raise ValueError("is nested too deeply") from err
    except ValueError as err:
        raise ValueError(f"is no JSON ({err})") from err
    if not isinstance(described, dict):
        raise ValueError("holds no description")
    if not belongs(described, manifest, rank):
        raise ValueError(f"is {whose(described)}")
    shard = manifest.file(shard_file(rank))
    _check_chunks(described.get("chunks"), shard_bytes=shard.size_bytes if shard else 0)
    parts, own_keys = described.get("parts"), described.get("own_keys")
    if not isinstance(parts, dict) or not isinstance(own_keys, dict):
        raise ValueError("describes no state")
    if not all(isinstance(key, str) for key in own_keys.values()):
        raise ValueError("names keys of its own that are no names")
    handed_on = described.get("handed_on")
    if not isinstance(handed_on, list) or not all(isinstance(path, str) for path in handed_on):
        raise ValueError("does not say what rank 0 hands on")
    try:
        for structure in parts.values():
            if structure == SAME and rank:
                continue
            for _ in tensor_entries(structure):
                pass
    except RecursionError as err:
        raise ValueError("describes a state that is nested too deeply") from err
    return described


def belongs(described: Mapping[str, Any], manifest: Manifest, rank: int) -> bool:
    """Whether a file says that it is this rank's part of this checkpoint."""
    said = [described.get(field) for field in ("format", "generation", "step", "rank", "world_size")]
    return said == [FORMAT, manifest.name.generation, manifest.name.step, rank, manifest.world_size]


def whose(described: Mapping[str, Any]) -> str:
    """In words, which part of which checkpoint a file says that it is."""
    said = {field: described.get(field) for field in ("generation", "step", "rank", "world_size")}
    return "that of rank {rank} of {world_size} in checkpoint {generation}:{step}".format(**said)


def tensor_entries(structure: Any) -> Iterator[dict[str, Any]]:
    """Every entry of kind `tensor` in a structure of `tree.py`. Raises ValueError where it is none."""
    if structure is None or isinstance(structure, bool | int | float | str):
        return
    if isinstance(structure, list):
        for item in structure:
            yield from tensor_entries(item)
        return
    kind = structure.get("$")
    if kind == "tensor":
        _check_tensor(structure)
        yield structure
    elif kind in ("array", "scalar"):
        _check_array(structure)
    elif kind == "bytes":
        _decode(structure)
    elif kind == "tuple" and isinstance(structure.get("items"), list):
        yield from tensor_entries(structure["items"])
    elif kind in _MAPPINGS and isinstance(structure.get("items"), list):
        for item in structure["items"]:
            if not isinstance(item, list) or len(item) != 2 or isinstance(item[0], list | dict):
                raise ValueError(f"describes a {kind} whose items are no pairs")
            yield from tensor_entries(item[1])
    else:
        raise ValueError(f"describes something of kind {kind!r}, which this release does not know")


@functools.lru_cache(maxsize=256)
def item_bytes(dtype: str) -> int:
    """Bytes of one item of a torch type, by its name, with or without "torch.". Raises ValueError for no such name."""
    name = dtype.removeprefix("torch.")
    if name == "bool":
        return 1
    bits = _TYPE.fullmatch(name)
    if bits is None:
        raise ValueError(f"names a type {dtype!r} that there is not")
    return max(1, int(next(group for group in bits.groups() if group)) // 8)


def _check_tensor(entry: Mapping[str, Any]) -> None:
    path, dtype = entry.get("path"), entry.get("dtype")
    if not isinstance(path, str) or not isinstance(dtype, str):
        raise ValueError("describes a tensor without a path or a type")
    shape = _check_dimensions(entry.get("shape"), path)
    if "strides" in entry:
        _check_strides(entry["strides"], shape, path)
    item_bytes(dtype)


def _check_strides(strides: Any, shape: list[int], path: str) -> None:
    """In memory the values lie side by side in some order of the dimensions: none twice, and no gaps."""
    if not _are_counts(strides) or len(strides) != len(shape) or max(strides, default=0) > _LARGEST:
        raise ValueError(f"describes {path} with other dimensions in memory than it has")
    filled = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != filled:
            raise ValueError(f"describes {path} with values that lie in one place, or far apart")
        filled *= size


def _check_array(entry: Mapping[str, Any]) -> None:
    """`dtype` as numpy writes it: byte order, kind, length of an item (of a text: its letters, of four bytes each)."""
    dtype = re.fullmatch(r"[<>|=]([biufcmMSUV])([0-9]{1,9})(?:\[[0-9A-Za-z]+\])?", str(entry.get("dtype")))
    if dtype is None:
        raise ValueError(f"holds an array of type {entry.get('dtype')!r}, which there is not")
    length = int(dtype[2]) * (4 if dtype[1] == "U" else 1)
    if len(_decode(entry)) != length * math.prod(_check_dimensions(entry.get("shape"), "an array")):
        raise ValueError("holds an array of another length than its shape")


def _decode(entry: Mapping[str, Any]) -> bytes:
    try:
        return binascii.a2b_base64(entry["data"], strict_mode=True)
    except (KeyError, TypeError, ValueError) as err:
        raise ValueError(f"holds data that cannot be decoded ({err})") from err


def _check_chunks(chunks: Any, *, shard_bytes: int) -> None:
    if not isinstance(chunks, list):
        raise ValueError("lists no chunks")
    at = 0
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.keys() != _CHUNK_FIELDS:
            raise ValueError("describes a chunk with other fields than this release knows")
        key, dtype, sha256 = chunk["key"], chunk["dtype"], chunk["sha256"]
        if not (isinstance(key, str) and isinstance(dtype, str) and isinstance(sha256, str)):
            raise ValueError("describes a chunk without a key, a type or a hash")
        shape, offsets, sizes = chunk["shape"], chunk["offsets"], chunk["sizes"]
        for numbers in (shape, offsets, sizes):
            _check_dimensions(numbers, key)
        if not len(shape) == len(offsets) == len(sizes) or any(map(_beyond, offsets, sizes, shape)):
            raise ValueError(f"describes a chunk that lies outside {key}")
        if chunk["at"] != at or chunk["size_bytes"] != math.prod(sizes) * item_bytes(dtype):
            raise ValueError(f"describes {key} at another place, or of another length, than it has")
        at += chunk["size_bytes"]
    if at != shard_bytes:
        raise ValueError(f"describes {at} bytes of a shard that has {shard_bytes}")


def _check_dimensions(value: Any, key: str) -> list[int]:
    """A shape, or a place in one. Raises ValueError."""
    # Large jobs have hundreds of thousands of these, and each rank looks at all of them before it loads.
    if not _are_counts(value):
        raise ValueError(f"describes {key} with a shape that is none")
    if math.prod(filter(None, value)) > _LARGEST:
        raise ValueError(f"describes {key} larger than any memory")
    return list(value)


def _are_counts(value: Any) -> bool:
    return type(value) is list and _INTEGERS.issuperset(map(type, value)) and min(value, default=0) >= 0


def _beyond(offset: int, size: int, whole: int) -> bool:
    return offset + size > whole
