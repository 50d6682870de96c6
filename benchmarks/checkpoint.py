"""How long a save holds training up, how long it takes until it is on disk, and how long a resume takes.

    .venv/bin/python benchmarks/checkpoint.py

A model with Adam's moments is saved by one rank, then by two under DistributedDataParallel, each in one process that
holds all rivals: they alternate round by round, so that a noisy machine disturbs all alike. Compare the ratios, not the
milliseconds of different runs. The floor is a plain copy, into shared memory that was touched before, of the very bytes
that our save copies on that rank. Times are of the slower rank. The last line is JSON; nothing is judged here.

Every way is warmed up once. "blocked" ends when training may change the state again, "durable" once all is synced (and,
for ours, renamed into place with its manifest). Rivals save model and optimizer; ours saves also random generators and
hashes, and looks at a sample of the state, as `Run` does with each save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.checkpoint import memory
from everstep.checkpoint.arena import Arena
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.memory_load import assemble, disband, look
from everstep.checkpoint.reader import read_checkpoint
from everstep.checkpoint.snapshot import put_back, take

FLOOR = "plain copy into shared memory"
OURS = "everstep"
FROM_MEDIUM = "everstep, from disk, from the medium"
Timed = tuple[float, float | None]
"""Seconds blocked, and seconds until durable where that means something."""


class Rivals:
    """All ways to save and to load the same state, on one rank."""

    def __init__(self, root: Path, *, megabytes: int, width: int, total_steps: int) -> None:
        torch.manual_seed(1)
        layers = max(1, round(megabytes / (3 * 12 * width**2 * 4 / 1e6)))
        bare = nn.Sequential(*[nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0) for _ in range(layers)])
        self.world_size = dist.get_world_size()
        self.bare = bare
        self.model: Any = DistributedDataParallel(bare) if self.world_size > 1 else bare
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.model(torch.randn(2, 2, width)).sum().backward()
        self.optimizer.step()
        self._root = root
        self._count = 0
        self._newest: dict[str, Path] = {}
        self.run = everstep.Run(
            total_steps=total_steps,
            save_every=total_steps,
            memory_every=total_steps,
            checkpoint_directory=root / "ours",
            keep=1,
        )
        self.run.track(model=self.model, optimizer=self.optimizer, scheduler=None, sampler=None)
        self.run.resume()
        self._steps = self.run.steps()
        next(self._steps)
        self._settle()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        self._floor = self._plain_copies()
        self.bytes_here = sum(source.nbytes for _, source in self._floor)

    @property
    def saves(self) -> dict[str, Callable[[], Timed]]:
        return {
            FLOOR: self.copy,
            OURS: self.save,
            "torch.save": self.torch_save,
            "DCP save": self.dcp_save,
            "DCP async_save, thread": lambda: self.dcp_async(AsyncCheckpointerType.THREAD),
            "DCP async_save, process, shared stager": lambda: self.dcp_async(AsyncCheckpointerType.PROCESS),
        }

    @property
    def loads(self) -> dict[str, tuple[Callable[[], float], str]]:
        """Each with the way of saving whose files it reads from the medium; "" where they may stay cached."""
        return {
            FROM_MEDIUM: (self.load, OURS),
            "everstep, from disk, still cached": (self.load, ""),
            "everstep, from the node's memory": (self.load_from_memory, ""),
            "torch.load, from the medium": (self.torch_load, "torch.save"),
            "torch.load, still cached": (self.torch_load, ""),
            "DCP load, from the medium": (self.dcp_load, "DCP save"),
            "DCP load, still cached": (self.dcp_load, ""),
        }

    def state(self) -> dict[str, Any]:
        return {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}

    def newest(self, name: str) -> Path:
        """Where this way has last saved."""
        return (
            complete_checkpoints(self._root / "ours")[-1].name.directory(self._root / "ours")
            if (name == OURS)
            else self._newest[name]
        )

    # --- Saving ---------------------------------------------------------------------------------------------------

    def _plain_copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layout, tensors = self.run._saver._layout, take(self.run._tracked).tensors  # type: ignore[union-attr]
        assert layout is not None
        arena = Arena(layout.size_bytes)
        self._arena = arena
        found = []
        for chunk in layout.chunks:
            source = tensors[chunk.key.partition("@")[0]]
            for dimension, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                source = source.narrow(dimension, start, length)
            found.append((arena.view(chunk.at, dtype=source.dtype, sizes=chunk.sizes), source))
        return found

    def copy(self) -> Timed:
        started = time.monotonic()
        for target, source in self._floor:
            target.copy_(source)
        return time.monotonic() - started, None

    def save(self) -> Timed:
        """As a step does that ends with a save."""
        run = self.run
        run._done += 1
        started = time.monotonic()
        run._save()
        blocked_s = time.monotonic() - started
        saver = run._saver
        assert saver is not None
        while saver.busy:
            saver._listen(10.0)
        durable_s = time.monotonic() - started
        self._settle()
        return blocked_s, durable_s

    def _settle(self) -> None:
        """Until the writer has nothing to do any more: it reads again what it has written."""
        saver = self.run._saver
        assert saver is not None
        saver.settle()
        deadline = time.monotonic() + 60
        while dist.get_rank() == 0 and time.monotonic() < deadline:
            saver._listen(0.2)
            news = saver.news()
            failed = [item.problem for item in news if item.kind in ("failed", "skipped")]
            assert not failed, failed
            if any(item.kind == "rehashed" for item in news):
                break
        saver.news()

    def torch_save(self) -> Timed:
        """By rank 0 alone, as scripts do; the others wait for it, since the state must not change."""
        path = self._fresh("torch.save")
        started = time.monotonic()
        if dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.state(), path)
        dist.barrier()
        blocked_s = time.monotonic() - started
        if dist.get_rank() == 0:
            _sync(path)
        return blocked_s, time.monotonic() - started

    def dcp_save(self) -> Timed:
        path = self._fresh("DCP save")
        started = time.monotonic()
        save(self.state(), checkpoint_id=path)
        blocked_s = time.monotonic() - started
        return blocked_s, blocked_s

    def dcp_async(self, kind: AsyncCheckpointerType) -> Timed:
        path = self._fresh(f"DCP {kind.value}")
        stager = self._stager if kind is AsyncCheckpointerType.PROCESS else None
        with _quiet():  # a process that is started with the first call logs each save, and a stack when it is let go
            started = time.monotonic()
            answer: Any = async_save(
                self.state(), checkpoint_id=path, async_checkpointer_type=kind, async_stager=stager
            )
            staged = getattr(answer, "staging_completion", None)
            if isinstance(staged, Future):
                staged.result()
            blocked_s = time.monotonic() - started
            (answer if isinstance(answer, Future) else answer.upload_completion).result()
            return blocked_s, time.monotonic() - started

    def _fresh(self, name: str) -> Path:
        """A path that no save has used; what this way has saved before goes."""
        before, self._count = self._newest.get(name), self._count + 1
        if before is not None and dist.get_rank() == 0:
            shutil.rmtree(before, ignore_errors=True)
            before.unlink(missing_ok=True)
        path = self._root / name.replace(" ", "-") / str(self._count)
        self._newest[name] = path
        dist.barrier()
        return path

    # --- Loading --------------------------------------------------------------------------------------------------

    def load(self) -> float:
        """Sizes and hashes checked, and put back into the live objects."""
        directory = self.newest(OURS)
        started = time.monotonic()
        loaded = read_checkpoint(directory, rank=dist.get_rank(), world_size=self.world_size, tracked=self.run._tracked)
        put_back(self.run._tracked, loaded.states)
        return time.monotonic() - started

    def keep_in_memory(self) -> None:
        run = self.run
        run._done += 1
        run._save(to_disk=False, to_memory=True)
        assert run._saver is not None
        run._saver.settle()
        told = [news.kind for news in run._saver.news()]
        assert "kept" in told, told
        self._in_memory = CheckpointName(generation=run.generation, step=run._done)

    def load_from_memory(self) -> float:
        """As after the death of a rank: ranks look, agree on what their nodes hold, and read it like a checkpoint."""
        run, root = self.run, self.run._memory_root
        assert run._team is not None
        started = time.monotonic()
        seen = look(run._team, root)
        directory = assemble(run._team, seen, root, name=self._in_memory, token=run._token, tracked=run._tracked)
        loaded = read_checkpoint(directory, rank=dist.get_rank(), world_size=self.world_size, tracked=run._tracked)
        put_back(run._tracked, loaded.states)
        seconds = time.monotonic() - started
        dist.barrier()
        disband(root)
        return seconds

    def torch_load(self) -> float:
        path = self.newest("torch.save")
        started = time.monotonic()
        self._put_back(torch.load(path, weights_only=True))
        return time.monotonic() - started

    def dcp_load(self) -> float:
        path = self.newest("DCP save")
        started = time.monotonic()
        state = self.state()
        load(state, checkpoint_id=path)
        self._put_back(state)
        return time.monotonic() - started

    def _put_back(self, state: dict[str, Any]) -> None:
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _forget(path: Path) -> None:
    """Let the kernel drop what it has cached, so that the medium is read."""
    for file in [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def slowest(seconds: float | None) -> float | None:
    """Over all ranks."""
    if seconds is None:
        return None
    everybody = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(everybody, op=dist.ReduceOp.MAX)
    return float(everybody)


def measure_rank(
    rank: int, world_size: int, port: int, root: str, megabytes: int, width: int, rounds: int, results: Any
) -> None:
    """One rank of one measurement; rank 0 puts the times into `results`."""
    warnings.filterwarnings("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rivals = Rivals(Path(root), megabytes=megabytes, width=width, total_steps=10**6)
    times: dict[str, dict[str, list[float]]] = {"blocked": {}, "durable": {}, "resume": {}}
    for number in range(rounds + 1):
        for name, way in rivals.saves.items():
            dist.barrier()
            blocked_s, durable_s = way()
            for kind, seconds in (("blocked", slowest(blocked_s)), ("durable", slowest(durable_s))):
                if number and seconds is not None:
                    times[kind].setdefault(name, []).append(seconds)
    rivals.keep_in_memory()
    for number in range(rounds + 1):
        for name, (load_once, written_by) in rivals.loads.items():
            if written_by:
                _forget(rivals.newest(written_by))
            dist.barrier()
            seconds = slowest(load_once())
            if number and seconds is not None:
                times["resume"].setdefault(name, []).append(seconds)
    if rank == 0:
        results.put({"bytes_of_a_rank": rivals.bytes_here, "tensors": len(take(rivals.run._tracked).tensors), **times})
    dist.barrier()
    memory.forget(rivals.run._memory_root)
    os._exit(0)  # the run is not at its end, and has nothing to say about it


def measure(world_size: int, root: Path, *, megabytes: int, width: int, rounds: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (world_size, port, str(root), megabytes, width, rounds, results)
    spawn(measure_rank, arguments, nprocs=world_size)  # type: ignore[no-untyped-call]
    found: dict[str, Any] = results.get()
    return found


def show(world_size: int, found: dict[str, Any]) -> dict[str, Any]:
    """Print the table; returns the ratios."""
    floor = statistics.median(found["blocked"][FLOOR])
    print(
        f"\n{world_size} rank{'s' * (world_size > 1)}, {found['tensors']} tensors, "
        f"{found['bytes_of_a_rank'] / 1e6:.0f} MB copied on the first one; milliseconds"
    )
    ratios: dict[str, Any] = {}
    for kind, title in (
        ("blocked", "training stands still"),
        ("durable", "until on disk"),
        ("resume", "until a resumed run can go on"),
    ):
        reference = floor if kind in ("blocked", "durable") else statistics.median(found[kind][FROM_MEDIUM])
        print(f"{title:44}{'min':>8}{'median':>8}{'max':>8}{'ratio':>8}")
        for name, values in found[kind].items():
            middle = statistics.median(values)
            ratios.setdefault(kind, {})[name] = round(middle / reference, 3)
            print(
                f"  {name:42}{min(values) * 1e3:8.1f}{middle * 1e3:8.1f}{max(values) * 1e3:8.1f}"
                f"{middle / reference:8.2f}"
            )
    return {"floor_ms": round(floor * 1e3, 2), "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=200, help="of weights and moments together")
    parser.add_argument("--width", type=int, default=512, help="of the layers: narrow ones make many small tensors")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--directory", type=Path, help="where checkpoints go; a temporary directory if left out")
    arguments = parser.parse_args()
    summary = {}
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.directory, ignore_cleanup_errors=True) as directory:
            found = measure(
                world_size,
                Path(directory),
                megabytes=arguments.megabytes,
                width=arguments.width,
                rounds=arguments.rounds,
            )
        summary[f"{world_size}_ranks"] = show(world_size, found)
    print("ratio: of medians; of saves to the plain copy, of resumes to ours from the medium")
    with contextlib.suppress(BrokenPipeError):
        what = {"megabytes": arguments.megabytes, "width": arguments.width, "rounds": arguments.rounds}
        print(json.dumps({**what, **summary}))


if __name__ == "__main__":
    main()
