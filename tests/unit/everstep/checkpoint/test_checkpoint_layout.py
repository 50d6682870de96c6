"""Which rank writes what: everything once, without gaps, each block where its type can be read in place."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from everstep.checkpoint.arena import Arena
from everstep.checkpoint.layout import Layout, plan_layout, signature
from tests.fakes.threaded_team import on_each_rank

MIXED = {
    "model/a": torch.arange(7, dtype=torch.uint8),
    "model/b": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "model/c": torch.tensor(3.5),
    "model/d": torch.arange(5, dtype=torch.bfloat16),
    "model/empty": torch.empty(0, 4),
    "rng/torch": torch.arange(9, dtype=torch.uint8),
}


def plan(world_size: int, tensors: dict[str, torch.Tensor]) -> list[Layout]:
    return on_each_rank(world_size, lambda team: plan_layout(tensors, team))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_tensor_that_all_ranks_hold_is_written_by_exactly_one(world_size: int) -> None:
    layouts = plan(world_size, MIXED)
    assert Counter(chunk.key for layout in layouts for chunk in layout.chunks) == Counter(MIXED.keys())


def test_ranks_share_the_bytes_that_all_of_them_hold() -> None:
    tensors = {f"model/{number}": torch.zeros(1000) for number in range(8)}
    assert [layout.size_bytes for layout in plan(4, tensors)] == [8000] * 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_lie_side_by_side_and_each_at_a_multiple_of_its_item(world_size: int) -> None:
    for layout in plan(world_size, MIXED):
        at = 0
        for chunk in layout.chunks:
            assert chunk.at == at
            assert chunk.at % getattr(torch, chunk.dtype).itemsize == 0
            at += chunk.size_bytes
        assert at == layout.size_bytes


def test_copy_puts_the_live_values_where_the_layout_says() -> None:
    (layout,) = plan(1, MIXED)
    changed = {key: tensor + 1 for key, tensor in MIXED.items()}
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)

    def view(at: int, *, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(sizes).numel() * dtype.itemsize
        return memory[at : at + count].view(dtype).view(sizes)

    layout.copy(changed, view)
    for chunk in layout.chunks:
        found = view(chunk.at, dtype=getattr(torch, chunk.dtype), sizes=chunk.sizes)
        assert torch.equal(found, changed[chunk.key])


@pytest.fixture
def small() -> Iterator[tuple[dict[str, torch.Tensor], Layout, Arena]]:
    tensors = {"model/a": torch.full((2, 3), 7.0)}
    (layout,) = plan(1, tensors)
    arena = Arena(layout.size_bytes)
    yield tensors, layout, arena
    arena.close()


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "fake"),
    [
        (torch.accelerator, "is_available", lambda: False),
        (torch.accelerator, "is_available", lambda: True),
        (threading.Thread, "start", no_thread),
    ],
    ids=["beside", "behind", "no thread"],
)
def test_what_else_reads_the_state_is_done_once_when_all_is_copied(
    small: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fake: Any
) -> None:
    tensors, layout, arena = small
    monkeypatch.setattr(owner, name, fake)
    looked: list[float] = []
    layout.copy(tensors, arena.view, meanwhile=lambda: looked.append(float(tensors["model/a"].sum())))
    assert looked == [42.0]
    assert arena.view(0, dtype=torch.float32, sizes=(2, 3)).eq(7).all()


@pytest.mark.parametrize("accelerated", [False, True])
def test_what_fails_beside_a_copy_fails_it(small: Any, monkeypatch: pytest.MonkeyPatch, accelerated: bool) -> None:
    tensors, layout, arena = small
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerated)

    def look() -> None:
        raise ValueError("cannot look")

    with pytest.raises(ValueError, match="cannot look"):
        layout.copy(tensors, arena.view, meanwhile=look)


def test_copies_a_tensor_that_took_the_place_of_one_of_the_same_shape(small: Any) -> None:
    tensors, layout, arena = small
    for value in (1.0, 2.0):
        tensors["model/a"] = torch.full((2, 3), value)
        layout.copy(tensors, arena.view)
        assert arena.view(0, dtype=torch.float32, sizes=(2, 3)).eq(value).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("model/a"),
        lambda tensors: tensors.update({"model/new": torch.zeros(1)}),
        lambda tensors: tensors.update({"model/b": torch.zeros(3, 2, dtype=torch.float64)}),
        lambda tensors: tensors.update({"model/b": torch.zeros(2, 3)}),
    ],
)
def test_signature_tells_when_a_layout_does_not_fit_any_more(change: Any) -> None:
    tensors = dict(MIXED)
    assert signature(tensors) == signature({key: tensor + 1 for key, tensor in MIXED.items()})
    change(tensors)
    assert signature(tensors) != signature(MIXED)
