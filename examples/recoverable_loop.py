"""The loop of plain_loop.py, made recoverable: killed at any moment and started again, it ends bit for bit the same.

docs/recoverable.md goes through the lines that differ. Alone: `python examples/recoverable_loop.py`; two processes:
`torchrun --nproc-per-node 2 examples/recoverable_loop.py`; or as an Everstep job.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import everstep

STEPS = int(os.environ.get("STEPS", "200"))
BATCH = 32
"""Samples per step over all ranks."""


class Signs(Dataset[tuple[Tensor, Tensor]]):
    """Two kinds of noisy 8 x 8 pictures. Each is shifted at random whenever it is read, as augmentation does."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = torch.zeros(8, 8)
        picture[:, 3 + index % 2 :: 4] = 1.0
        shift = int(torch.randint(8, ()))
        return picture.roll(shift, dims=0) + 0.5 * torch.randn(8, 8), torch.tensor(index % 2)


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    run = everstep.Run(total_steps=STEPS, save_every=25, seed=1, checkpoint_directory="checkpoints")
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    model: Any = DistributedDataParallel(network) if world_size > 1 else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    dataset = Signs()
    sampler = everstep.ReplayableSampler(len(dataset), global_batch_size=BATCH, seed=1)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    run.warm_up(lambda: model(torch.zeros(1, 8, 8)).sum().backward())
    run.resume()
    loader = everstep.replayable_loader(dataset, sampler, sample_seed=1, num_workers=2)

    for step, batch in zip(run.steps(), run.batches(loader), strict=False):
        pictures, labels = batch.data
        loss = cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss, learning_rate=scheduler.get_last_lr()[0], span=batch.span)
        scheduler.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
