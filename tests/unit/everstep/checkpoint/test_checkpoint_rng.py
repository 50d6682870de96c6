"""Generators of an accelerator, by a stand-in for its torch module: which devices are saved, and where they go back."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from everstep.checkpoint import rng
from everstep.checkpoint.tree import flatten, unflatten


class Devices:
    """As `torch.cuda` looks to its callers."""

    def __init__(self, count: int, *, current: int, used: set[int]) -> None:
        self.states = [torch.full((16,), 10 * index, dtype=torch.uint8) for index in range(count)]
        self.current, self.used = current, used

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.states[index].clone()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()

    def values(self) -> list[int]:
        return [int(state[0]) for state in self.states]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put_in(devices: Devices, kind: str = "cuda") -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: devices.current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(devices.states))
        monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda index: 100 * (index in devices.used))
        monkeypatch.setattr(torch, "get_device_module", lambda device: devices)

    return put_in


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    structure, tensors = flatten(state, path="rng")
    back: dict[str, Any] = unflatten(json.loads(json.dumps(structure)), tensors)
    return back


def test_generators_of_the_host_go_on_where_they_were() -> None:
    state = through_a_file(rng.capture())
    drawn = (random.random(), np.random.rand(), torch.rand(1))
    rng.restore(state)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


def test_each_device_that_the_rank_uses_is_saved_and_no_other(plug: Any) -> None:
    devices = Devices(4, current=2, used={0, 2})
    plug(devices)
    state = through_a_file(rng.capture())
    assert [data[0] for data in state["cuda"]] == [20, 0]
    devices.states = [torch.full((16,), 99, dtype=torch.uint8) for _ in range(4)]
    rng.restore(state)
    assert devices.values() == [0, 99, 20, 99]


def test_current_device_gets_its_state_back_under_another_number(plug: Any) -> None:
    plug(Devices(8, current=5, used={5}))
    state = through_a_file(rng.capture())
    after = Devices(1, current=0, used={0})
    plug(after)
    rng.restore(state)
    assert after.values() == [50]


def test_accelerator_of_another_kind_is_left_alone(plug: Any) -> None:
    plug(Devices(1, current=0, used={0}))
    state = through_a_file(rng.capture())
    other = Devices(1, current=0, used=set())
    other.states[0].fill_(7)
    plug(other, kind="xpu")
    rng.restore(state)
    assert other.values() == [7]
