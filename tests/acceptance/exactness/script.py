"""The training script of `make exactness`: everything that a resume can lose, in a model of a few thousand weights.

Dropout, batch averages that differ between ranks, AdamW, a schedule that computes each rate from the one before, a
scaler that grows, averaged weights, accumulated gradients, draws from all three generators, and random augmentation in
the loader. Runs under the runner and in forked ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import everstep
from everstep.checkpoint import rng
from everstep.data import SpannedBatch

SAMPLES, GLOBAL_BATCH, MICRO_BATCHES = 203, 16, 2
"""An epoch of 12 steps, so that epochs end all the time; eleven samples are left out of each."""
FEATURES, WIDTH = 16, 48
FORGETS = ("optimizer", "rng", "sampler")


class Samples:
    """Features and a target; the features are augmented at random, as a loader's worker would."""

    def __init__(self, seed: int) -> None:
        self._data = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = self._data[index]
        return features + 0.01 * float(np.random.standard_normal()), features.sin().sum().view(1)


def new_network() -> nn.Sequential:
    first = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1))
    second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(first, second, nn.Linear(WIDTH, 1))


def wrap(network: nn.Sequential, wrapping: str) -> nn.Module:
    if wrapping == "ddp":
        # Buckets this small are several, as those of a large model are: their layout then matters.
        return DistributedDataParallel(network, bucket_cap_mb=0.005)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*network, network]:
        fully_shard(block, mesh=mesh)
    return network


@contextlib.contextmanager
def gradients_kept_back(model: nn.Module, kept_back: bool) -> Iterator[None]:
    """All micro batches but the last leave their gradients on this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not kept_back)
        yield
    elif kept_back:
        assert isinstance(model, DistributedDataParallel)
        with model.no_sync():
            yield
    else:
        yield


class Averages:
    """A moving average of the weights, as many scripts keep one: state of the user's own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._averages = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def follow(self) -> None:
        for name, weight in self._model.named_parameters():
            self._averages[name].mul_(0.9).add_(weight, alpha=0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._averages)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._averages = {name: average.clone() for name, average in state.items()}


def forward_backward(model: nn.Module, scaler: torch.amp.GradScaler, batch: SpannedBatch) -> Tensor:
    """The loss of one step; draws from each generator."""
    features, wanted = batch.data
    total = torch.zeros(())
    pieces = list(zip(features.chunk(MICRO_BATCHES), wanted.chunk(MICRO_BATCHES), strict=True))
    for number, (x, y) in enumerate(pieces, start=1):
        with gradients_kept_back(model, number < len(pieces)):
            noisy = x + 0.01 * torch.randn_like(x)
            target = y + 0.01 * float(np.random.standard_normal())
            loss = (model(noisy) - target).square().mean() * (1 + 0.01 * random.random()) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.detach()
    return total


def train(arguments: argparse.Namespace) -> None:
    run = everstep.Run(
        total_steps=arguments.steps,
        save_every=arguments.save_every,
        seed=arguments.seed,
        memory_every=arguments.memory_every,
        memory_partner=arguments.memory_partner,
    )
    model = wrap(new_network(), arguments.wrapping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=arguments.steps, eta_min=1e-4)
    sampler = new_sampler(arguments)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=9)
    averages = Averages(model)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, scaler=scaler, averages=averages)
    run.warm_up(lambda: forward_backward(model, scaler, next(iter(new_loader(arguments, sampler, workers=0)))))
    if run.resume() and arguments.forget:
        sampler = forget(arguments, run, optimizer, sampler)
    loader = new_loader(arguments, sampler, workers=arguments.workers)
    for _, batch in zip(run.steps(), run.batches(loader), strict=False):
        started = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        loss = forward_backward(model, scaler, batch)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = scheduler.get_last_lr()[0]
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        averages.follow()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        run.report(loss=loss, learning_rate=rate, grad_norm=norm, span=batch.span)
        time.sleep(max(0.0, arguments.step_time - (time.monotonic() - started)))
    dump_final(
        {
            "model": (model.module if isinstance(model, DistributedDataParallel) else model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "sampler": sampler.state_dict(),
            "scaler": scaler.state_dict(),
            "averages": averages.state_dict(),
            "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
            "steps": run.step,
        }
    )


def new_sampler(arguments: argparse.Namespace) -> everstep.ReplayableSampler:
    return everstep.ReplayableSampler(SAMPLES, global_batch_size=GLOBAL_BATCH, seed=arguments.seed)


def new_loader(arguments: argparse.Namespace, sampler: everstep.ReplayableSampler, *, workers: int) -> Any:
    # Forked here: rank and worker are single-threaded, and a fresh interpreter would take seconds to load torch.
    context: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    seed = arguments.seed
    return everstep.replayable_loader(Samples(seed), sampler, sample_seed=seed, num_workers=workers, **context)


def forget(
    arguments: argparse.Namespace,
    run: everstep.Run,
    optimizer: torch.optim.Optimizer,
    sampler: everstep.ReplayableSampler,
) -> everstep.ReplayableSampler:
    """Lose a part after the resume, as a careless script would; returns the sampler to train with."""
    match arguments.forget:
        case "optimizer":
            optimizer.state.clear()
        case "rng":
            rng.restore = lambda state: None
        case "sampler":
            sampler = new_sampler(arguments)
            run.track(sampler=sampler)
    return sampler


# --- What the run ends with: hashed here and not by what is under test ------------------------------------------------


def dump_final(state: Mapping[str, Any]) -> None:
    path = Path(os.environ["EVERSTEP_LOG_DIR"]) / f"final-{os.environ['RANK']}.json"
    path.write_text(json.dumps(dict(fingerprints("", state))))


def fingerprints(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(path, SHA-256) of each tensor, and (path, exact words) of each number, anywhere in a state."""
    if isinstance(value, DTensor):
        yield f"{path}@placed", f"{value.placements} {tuple(value.shape)}"
        value = value.to_local()
    if isinstance(value, Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        yield path, f"{value.dtype} {value.shape} {content}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from fingerprints(f"{path}/{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from fingerprints(f"{path}/{number}", item)
    else:
        yield path, value.hex() if isinstance(value, float) else repr(value)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrapping", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0, help="processes of each rank's loader")
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--memory-every", type=int, help="steps between snapshots in memory; none if left out")
    parser.add_argument("--memory-partner", action="store_true", help="keep them on another node as well")
    parser.add_argument("--forget", choices=FORGETS, help="lose this after a resume")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
