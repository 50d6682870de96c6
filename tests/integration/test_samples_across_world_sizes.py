"""World size 4, then 3, then 4: the same samples in the same order, and the loss within a band fixed beforehand."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import free_port, lines_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.data import ReplayableSampler

SIZE, SEED = 100, 11
TOTAL_STEPS, SAVE_EVERY = 12, 4
RELATIVE_BAND = 1e-5
"""Gradients are summed in another order, and Adam divides by their size; nothing else differs."""
ENOUGH_S = 90


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    """The first step of an optimizer imports half of torch: here once, and not in each forked rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()
    yield
    torch.set_num_threads(threads)


def train_rank(root: Path, rank: int, *, batch: int, drop_last: bool, until: int) -> None:
    """A training script: no dropout, and the loss weighted by sample count. It ends as if killed after `until`."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run = everstep.Run(
        total_steps=TOTAL_STEPS, save_every=SAVE_EVERY, seed=SEED, checkpoint_directory=root / "checkpoints"
    )
    torch.manual_seed(SEED)  # the same data and first weights on each rank
    inputs = torch.randn(SIZE, 8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL_STEPS)
    sampler = everstep.ReplayableSampler(
        SIZE, global_batch_size=batch, seed=SEED, drop_last=drop_last, uneven=batch % 12 != 0
    )
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    run.warm_up(lambda: model(inputs[:4]).sum().backward())
    run.resume()
    for step, indices in zip(run.steps(), run.batches(sampler.stream()), strict=False):
        optimizer.zero_grad()
        errors = (model(inputs[indices]) - inputs[indices][:, :4]).square().mean(1)
        # Not mean(): a rank that has no sample of an uneven tail must come to 0 and not to NaN.
        loss = errors.sum() / max(1, len(indices)) * indices.span.weight
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        with run.wait():
            dist.all_reduce(mean)
        run.report(loss=mean / dist.get_world_size(), learning_rate=scheduler.get_last_lr()[0], span=indices.span)
        if step == until + 1:
            run._stop()  # what was copied before is brought to disk
            break  # a step is finished when the next one is asked for: this one never is


def train(root: Path, *, world: int, batch: int, drop_last: bool, generation: int, until: int) -> list[dict[int, Any]]:
    """Each rank's step lines of one generation, which ends after step `until`. Ranks are forked: torch is loaded."""
    logs = root / f"logs-{generation}"
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "EVERSTEP_LOG_DIR": str(logs),
    }

    def rank_main(rank: int) -> None:
        for name in [name for name in os.environ if name.startswith("EVERSTEP_")]:
            del os.environ[name]
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        train_rank(root, rank, batch=batch, drop_last=drop_last, until=until)
        os._exit(0)  # it does not wait for the others

    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=rank_main, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(ENOUGH_S)
        if rank.is_alive():
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world
    logged = [lines_of(logs / f"rank-{rank}.jsonl") for rank in range(world)]
    expected = ("ends after step", "the random generators cannot be mapped")
    said = [line["text"] for lines in logged for line in lines if line["kind"] == "warning"]
    assert [text for text in said if not any(words in text for words in expected)] == []
    return [{line["step"]: line for line in lines if line["kind"] == "step"} for lines in logged]


def spans(ranks: list[dict[int, Any]]) -> dict[int, tuple[int, int, int]]:
    """Step to the span that all ranks named; their checksums must add up to what the order has there."""
    found = {}
    for step in ranks[0]:
        named = {(rank[step]["epoch"], rank[step]["span_start"], rank[step]["span_stop"]) for rank in ranks}
        assert len(named) == 1, f"step {step}: {named}"
        found[step] = named.pop()
    return found


def digests(ranks: list[dict[int, Any]]) -> dict[int, int]:
    return {step: sum(int(rank[step]["indices_digest"], 16) for rank in ranks) % 2**64 for step in ranks[0]}


# 12 is divisible by 4 and by 3. Of 14, ranks get three or four samples at 4 ranks and four or five at 3; the tail of an
# epoch is of two samples, so that some ranks get none.
@pytest.mark.parametrize(("batch", "drop_last"), [(12, True), (14, False)])
def test_four_ranks_then_three_then_four_train_on_the_same_samples(tmp_path: Path, batch: int, drop_last: bool) -> None:
    whole = train(tmp_path / "whole", world=4, batch=batch, drop_last=drop_last, generation=1, until=TOTAL_STEPS)
    parts = [
        train(tmp_path / "again", world=world, batch=batch, drop_last=drop_last, generation=number, until=until)
        for number, (world, until) in enumerate(((4, SAVE_EVERY), (3, 2 * SAVE_EVERY), (4, TOTAL_STEPS)), start=1)
    ]
    assert [sorted(part[0]) for part in parts] == [
        list(range(first, first + SAVE_EVERY)) for first in range(1, TOTAL_STEPS, SAVE_EVERY)
    ]
    order = ReplayableSampler(SIZE, global_batch_size=batch, seed=SEED, drop_last=drop_last, rank=0, world_size=1)
    expected, sums = {}, {}
    for step, indices in zip(range(1, TOTAL_STEPS + 1), order.stream(), strict=False):
        span = indices.span
        expected[step] = (span.epoch, span.start, span.stop)
        sums[step] = int(span.indices_digest or "", 16)
    for run in ([whole], parts):
        assert {step: span for part in run for step, span in spans(part).items()} == expected
        assert {step: total for part in run for step, total in digests(part).items()} == sums
    before = whole[0]
    worst = 0.0
    for part in parts:
        for step, line in part[0].items():
            worst = max(worst, abs(line["loss"] - before[step]["loss"]) / before[step]["loss"])
            assert line["learning_rate"] == before[step]["learning_rate"]
    assert worst <= RELATIVE_BAND, f"the losses are {worst:.1e} apart"
    assert before[TOTAL_STEPS]["loss"] < before[1]["loss"], "it learns"
