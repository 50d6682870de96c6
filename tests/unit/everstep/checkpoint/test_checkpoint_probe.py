"""A probe sees in a few values what a step moved, and leaves the state as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.checkpoint.probe import PROBED_STEPS, StateProbes, probe
from everstep.checkpoint.snapshot import take


def build() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


def step(parts: dict[str, Any]) -> None:
    parts["optimizer"].zero_grad()
    parts["model"](torch.randn(8, 40)).square().mean().backward()
    parts["optimizer"].step()


def test_equal_state_has_equal_probes_and_a_step_moves_each_part() -> None:
    one, other = build(), build()
    assert probe(one) == probe(other)
    before = probe(one)
    step(one)
    assert {part for part, digest in probe(one).items() if digest == before[part]} == set()
    assert set(before) == {"model", "optimizer", "rng"}


def test_looks_at_the_first_steps_after_it_began_only() -> None:
    parts, probes = build(), StateProbes()
    assert probes.after_step(parts) is None
    for _ in range(2):
        probes.begin(parts)
        seen = []
        for _ in range(PROBED_STEPS + 1):
            step(parts)
            seen.append(probes.after_step(parts))
        assert [look is None for look in seen] == [False] * PROBED_STEPS + [True]


def test_parts_that_a_step_did_not_move_are_told() -> None:
    parts, probes = build(), StateProbes()
    probes.begin(parts)
    torch.randn(1)
    look = probes.after_step(parts)
    assert look is not None
    assert look["unmoved"] == ["model", "optimizer"]
    assert set(look["digests"]) == {"model", "optimizer", "rng"}
    step(parts)
    assert probes.after_step(parts) == {"digests": probe(parts), "unmoved": []}


def test_probe_changes_nothing() -> None:
    parts = build()
    step(parts)
    before = take(parts).digests()
    probe(parts)
    assert take(parts).digests() == before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.ones(3, 5).t(),
        torch.ones(2000, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.complex64),
    ],
)
def test_tensors_of_every_shape_and_type_can_be_looked_at(tensor: torch.Tensor) -> None:
    before = probe({"holder": Holder(tensor)})
    assert set(before) == {"holder", "rng"}
    if tensor.numel():
        tensor[(0,) * tensor.dim()] = 0 if tensor.dim() else 1
        assert probe({"holder": Holder(tensor)})["holder"] != before["holder"]


@pytest.mark.parametrize("value", [object(), {1, 2}])
def test_value_that_no_checkpoint_can_hold_is_passed_over(value: object) -> None:
    assert probe({"odd": Holder(value)})["odd"] == probe({"odd": Holder(object())})["odd"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1.0, 1),
        ("a", "b"),
        (None, False),
        (b"a", b"b"),
        ([1, 2], [2, 1]),
        (np.arange(3), np.arange(1, 4)),
        ({"a": 1}, {"b": 1}),
        ({"a": {"b": (1, 2)}}, {"a": {"b": (1, 3)}}),
    ],
)
def test_numbers_and_words_count_in_full(one: object, other: object) -> None:
    assert probe({"part": Holder(one)})["part"] != probe({"part": Holder(other)})["part"]


def test_order_of_keys_does_not_count() -> None:
    assert probe({"part": Holder({1: 2, "a": 3})}) == probe({"part": Holder({"a": 3, 1: 2})})
