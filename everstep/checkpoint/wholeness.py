"""Is every tensor of a checkpoint there in full, and only once? Asked across the files of all ranks.

`verify.py` and `reader.py` call it before anything is loaded: torch fills what it finds and leaves the rest of a tensor
as the memory was. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.checkpoint.description import SAME, tensor_entries

Chunk = Mapping[str, Any]


def check_whole(described: Sequence[Mapping[str, Any]]) -> None:
    """`described` holds each rank's parsed file, in rank order. Raises ValueError with what is missing or double."""
    chunks: dict[str, list[Chunk]] = {}
    for part in described:
        for chunk in part["chunks"]:
            chunks.setdefault(chunk["key"], []).append(chunk)
    for key, found in chunks.items():
        _check_tiling(key, found)
    for rank, part in enumerate(described):
        for name, structure in part["parts"].items():
            if structure == SAME and name not in described[0]["parts"]:
                raise ValueError(f"rank {rank} holds the same {name} as rank 0, which holds none")
            if structure != SAME:
                _check_structure(rank, structure, part["own_keys"], chunks)
            elif part["own_keys"] != described[0]["own_keys"]:
                _check_structure(rank, described[0]["parts"][name], part["own_keys"], chunks)


def _check_structure(rank: int, structure: Any, own_keys: Mapping[str, str], chunks: Mapping[str, list[Chunk]]) -> None:
    for entry in tensor_entries(structure):
        key = own_keys.get(entry["path"], entry["path"])
        if key not in chunks:
            raise ValueError(f"no rank has written {key}, which rank {rank} needs")
        chunk = chunks[key][0]
        if chunk["shape"] != entry["shape"] or chunk["dtype"] != entry["dtype"].removeprefix("torch."):
            raise ValueError(
                f"{key} is written as {chunk['dtype']} of {chunk['shape']}, "
                f"and rank {rank} needs {entry['dtype']} of {entry['shape']}"
            )


def _check_tiling(key: str, chunks: list[Chunk]) -> None:
    first = chunks[0]
    whole = math.prod(first["shape"])
    if any(chunk["shape"] != first["shape"] or chunk["dtype"] != first["dtype"] for chunk in chunks):
        raise ValueError(f"ranks have written {key} in different shapes or types")
    blocks = [chunk for chunk in chunks if chunk["size_bytes"]]
    there = sum(math.prod(chunk["sizes"]) for chunk in blocks)
    if there < whole:
        raise ValueError(f"of {key} only {there} of {whole} values are there")
    if there > whole or (len(blocks) > 1 and _overlap(blocks)):
        raise ValueError(f"parts of {key} are there twice")


def _overlap(blocks: list[Chunk]) -> bool:
    """Whether two of the blocks share a value. A sweep along the dimension that tells most of them apart."""
    dimensions = range(len(blocks[0]["shape"]))
    along = max(dimensions, key=lambda dimension: len({block["offsets"][dimension] for block in blocks}))
    reached: list[Chunk] = []
    for block in sorted(blocks, key=lambda block: int(block["offsets"][along])):
        start = block["offsets"][along]
        reached = [other for other in reached if other["offsets"][along] + other["sizes"][along] > start]
        if any(_meet(block, other) for other in reached):
            return True
        reached.append(block)
    return False


def _meet(one: Chunk, other: Chunk) -> bool:
    return all(
        one_start < other_start + other_size and other_start < one_start + one_size
        for one_start, one_size, other_start, other_size in zip(
            one["offsets"], one["sizes"], other["offsets"], other["sizes"], strict=True
        )
    )
