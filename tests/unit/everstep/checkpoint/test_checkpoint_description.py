"""What the files of ranks may say, apart from any checkpoint."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from everstep.checkpoint.description import item_bytes, tensor_entries
from everstep.checkpoint.tree import flatten
from everstep.checkpoint.wholeness import check_whole

TYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_torch_has_the_length_that_torch_gives_it(name: str) -> None:
    assert item_bytes(name) == getattr(torch, name.removeprefix("torch.")).itemsize


@pytest.mark.parametrize(
    "name", ["", "float", "float33", "save", "int9", "float8", "torch", "bits3", "int8x3", "float16x"]
)
def test_what_is_no_type_of_torch_is_none_here(name: str) -> None:
    with pytest.raises(ValueError, match="that there is not"):
        item_bytes(name)


def test_whatever_a_state_may_hold_is_understood() -> None:
    state = {
        "arrays": [np.zeros((2, 0, 3), "<M8[ns]"), np.float16(1), np.zeros(2, "?")],
        "texts": np.array(["ab", "c"]),
        "raw": (b"", b"ab", None, True, 1.5, float("inf")),
        1: {"deep": [[torch.ones(2, dtype=torch.bfloat16)]]},
        "orders": [torch.ones(4, 3).t(), torch.ones(50, 9, 1, 7, 8)[7:8].transpose(3, 4)],
    }
    structure, tensors = flatten(state, path="part")
    assert [entry["path"] for entry in tensor_entries(structure)] == list(tensors)


def blocks(*places: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """One rank for each block of a tensor, by offsets and sizes."""
    structure = {"$": "tensor", "path": "t", "dtype": "torch.uint8", "shape": list(shape)}
    return [
        {
            "chunks": [
                {
                    "key": "t",
                    "dtype": "uint8",
                    "shape": list(shape),
                    "offsets": list(offsets),
                    "sizes": list(sizes),
                    "size_bytes": int(np.prod(sizes)),
                }
            ],
            "parts": {"part": structure},
            "own_keys": {},
        }
        for offsets, sizes in places
    ]


@pytest.mark.parametrize(
    ("places", "shape"),
    [
        ([((), ())], ()),
        ([((0,), (5,))], (5,)),
        ([((0,), (2,)), ((2,), (2,)), ((4,), (1,)), ((5,), (0,))], (5,)),
        ([((0, 0), (0, 3)), ((0, 0), (1, 3)), ((1, 0), (0, 3))], (1, 3)),
        ([((row, column), (2, 3)) for row in (0, 2) for column in (0, 3, 6)], (4, 9)),
        ([((0, column), (4, 1)) for column in range(64)], (4, 64)),
        ([((0, 0), (0, 3))], (0, 3)),
    ],
)
def test_blocks_that_tile_a_tensor_are_whole_in_any_order(places: list[Any], shape: tuple[int, ...]) -> None:
    for order in itertools.islice(itertools.permutations(places), 24):
        check_whole(blocks(*order, shape=shape))


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 2), (2, 2))], "only 12 of 16"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "twice"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], "twice"),
        ([((0, 0), (4, 4)), ((3, 3), (1, 1))], "twice"),
        ([((0, 0), (2, 2)), ((1, 1), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2))], "twice"),
    ],
)
def test_gaps_and_overlaps_are_found_in_any_order(places: list[Any], words: str) -> None:
    for order in itertools.islice(itertools.permutations(places), 24):
        with pytest.raises(ValueError, match=words):
            check_whole(blocks(*order, shape=(4, 4)))
