from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.tree import flatten, structure_digest, tensor_hash, unflatten
from everstep.errors import UnsupportedState

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=20),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=4),
    ),
    max_leaves=15,
)


def round_trip(tree: Any) -> Any:
    structure, tensors = flatten(tree, path="part")
    return unflatten(json.loads(json.dumps(structure)), tensors)


def digest(tree: Any) -> str:
    structure, tensors = flatten(tree, path="part")
    return structure_digest(structure, {path: tensor_hash(tensor) for path, tensor in tensors.items()})


@given(trees)
@settings(deadline=None)
def test_state_survives_the_file_with_types_and_bits(tree: Any) -> None:
    assert repr(round_trip(tree)) == repr(tree)


def test_arrays_counters_and_special_numbers_survive() -> None:
    tree = {
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "scalar": np.float64(0.1),
        "counter": Counter({30: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "infinite": -math.inf,
    }
    back = round_trip(tree)
    assert back["array"].dtype == np.uint32 and back["array"].tolist() == tree["array"].tolist()
    assert isinstance(back["scalar"], np.float64)
    assert list(back["counter"].elements()) == [30, 30]
    assert (back["ordered"], back["infinite"]) == (tree["ordered"], -math.inf)


@given(st.dictionaries(st.text(max_size=4), leaves, min_size=2, max_size=5))
@settings(deadline=None)
def test_digest_does_not_depend_on_the_order_of_keys(tree: dict[str, Any]) -> None:
    assert digest(tree) == digest(dict(reversed(tree.items())))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ([1, 2], (1, 2)),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}),
        ({"a": torch.zeros(2)}, {"a": -torch.zeros(2)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
        ({1: 0}, {"1": 0}),
    ],
)
def test_digest_tells_apart_what_is_not_the_same_state(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_each_type_of_tensor_can_be_hashed(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 2).to(dtype)
    assert tensor_hash(tensor) == tensor_hash(tensor.t().contiguous().t())
    assert tensor_hash(tensor[:0]) != tensor_hash(tensor)
    assert tensor_hash(torch.tensor(1).to(dtype))


@pytest.mark.parametrize("value", [object(), {1}, torch.eye(2).to_sparse(), np.array([object()])])
def test_refuses_what_it_cannot_hold_and_says_where(value: Any) -> None:
    with pytest.raises(UnsupportedState, match="scheduler/deep/0"):
        flatten({"deep": [value]}, path="scheduler")


@pytest.mark.parametrize(
    "tree", [{1: torch.ones(2), "1": torch.zeros(2)}, {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}}]
)
def test_two_tensors_of_one_path_are_both_kept(tree: Any) -> None:
    assert repr(round_trip(tree)) == repr(tree)


def test_refuses_an_array_whose_type_the_file_cannot_hold() -> None:
    with pytest.raises(UnsupportedState, match=r"part/a: an array of type .*x.*one array for each field"):
        flatten({"a": np.zeros(2, dtype=[("x", "<i4"), ("y", "<f4")])}, path="part")
    for dtype in (">f4", "<U3", "S4", "<M8[ns]", "?", "<c16"):
        back = round_trip({"a": np.zeros(2, dtype=dtype)})["a"]
        assert back.dtype == np.dtype(dtype)


BASE = torch.arange(12.0)


@pytest.mark.parametrize(
    "other",
    [
        BASE[:6],
        BASE.view(3, 4),
        BASE[::2],
        BASE.view(torch.int32),
        torch.view_as_complex(BASE.view(6, 2)),
        torch.view_as_complex(BASE.view(6, 2)).conj(),
        BASE[:0],
    ],
    ids=["shorter", "shape", "stride", "dtype", "complex", "conjugate", "empty"],
)
def test_tensors_that_begin_at_one_address_are_filed_apart_and_tied_ones_together(other: torch.Tensor) -> None:
    structure, tensors = flatten({"one": BASE, "other": other, "again": BASE.detach()}, path="part")
    assert [(path, id(tensor)) for path, tensor in tensors.items()] == [
        ("part/one", id(BASE)),
        ("part/other", id(other)),
    ]
    assert [item["path"] for _, item in structure["items"]] == ["part/one", "part/other", "part/one"]


def test_empty_tensors_are_never_tied() -> None:
    empty = torch.empty(0, 4)
    assert list(flatten([empty, empty], path="part")[1]) == ["part/0", "part/1"]
