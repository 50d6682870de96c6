"""What a digest covers, and that a mismatch names the part that was forgotten."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR

from everstep.checkpoint import rng
from everstep.checkpoint.snapshot import collect, put_back, take
from everstep.data import ReplayableSampler
from everstep.errors import UsageError


def build() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "sampler": ReplayableSampler(40, global_batch_size=4, rank=0, world_size=1),
    }


def make_steps(parts: dict[str, Any], count: int) -> None:
    for _ in range(count):
        parts["optimizer"].zero_grad()
        parts["model"](torch.randn(8, 3)).square().mean().backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        parts["sampler"].commit(next(iter(parts["sampler"])).span)


@pytest.fixture
def trained() -> dict[str, Any]:
    parts = build()
    make_steps(parts, 3)
    return parts


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {part for part in one | other if one.get(part) != other.get(part)}


def test_restored_state_has_the_same_digest_in_each_part(trained: dict[str, Any]) -> None:
    saved = take(trained)
    states = collect(trained)
    fresh = build()
    put_back(fresh, states)
    rng.restore(states["rng"])
    assert take(fresh).digests() == saved.digests()
    assert set(saved.digests()) == {"model", "optimizer", "scheduler", "sampler", "rng"}


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "scheduler", "sampler"])
def test_forgotten_part_and_no_other_is_named(trained: dict[str, Any], forgotten: str) -> None:
    saved, states = take(trained).digests(), collect(trained)
    fresh = build()
    put_back(fresh, states)
    rng.restore(states["rng"])
    if forgotten == "optimizer":
        fresh["optimizer"].state.clear()
    elif forgotten == "scheduler":
        fresh["scheduler"] = LambdaLR(fresh["optimizer"], lambda step: 1 / (1 + step))
    else:
        fresh[forgotten].load_state_dict(build()[forgotten].state_dict())
        rng.restore(states["rng"])
    assert differing(take(fresh).digests(), saved) == {forgotten}


def test_new_scheduler_that_nobody_tracks_is_noticed_by_its_learning_rate(trained: dict[str, Any]) -> None:
    saved = take(trained).digests()
    LambdaLR(trained["optimizer"], lambda step: 1 / (1 + step))
    assert differing(take(trained).digests(), saved) == {"scheduler"}


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: random.random(),
        lambda parts: np.random.rand(),
        lambda parts: torch.rand(1),
        lambda parts: parts["model"][1].running_mean.add_(1),
        lambda parts: next(iter(parts["optimizer"].state.values()))["step"].add_(1),
        lambda parts: next(iter(parts["optimizer"].state.values()))["exp_avg_sq"].mul_(1.0000001),
        lambda parts: parts["optimizer"].param_groups[0].update(weight_decay=0.5),
    ],
)
def test_each_thing_that_decides_the_next_step_is_in_the_digest(trained: dict[str, Any], change: Any) -> None:
    saved = take(trained).digests()
    change(trained)
    assert len(differing(take(trained).digests(), saved)) == 1


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [2, 4]),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    ],
)
def test_other_schedulers_are_restored_to_the_same_rates(schedule: Any) -> None:
    def build_with() -> dict[str, Any]:
        parts = build()
        parts["scheduler"] = schedule(parts["optimizer"])
        return parts

    old, new = build_with(), build_with()
    make_steps(old, 3)
    put_back(new, collect(old))
    make_steps(old, 3)
    make_steps(new, 3)
    assert new["scheduler"].get_last_lr() == old["scheduler"].get_last_lr()


def test_learning_rate_belongs_to_the_optimizer_where_no_scheduler_is_tracked(trained: dict[str, Any]) -> None:
    del trained["scheduler"]
    saved = take(trained).digests()
    trained["optimizer"].param_groups[0]["lr"] = 0.5
    assert differing(take(trained).digests(), saved) == {"optimizer"}


def test_refuses_to_restore_other_parts_than_were_saved(trained: dict[str, Any]) -> None:
    states = collect(trained)
    del trained["scheduler"]
    with pytest.raises(UsageError, match="Track the same parts"):
        put_back(trained, states)


def test_seeds_of_ranks_differ_and_repeat() -> None:
    seeds = [rng.rank_seed(7, rank=rank) for rank in range(100)]
    assert len(set(seeds)) == 100 and seeds[3] == rng.rank_seed(7, rank=3)
    assert all(0 <= seed < 2**63 for seed in seeds)
