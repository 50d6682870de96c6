"""A training script for tests of saving: small, deterministic, plain DDP or sharded by FSDP2, on CPU.

Parameters that FSDP2 splits unevenly, an optimizer with moments, a scheduler, dropout (so that the generators count).
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=37)
    parser.add_argument("--fsdp", action="store_true")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    run = everstep.Run(total_steps=arguments.steps, save_every=arguments.save_every, seed=5)
    width = arguments.width
    model: nn.Module = nn.Sequential(
        nn.Linear(16, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 16)
    )
    if arguments.fsdp:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[3], model[5]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=not arguments.fsdp)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=None)
    run.resume()
    for _ in run.steps():
        started = time.monotonic()
        optimizer.zero_grad()
        batch = torch.randn(8, 16)
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        run.report(loss=loss, learning_rate=scheduler.get_last_lr()[0])
        time.sleep(max(0.0, arguments.step_time - (time.monotonic() - started)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
