"""What a rank says of its part of a checkpoint, read from its file and checked. Standard library only.

The hash in the manifest says that the file is what was written; this says that what was written makes sense, so that
nothing in it can send a reader astray. `verify.py` calls it for each rank's file.
"""

from __future__ import annotations

import binascii
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
_LARGEST = 1 << 62


def parse_description(content: bytes, manifest: Manifest, rank: int) -> dict[str, Any]:
    """The content of a rank's file: `chunks`, `parts`, `own_keys`. Raises ValueError with what is wrong with it."""
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


def item_bytes(dtype: str) -> int:
    """Bytes of one item of a torch type, by its name, with or without "torch.". Raises ValueError for no such name."""
    name = dtype.removeprefix("torch.")
    if name == "bool":
        return 1
    bits = re.fullmatch(r"(?:b?float|complex|u?int|qu?int|bits)(\d+)(?:_?[a-z0-9_]*)", name)
    if bits is None:
        raise ValueError(f"names a type {dtype!r} that there is not")
    return max(1, int(bits[1]) // 8)


def _check_tensor(entry: Mapping[str, Any]) -> None:
    path, dtype = entry.get("path"), entry.get("dtype")
    if not isinstance(path, str) or not isinstance(dtype, str):
        raise ValueError("describes a tensor without a path or a type")
    shape = _check_dimensions(entry.get("shape"), path)
    if "strides" in entry and len(_check_dimensions(entry["strides"], path)) != len(shape):
        raise ValueError(f"describes {path} with other dimensions in memory than it has")
    item_bytes(dtype)


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
        shape, offsets, sizes = (_check_dimensions(chunk[field], key) for field in ("shape", "offsets", "sizes"))
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"describes a chunk that lies outside {key}")
        if chunk["at"] != at or chunk["size_bytes"] != math.prod(sizes) * item_bytes(dtype):
            raise ValueError(f"describes {key} at another place, or of another length, than it has")
        at += chunk["size_bytes"]
    if at != shard_bytes:
        raise ValueError(f"describes {at} bytes of a shard that has {shard_bytes}")


def _check_dimensions(value: Any, key: str) -> list[int]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ValueError(f"describes {key} with a shape that is none")
    if math.prod(max(1, number) for number in value) > _LARGEST:
        raise ValueError(f"describes {key} larger than any memory")
    return value
