"""Real ranks that train, save and load on demand: forked once, since torch is loaded here, and asked over pipes.

A crew writes the checkpoints that are damaged later, loads what is left of them, and trains on while its storage fails.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import everstep
from corruptions.fingerprint import fingerprint
from everstep.checkpoint import plain_files, saver
from everstep.checkpoint.lineage import record_lineage
from everstep.checkpoint.manifest import CheckpointName
from everstep.checkpoint.reader import read_checkpoint
from everstep.checkpoint.saver import Saver, SaveSettings
from everstep.checkpoint.snapshot import collect
from everstep.errors import EverstepError
from everstep.ranks import Team

LONGEST_S = 90.0
FEATURES, WIDTH = 14, 61
"""61 rows over four ranks, and a bias of one value: parts of different sizes, and empty ones."""
NOBODY = 65534


@dataclass(frozen=True)
class Shape:
    """How many ranks there are, and whether the model is sharded over them or replicated."""

    world_size: int
    sharded: bool

    def __str__(self) -> str:
        kind = "FSDP2" if self.sharded else "DDP" if self.world_size > 1 else "one rank"
        return f"{kind} x {self.world_size}" if self.world_size > 1 else kind


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a rank says of a load: `loaded` with the state's fingerprint, `refused`, or `escaped` with the words."""

    outcome: str
    said: str


class Crew:
    """The ranks of one shape, for as long as the block lasts."""

    def __init__(self, shape: Shape, folder: Path, *, seed: int) -> None:
        self.shape = shape
        self.fault = folder / f"fault-{shape.world_size}-{shape.sharded}.json"
        """The failing medium of this crew's writers: what is written here happens to them."""
        self._pids: list[int] = []
        self._channels: list[Connection] = []
        store = folder / f"store-{shape.world_size}-{shape.sharded}"
        for rank in range(shape.world_size):
            mine, theirs = Pipe()
            pid = os.fork()
            if not pid:
                mine.close()
                _be_rank(shape, rank, store, theirs, self.fault, seed)
            theirs.close()
            self._pids.append(pid)
            self._channels.append(mine)

    def ask(self, command: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Every rank's answer, in rank order. Raises `RuntimeError` where one fails or says nothing."""
        for channel in self._channels:
            channel.send((command, args, kwargs))
        answers = []
        for rank, channel in enumerate(self._channels):
            if not channel.poll(LONGEST_S):
                raise RuntimeError(
                    f"Rank {rank} of {self.shape} said nothing for {LONGEST_S:.0f} s to {command} {args}."
                )
            kind, answer = channel.recv()
            if kind == "failed":
                raise RuntimeError(f"Rank {rank} of {self.shape} failed at {command} {args}:\n{answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        for pid in self._pids:
            os.waitpid(pid, 0)


def warm_up() -> None:
    """Load once, before any fork, what each rank would load: torch imports much of itself at first use."""
    torch.set_num_threads(1)
    everstep.Run  # noqa: B018 - imported when it is first named
    model = nn.Linear(1, 1)
    torch.optim.AdamW(model.parameters())


class Odds:
    """A part of the state that is no model: one of each kind that a checkpoint can hold."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        steps = self._steps
        return {
            "steps": steps,
            "mean": 0.1 * steps,
            "words": [f"step {steps}", None, True, -math.inf],
            "pair": (steps, b"\x00\xff" * steps),
            "seen": Counter({"a": steps, 7: 2}),
            "array": np.arange(12, dtype=np.int16).reshape(3, 4) + steps,
            "scalar": np.float32(steps),
            "half": torch.full((5,), steps, dtype=torch.bfloat16),
            "mask": torch.tensor([steps % 2 == 0, True, False]),
            "nothing": torch.empty(0, 3),
            "number": torch.tensor(steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]


class Rank:
    """One rank's training; each public method answers a command of the crew."""

    def __init__(self, shape: Shape, rank: int, seed: int) -> None:
        self.team = Team()
        self._shape, self._rank = shape, rank
        torch.manual_seed(seed)
        # Every rank keeps averages of its own, as a batch norm without synchronization does.
        network: nn.Module = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1)
        )
        if shape.sharded:
            fully_shard(network, mesh=init_device_mesh("cpu", (shape.world_size,)))
        elif shape.world_size > 1:
            network = DistributedDataParallel(network, broadcast_buffers=False)
        self._model = network
        self._optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        self._scheduler = LambdaLR(self._optimizer, lambda step: 1 / (1 + step))
        self._odds = Odds(rank)
        self._saver: Saver | None = None
        torch.manual_seed(1000 * seed + rank)
        random.seed(1000 * seed + rank)
        np.random.seed(1000 * seed + rank)
        self.tracked = {
            "model": self._model,
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "odds": self._odds,
        }

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            loss = self._model(torch.randn(6, FEATURES)).square().mean()
            loss.backward()
            self._optimizer.step()
            self._scheduler.step()
            self._odds.step()
            random.random()
            np.random.random()

    def open(self, root: Path, parent: CheckpointName | None = None) -> None:
        settings = SaveSettings(root=root, job="corruptions", total_steps=100, parent=parent, keep=10)
        self._saver = Saver(settings, self.team)

    def save(self, name: CheckpointName) -> tuple[str, list[str], bool]:
        """Save, wait, train on: (the state's fingerprint, what was told of it, whether a save was begun)."""
        assert self._saver is not None
        self.train()
        truth = fingerprint(collect(self.tracked))
        begun = self._saver.save(name, self.tracked)
        self.train()  # goes on while the writer writes, and whatever becomes of it
        self._saver.settle()
        news = [f"{one.kind} {one.name} {one.problem}".strip() for one in self._saver.news() if one.kind != "rehashed"]
        return truth, news, begun

    def close(self) -> None:
        assert self._saver is not None
        self._saver.close()
        self._saver = None

    def write(self, root: Path, generations: list[tuple[int, CheckpointName | None, list[int]]]) -> dict[str, str]:
        """Several generations' checkpoints; returns the truth of each, by name."""
        truth = {}
        for generation, parent, steps in generations:
            if self.team.leads:
                record_lineage(root, generation, parent=parent)
            self.open(root, parent)
            for step in steps:
                name = CheckpointName(generation=generation, step=step)
                truth[str(name)], news, _ = self.save(name)
                if self.team.leads and news != [f"saved {name}"]:
                    raise RuntimeError(f"{name} was not saved: {news}")
            self.close()
        return truth

    def load(self, directory: Path, *, unreadable: str = "", as_nobody: bool = False) -> Reply:
        """Load by the path that training takes. `unreadable`: reads of files whose path holds it end in EIO."""
        medium = failing_reads(unreadable) if unreadable else contextlib.nullcontext()
        try:
            with medium, nobody() if as_nobody else contextlib.nullcontext():
                loaded = read_checkpoint(
                    directory, rank=self._rank, world_size=self._shape.world_size, tracked=self.tracked
                )
        except EverstepError as err:
            return Reply(outcome="refused", said=f"{type(err).__name__}: {err}")
        except BaseException as err:
            return Reply(outcome="escaped", said=f"{type(err).__name__}: {err}")
        return Reply(outcome="loaded", said=fingerprint(loaded.states))


