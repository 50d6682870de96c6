"""A structure's text is written anew for whatever differs from the save before, however little."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from enum import IntEnum
from typing import Any
from unittest import mock

import pytest
import torch

from everstep.checkpoint import structure_texts
from everstep.checkpoint.structure_texts import StructureTexts
from everstep.checkpoint.tree import flatten


class Mode(IntEnum):
    WARM = 1


def structure(tree: Any) -> Any:
    return flatten(tree, path="part")[0]


def square() -> torch.Tensor:
    return torch.zeros(4, 4)


BEFORE: dict[str, Any] = {
    "weight": square(),
    "tied": square(),
    "rate": 0.5,
    "count": 1,
    "nested": {"names": ["a", "b"]},
}


@pytest.mark.parametrize(
    "after",
    [
        {**BEFORE, "weight": torch.zeros(4, 4, dtype=torch.int32)},
        {**BEFORE, "weight": torch.zeros(2, 8)},
        {**BEFORE, "weight": square().t()},
        {**BEFORE, "tied": BEFORE["weight"]},
        {**BEFORE, "rate": math.nextafter(0.5, 1)},
        {**BEFORE, "count": True},
        {**BEFORE, "count": 1.0},
        {**BEFORE, "count": Mode.WARM},
        {**BEFORE, "nested": {"names": ["a", "c"]}},
        {**BEFORE, "nested": {"names": ("a", "b")}},
        {**BEFORE, "nested": OrderedDict(names=["a", "b"])},
        dict(reversed(BEFORE.items())),
        {**BEFORE, "more": None},
        {key: value for key, value in BEFORE.items() if key != "tied"},
    ],
    ids=str,
)
def test_text_is_that_of_the_structure_given_now(after: Any) -> None:
    texts = StructureTexts()
    for tree in (BEFORE, after, BEFORE, after, after):
        assert texts.of("part", structure(tree)) == json.dumps(structure(tree))


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (0, False), (1, 1.0), ("1", 1), (None, 0)])
def test_values_that_python_takes_for_equal_are_told_apart(one: Any, other: Any) -> None:
    texts = StructureTexts()
    assert [texts.of("part", [value]) for value in (one, other, one)] == [json.dumps([v]) for v in (one, other, one)]


def test_parts_of_the_same_structure_have_their_own_text() -> None:
    texts = StructureTexts()
    assert [texts.of("model", [1]), texts.of("optimizer", [2]), texts.of("model", [1])] == ["[1]", "[2]", "[1]"]


def test_a_value_of_a_kind_of_its_own_is_written_each_time() -> None:
    texts = StructureTexts()
    assert texts.of("part", [Mode.WARM, 2]) == texts.of("part", [Mode.WARM, 2]) == "[1, 2]"
    assert texts.of("part", [Mode.WARM, 3]) == "[1, 3]"


def test_same_structure_is_written_once() -> None:
    texts = StructureTexts()
    with mock.patch.object(structure_texts.json, "dumps", wraps=json.dumps) as written:
        for _ in range(3):  # the numbers live in tensors, which are no part of it; NaN is one to marshal
            texts.of("part", structure({"weight": torch.rand(3), "loss": math.nan}))
    assert written.call_count == 1
