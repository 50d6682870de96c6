"""Each kind of state through the real writer and back: bit for bit the same, or refused with what to do instead."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.checkpoint.manifest import CheckpointName
from everstep.checkpoint.reader import read_checkpoint
from everstep.checkpoint.saver import News, Saver, SaveSettings
from everstep.checkpoint.tree import host_bytes
from everstep.ranks import Team

NAME = CheckpointName(generation=1, step=1)


@dataclasses.dataclass
class Holder:
    """A part of the user's own, as a hand-made average of weights would be."""

    state: Any

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    settings = SaveSettings(root=tmp_path, job="job-1", total_steps=1, parent=None, keep=10)
    saver = Saver(settings, Team())
    yield saver
    saver.close()


def save(saver: Saver, state: Any) -> list[News]:
    saver.save(NAME, {"mine": Holder(state)})
    saver.settle()
    return [news for news in saver.news() if news.kind != "rehashed"]


def load(root: Path, state: Any) -> Any:
    loaded = read_checkpoint(NAME.directory(root), rank=0, world_size=1, tracked={"mine": Holder(state)})
    return loaded.states["mine"]


def numbers(count: int = 6) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(3))


TENSORS = {
    "bfloat16": numbers().bfloat16(),
    "float16": numbers().half(),
    "float8_e4m3fn": numbers().to(torch.float8_e4m3fn),
    "float8_e5m2": numbers().to(torch.float8_e5m2),
    "float8_e8m0fnu": numbers().abs().to(torch.float8_e8m0fnu),
    "float4_e2m1fn_x2": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "complex64": torch.complex(numbers(), numbers()),
    "complex128": torch.complex(numbers(), numbers()).to(torch.complex128),
    "conjugate": torch.complex(numbers(), numbers()).conj(),
    "bool": numbers() > 0,
    "uint64": torch.tensor([2**64 - 1], dtype=torch.uint64),
    "zero dimensions": torch.tensor(3.5),
    "zero-dimensional bool": torch.tensor(True),
    "empty": torch.zeros(0, 3),
    "empty in the middle": torch.zeros(2, 0, 3, dtype=torch.float64),
    "transposed": numbers().view(2, 3).t(),
    "every second column": numbers().view(2, 3)[:, ::2],
    "expanded": numbers().view(6, 1).expand(6, 4),
    "not a number": torch.tensor([float("nan"), -0.0, float("inf"), 1e-42]),
    "parameter": nn.Parameter(numbers()),
}


def test_every_kind_of_tensor_comes_back_bit_for_bit(saver: Saver, tmp_path: Path) -> None:
    assert [news.kind for news in save(saver, TENSORS)] == ["saved"]
    back = load(tmp_path, TENSORS)
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes(host_bytes(back[name])) == bytes(host_bytes(tensor.detach().resolve_conj())), name


def test_every_kind_of_value_comes_back_with_its_type(saver: Saver, tmp_path: Path) -> None:
    values = {
        "special": [float("inf"), -0.0, 2**200, "\ud800", None, True, (1, (2,)), b"\x00\xff"],
        "keys": {1: "int", "1": "str", False: "bool", None: "none", 2.5: "float"},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({3: 4}),
        "dates": np.array(["2020-01-01"], dtype="datetime64[s]"),
        "scalar": np.float32(0.1),
    }
    assert [news.kind for news in save(saver, values)] == ["saved"]
    assert repr(load(tmp_path, values)) == repr(values)


def test_keys_that_read_alike_do_not_overwrite_each_other(saver: Saver, tmp_path: Path) -> None:
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    save(saver, state)
    back = load(tmp_path, state)
    assert (back["a/b"], back["a"]["b"], back[1], back["1"]) == (1, 0, 2, 3)


def test_tied_weights_are_saved_once_and_come_back_tied(saver: Saver, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 80)
            self.head = nn.Linear(80, 1000, bias=False)
            self.head.weight = self.embedding.weight

    def size_of(state: Any) -> int:
        (news,) = save(saver, state)
        return news.size_bytes

    model = Tied()
    assert 1000 * 80 * 4 <= size_of(model.state_dict()) < 1.5 * 1000 * 80 * 4
    back = load(tmp_path, model.state_dict())
    assert back["head.weight"].data_ptr() == back["embedding.weight"].data_ptr()
    fresh = Tied()
    fresh.load_state_dict(back)
    assert fresh.head.weight.equal(model.head.weight) and fresh.head.weight is fresh.embedding.weight


def test_moments_keep_the_order_of_memory_that_a_fused_optimizer_walks_in(saver: Saver, tmp_path: Path) -> None:
    """With moments row by row beside a parameter that is channels_last, the fused AdamW makes other steps."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        torch.manual_seed(2)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 9, 9)).square().mean().backward()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, 3)
    save(saver, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh, again = build()
    back = load(tmp_path, None)
    fresh.load_state_dict(back["model"])
    again.load_state_dict(back["optimizer"])
    train(model, optimizer, 10)
    train(fresh, again, 10)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True))


Pair = namedtuple("Pair", "a b")
REFUSED = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "to_dense"),
    "compressed": (lambda: torch.eye(2).to_sparse_csr(), "to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "int_repr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "its values and its offsets"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "its values and its offsets",
    ),
    "meta": (lambda: torch.empty(2, device="meta"), "to_empty"),
    "not initialized": (lambda: nn.LazyLinear(2).weight, "run one batch"),
    "object": (lambda: object(), "tensors, numbers, strings"),
    "set": (lambda: {1}, "tensors, numbers, strings"),
    "named tuple": (lambda: Pair(1, 2), "tensors, numbers, strings"),
    "array of objects": (lambda: np.array([object()]), "Keep numbers in it"),
    "structured array": (lambda: np.zeros(2, dtype=[("a", "i4")]), "one array for each field"),
    "masked array": (lambda: np.ma.masked_array([1, 2], [0, 1]), "its data and its mask"),
    "odd key": (lambda: {(1, 2): 3}, "strings or numbers"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says of some of these that they are new, or old
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_come_back_is_refused_by_name_with_what_to_do(saver: Saver, kind: str) -> None:
    make, advice = REFUSED[kind]
    (news,) = save(saver, {"deep": [make()]})
    assert news.kind == "failed"
    assert "Cannot save mine/deep/0" in news.problem and advice in news.problem