def _be_rank(shape: Shape, rank: int, store: Path, channel: Connection, fault: Path, seed: int) -> None:
    """This process is a rank from now on, until its crew is closed."""
    code = 1
    try:
        warnings.simplefilter("ignore")
        saver._RETRY_AFTER_S = (0.05, 0.1)
        os.environ["CORRUPTIONS_FAULT"] = str(fault)
        os.environ.pop("EVERSTEP_RUN_DIR", None)
        sys.path.insert(0, str(Path(__file__).with_name("failing_medium")))
        if shape.world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=shape.world_size)
        mine = Rank(shape, rank, seed)
        with contextlib.suppress(EOFError):
            while True:
                command, args, kwargs = channel.recv()
                try:
                    channel.send(("done", getattr(mine, command)(*args, **kwargs)))
                except Exception:
                    channel.send(("failed", traceback.format_exc()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def failing_reads(words: str) -> Iterator[None]:
    """A medium that cannot read files whose path holds `words`, beyond their first bytes."""

    class Failing(io.FileIO):
        def _fail(self) -> None:
            if words in os.readlink(f"/proc/self/fd/{self.fileno()}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def read(self, size: int = -1, /) -> bytes:
            self._fail()
            return super().read(size)

        def readinto(self, buffer: Any, /) -> int:
            self._fail()
            return super().readinto(buffer)

    real = plain_files.io.FileIO
    plain_files.io.FileIO = Failing  # type: ignore[misc]
    try:
        yield
    finally:
        plain_files.io.FileIO = real  # type: ignore[misc]


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without root's right to read everything, where this process has it."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
