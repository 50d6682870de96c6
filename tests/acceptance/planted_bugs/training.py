"""A real training job of one or two forked ranks that is killed, and resumed with a bug in it or without.

The script is one that a user might write: `everstep.Run`, DistributedDataParallel over gloo, dropout, AdamW, a
schedule, a sampler. Its reports are in the ranks' logs; `verdicts` judges them.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import everstep
from everstep.checkpoint.manifest import MANIFEST, CheckpointName
from everstep.data import IndexBatch

JOB = "planted"
TOTAL_STEPS, SAVE_EVERY, PARENT_STEP = 60, 10, 20
SAMPLES, GLOBAL_BATCH = 201, 8
"""An epoch of 25 steps, so that most replays cross into the next one; one sample is left out of each epoch."""
FEATURES = 12
LONGEST_S = 30.0
"""That a generation takes, on a machine that is busy with other work."""
CHECKPOINT_LIMIT_S = 20.0
EXTRA_STEPS = 2
"""That the resumed generation goes beyond the lost one's last."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, killed and resumed. `noise` is relative, on the loss and so on gradients, anew in each generation."""

    seed: int
    world_size: int = 2
    deterministic: bool = True
    noise: float = 0.0

    @property
    def killed_in(self) -> int:
        """The step that a rank is killed in."""
        return random.Random(f"kill {self.seed}").randint(PARENT_STEP + 4, PARENT_STEP + 9)


@dataclass
class Script:
    """What the script holds of one rank; a plant changes it."""

    case: Case
    run: everstep.Run
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    sampler: everstep.ReplayableSampler

    def track(self) -> None:
        self.run.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, sampler=self.sampler)


class Plant:
    """A bug in the resumed script; this one is none."""

    words = ""
    """What verification must say first."""
    exact_only = False
    """It can only be found where equal bits are promised."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def before_resume(self, script: Script) -> None:
        """Before the checkpoint is loaded."""

    def after_resume(self, script: Script) -> None:
        """After the checkpoint has been loaded, before the first step."""

    def batches(self, script: Script) -> Iterator[IndexBatch]:
        return script.sampler.stream()

    def in_step(self, script: Script, number: int) -> None:
        """First thing in the step of that number, counted from the resume."""


def new_model() -> nn.Module:
    network = nn.Sequential(nn.Linear(FEATURES, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 1))
    return DistributedDataParallel(network) if dist.is_initialized() else network


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def new_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * step / TOTAL_STEPS)))


def new_sampler(case: Case) -> everstep.ReplayableSampler:
    return everstep.ReplayableSampler(SAMPLES, global_batch_size=GLOBAL_BATCH, seed=case.seed)


def train(case: Case, *, rank: int, generation: int, last: int | None, plant: Plant) -> None:
    """One rank's script. `last`: kill this process in that step (first generation), or end after it (second)."""
    noise = random.Random(f"noise {case.seed} {generation} {rank}")
    data = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(case.seed))
    wanted = data.sin().sum(1, keepdim=True)
    run = everstep.Run(total_steps=TOTAL_STEPS, save_every=SAVE_EVERY, seed=case.seed, deterministic=case.deterministic)
    model = new_model()
    optimizer = new_optimizer(model)
    script = Script(case, run, rank, model, optimizer, new_scheduler(optimizer), new_sampler(case))
    script.track()
    plant.before_resume(script)
    run.resume()
    plant.after_resume(script)
    steps = itertools.count(1)
    for number, step, batch in zip(steps, run.steps(), plant.batches(script), strict=False):
        if generation > 1 and number > (last or 0) - PARENT_STEP:
            break
        plant.in_step(script, number)
        script.optimizer.zero_grad(set_to_none=True)
        loss = (script.model(data[list(batch)]) - wanted[list(batch)]).square().mean()
        loss = loss * (1.0 + case.noise * noise.gauss(0.0, 1.0))
        loss.backward()
        rate = script.scheduler.get_last_lr()[0]
        if generation == 1 and step == last:
            _await_checkpoint(run)
            os.kill(os.getpid(), signal.SIGKILL)
        script.optimizer.step()
        script.scheduler.step()
        run.report(loss=loss, learning_rate=rate, span=batch.span)


def _await_checkpoint(run: everstep.Run) -> None:
    """What the next generation resumes from is written by another process, while training goes on."""
    parent = CheckpointName(generation=1, step=PARENT_STEP).directory(run.checkpoint_directory)
    deadline = time.monotonic() + CHECKPOINT_LIMIT_S
    while not (parent / MANIFEST).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{parent} was not complete within {CHECKPOINT_LIMIT_S} s.")
        time.sleep(0.005)


# --- Ranks as processes: forked, since torch is loaded here and runs on one thread ----------------------------------


def warm_up() -> None:
    """Load once, before any fork, what each rank would load: torch imports much of itself at first use."""
    torch.set_num_threads(1)
    new_scheduler(new_optimizer(new_model()))
    everstep.Run  # noqa: B018 - imported when it is first named


def run_generation(case: Case, root: Path, *, generation: int, last: int, plant: Plant) -> None:
    """All ranks of one generation; the one that is killed takes its peers with it, since gloo sees it go.

    Raises `RuntimeError` where a rank failed that should not have.
    """
    logs = root / f"generation-{generation}"
    logs.mkdir(parents=True, exist_ok=True)
    ranks = [
        _fork(case, root, logs, rank=rank, generation=generation, last=last, plant=plant)
        for rank in range(case.world_size)
    ]
    ends = [_wait_for(pid) for pid in ranks]
    died = any(os.WIFSIGNALED(end) for end in ends)
    if (not died) if generation == 1 else any(ends):
        errors = "\n".join(path.read_text()[-2000:] for path in sorted(logs.glob("rank-*.err")))
        raise RuntimeError(f"Generation {generation} of {case} ended unexpectedly. The ranks said:\n{errors}")


def _wait_for(pid: int) -> int:
    """How a rank ended. One that hangs is killed: its peers go with it."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _fork(case: Case, root: Path, logs: Path, *, rank: int, generation: int, last: int, plant: Plant) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(case.world_size),
            "LOCAL_RANK": str(rank),
            "EVERSTEP_JOB": JOB,
            "EVERSTEP_GENERATION": str(generation),
            "EVERSTEP_RESUME": f"1:{PARENT_STEP}" if generation > 1 else "",
            "EVERSTEP_CHECKPOINT_DIR": str(root / "checkpoints"),
            "EVERSTEP_LOG_DIR": str(logs),
        }
        if case.world_size > 1:
            store = root / f"store-{generation}"
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.world_size)
        # Only the killed rank kills itself; another one waits for it in the next collective, or is one step behind.
        mine = last if generation > 1 or rank == case.seed % case.world_size else None
        with warnings.catch_warnings(action="ignore"):
            train(case, rank=rank, generation=generation, last=mine, plant=plant)
        code = 0
    except BaseException:
        (logs / f"rank-{rank}.err").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def lose_and_resume(case: Case, root: Path, plant: Plant | None = None) -> None:
    """Train, be killed, resume. Logs are in `generation-1` and `generation-2` below `root`."""
    lose(case, root)
    resume(case, root, plant or Plant(case))


def lose(case: Case, root: Path) -> None:
    run_generation(case, root, generation=1, last=case.killed_in, plant=Plant(case))


def resume(case: Case, root: Path, plant: Plant) -> None:
    last = case.killed_in - 1 + EXTRA_STEPS
    run_generation(case, root, generation=2, last=last, plant=plant)
