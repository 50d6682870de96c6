"""Sharded state, and state that is each rank's own: saved by real ranks, resumed by as many, by more and by fewer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from guide_blocks import quotes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.checkpoint.manifest import complete_checkpoints


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Parts = dict[str, Any]


def network() -> nn.Sequential:
    """Seven rows and five can be shared evenly by neither two ranks nor four."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def with_adam(model: nn.Module) -> Parts:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def fully_sharded() -> Parts:
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return with_adam(model)


def plain() -> Parts:
    return with_adam(network())


def replicated() -> Parts:
    return with_adam(DistributedDataParallel(network()))


def tensor_parallel() -> Parts:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return with_adam(parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def zero() -> Parts:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def go_on(root: Path, parts: Parts, *, total_steps: int, inspect: Callable[[Parts], Any] = lambda parts: None) -> Any:
    """Resume, look, and train to `total_steps` on data that depends on the step alone. Returns what `inspect` saw."""
    run = everstep.Run(total_steps=total_steps, save_every=1000, checkpoint_directory=root)
    run.track(**{"model": None, "optimizer": None, "scheduler": None, "sampler": None, **parts})
    run.resume()
    seen = inspect(parts)
    for step in run.steps():
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        parts["optimizer"].zero_grad()
        loss = (parts["model"](batch) - 1).square().mean()
        loss.backward()
        parts["optimizer"].step()
        if "scheduler" in parts:
            parts["scheduler"].step()
        run.report(loss=loss)
    return seen


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_and_moments(parts: Parts) -> list[torch.Tensor]:
    """Of every parameter, whole, in order."""
    states = parts["optimizer"].state
    return [
        whole(tensor)
        for parameter in parts["model"].parameters()
        for tensor in (parameter, *(states[parameter][name] for name in ("exp_avg", "exp_avg_sq") if states[parameter]))
    ]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train(root: Path, build: Callable[[], Parts], *, world_size: int, steps: int = 3) -> list[list[torch.Tensor]]:
    """Train and save; what each rank holds at the end."""

    def work(rank: int) -> list[torch.Tensor]:
        parts = build()
        go_on(root, parts, total_steps=steps)
        return weights_and_moments(parts)

    return run_ranks(root, work, world_size=world_size)


def resume(root: Path, build: Callable[[], Parts], *, world_size: int, steps: int = 3) -> list[Any]:
    """What each rank holds right after the resume, or its error."""
    return run_ranks(
        root,
        lambda rank: go_on(root, build(), total_steps=steps, inspect=weights_and_moments),
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("build", "before", "again", "after"),
    [
        (fully_sharded, 2, fully_sharded, 1),
        (fully_sharded, 1, fully_sharded, 2),
        (fully_sharded, 2, fully_sharded, 4),
        (fully_sharded, 2, plain, 1),
        (replicated, 2, fully_sharded, 2),
        (replicated, 2, replicated, 3),
        (tensor_parallel, 2, tensor_parallel, 2),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_weights_and_moments_are_the_same_however_they_are_shared_afterwards(
    tmp_path: Path, build: Callable[[], Parts], before: int, again: Callable[[], Parts], after: int
) -> None:
    saved = train(tmp_path, build, world_size=before)
    assert equal(saved[0], saved[-1]) and len(saved[0]) > 5
    for loaded in resume(tmp_path, again, world_size=after):
        assert equal(loaded, saved[0])


def test_each_rank_of_a_sharded_model_writes_its_own_part_and_no_more(tmp_path: Path) -> None:
    def build() -> Parts:
        model = nn.Linear(256, 512)
        fully_shard(model)
        return with_adam(model)

    def work(rank: int) -> None:
        parts = build()
        run = everstep.Run(total_steps=1, checkpoint_directory=tmp_path / "c")
        run.track(**parts, scheduler=None, sampler=None)
        run.resume()
        for _ in run.steps():
            parts["model"](torch.ones(1, 256)).sum().backward()
            parts["optimizer"].step()

    assert run_ranks(tmp_path, work, world_size=2) == [None, None]
    manifest = complete_checkpoints(tmp_path / "c")[-1]
    shards = [entry.size_bytes for entry in manifest.files if entry.name.startswith("shard-")]
    state_bytes = 3 * (256 * 512 + 512) * 4
    assert max(shards) < 0.51 * state_bytes and state_bytes <= sum(shards) < 1.01 * state_bytes


# --- What is each rank's own ---------------------------------------------------------------------------------------


def test_sharded_optimizer_goes_on_bit_for_bit_with_as_many_ranks_and_is_refused_with_others(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()

    def final(root: Path, steps: int) -> list[Any]:
        def work(rank: int) -> Any:
            parts = zero()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                go_on(root, parts, total_steps=steps)
            rates = [group["lr"] for group in parts["optimizer"].param_groups]
            return [p.detach().clone() for p in parts["model"].parameters()], rates, [str(w.message) for w in said]

        return run_ranks(root, work, world_size=2)

    uninterrupted = final(tmp_path / "whole", 6)
    final(tmp_path / "cut", 3)
    resumed = final(tmp_path / "cut", 6)
    for (one, rates, said), (other, other_rates, _) in zip(resumed, uninterrupted, strict=True):
        assert equal(one, other) and rates == other_rates
        assert not [text for text in said if "not the tracked optimizer" in text]
    (error,) = resume(tmp_path / "cut", zero, world_size=1, steps=6)
    assert isinstance(error, everstep.UsageError)
    assert "of 2 ranks with 1: optimizer differed between its ranks" in str(error)


def normalized() -> Parts:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def averages(parts: Parts) -> list[torch.Tensor]:
    return [buffer.detach().clone() for name, buffer in parts["model"].named_buffers() if "running" in name]


@pytest.mark.parametrize("wrapped", [True, False], ids=["handed on by DDP", "nobody's but the rank's"])
def test_averages_of_each_rank_go_on_with_other_ranks_only_where_rank_0_gives_them_to_all(
    tmp_path: Path, wrapped: bool
) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        parts = normalized()
        if wrapped:
            parts["model"] = DistributedDataParallel(parts["model"])
        run = everstep.Run(total_steps=2, checkpoint_directory=tmp_path)
        run.track(**parts, scheduler=None, sampler=None)
        run.resume()
        for _ in run.steps():
            parts["model"](torch.randn(8, 6)).sum().backward()
            if not wrapped:
                for parameter in parts["model"].parameters():
                    dist.all_reduce(parameter.grad)
            parts["optimizer"].step()
        return averages(parts)

    saved = run_ranks(tmp_path, work, world_size=2)
    assert not equal(saved[0], saved[1])
    same = run_ranks(
        tmp_path, lambda rank: go_on(tmp_path, normalized(), total_steps=2, inspect=averages), world_size=2
    )
    assert equal(same[0], saved[0]) and equal(same[1], saved[1])
    (other,) = run_ranks(
        tmp_path, lambda rank: go_on(tmp_path, normalized(), total_steps=2, inspect=averages), world_size=1
    )
    if wrapped:
        assert equal(other, saved[0]), "what every rank would have had in the next forward pass"
    else:
        assert isinstance(other, everstep.UsageError)
        assert "model/1.running_mean, model/1.running_var differed between its ranks" in str(other)


def test_stages_of_a_pipeline_keep_their_own_weights_and_are_refused_with_other_ranks(tmp_path: Path) -> None:
    """Rank 0 holds one layer and rank 1 another: torch's own planning would take two plain tensors for copies."""

    def stage(rank: int) -> Parts:
        model = nn.Sequential()
        model.add_module(f"layer{rank}", nn.Linear(6, 6))
        nn.init.constant_(model[0].weight, rank + 1)  # type: ignore[arg-type]
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def look(parts: Parts) -> float:
        return float(parts["model"][0].weight.mean())

    def work(rank: int) -> float:
        parts = stage(rank)
        before = go_on(tmp_path, parts, total_steps=1, inspect=look)
        nn.init.constant_(parts["model"][0].weight, 9)
        return float(before)

    assert run_ranks(tmp_path, work, world_size=2) == [1, 2]
    trained = run_ranks(tmp_path, lambda rank: go_on(tmp_path, stage(rank), total_steps=1, inspect=look), world_size=2)
    assert trained[0] != trained[1] and 0 < trained[0] < 1 < trained[1] < 2.1
    (error,) = run_ranks(tmp_path, lambda rank: go_on(tmp_path, stage(rank), total_steps=1), world_size=1)
    assert isinstance(error, everstep.UsageError) and "1: model differed between its ranks" in str(error)


def test_what_cannot_be_saved_in_parts_is_refused_at_track_or_named_when_training_begins(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        said = []
        run = everstep.Run(total_steps=1, checkpoint_directory=tmp_path)
        with pytest.raises(everstep.UsageError) as refused:
            run.track(model=FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
        said.append(str(refused.value))
        mesh = init_device_mesh("cpu", (2,))
        pending = nn.Module()
        pending.register_buffer("sums", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        run.track(model=pending, optimizer=None, scheduler=None, sampler=None)
        run.resume()
        with pytest.raises(everstep.UnsupportedState) as unsupported:
            next(run.steps())
        return [*said, str(unsupported.value)]

    for first, second in run_ranks(tmp_path, work, world_size=2):
        assert first in quotes() and "use torch.distributed.fsdp.fully_shard" in first.lower()
        assert second == "Cannot save model/sums: a DTensor with pending sums; call redistribute() on it first."


def test_generators_that_cannot_be_mapped_are_said_to_begin_anew(tmp_path: Path) -> None:
    train(tmp_path, replicated, world_size=2)

    def work(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            go_on(tmp_path, plain(), total_steps=3)
        return [str(warning.message) for warning in said]

    (said,) = run_ranks(tmp_path, work, world_size=1)
    assert [text for text in said if "saved by 2 ranks and is resumed with 1: the random generators cannot" in text]
