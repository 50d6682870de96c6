"""A plain torch training loop, as many scripts have it: what docs/recoverable.md makes recoverable in ten lines.

Alone: `python examples/plain_loop.py`; two processes: `torchrun --nproc-per-node 2 examples/plain_loop.py`.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    model: Any = DistributedDataParallel(network) if world_size > 1 else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    dataset = Signs()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, drop_last=True)
    loader = DataLoader(dataset, BATCH // world_size, sampler=sampler, num_workers=2, drop_last=True)

    step, epoch = 0, 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            loss = cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 10 == 0 and rank == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == STEPS:
                break
        epoch += 1


if __name__ == "__main__":
    main()
