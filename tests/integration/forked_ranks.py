"""Ranks by fork: torch is loaded once, in the test, and must run on one thread there. Ranks meet by a file."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(directory: Path, work: Callable[[int], Any], *, world_size: int) -> list[Any]:
    """What `work(rank)` returned on each rank of one gloo process group, or the exception that it raised."""
    assert torch.get_num_threads() == 1, "ranks are forked from here"
    name = uuid.uuid4().hex
    answers = [directory / f"answer-{name}-{rank}" for rank in range(world_size)]
    pids = [
        _fork(lambda rank=rank: _be_rank(rank, world_size, directory / f"store-{name}", work), answers[rank])  # type: ignore[misc]
        for rank in range(world_size)
    ]
    for pid in pids:
        os.waitpid(pid, 0)
    return [pickle.loads(path.read_bytes()) for path in answers]


def _be_rank(rank: int, world_size: int, meeting_point: Path, work: Callable[[int], Any]) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(meeting_point), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        return work(rank)
    finally:
        dist.barrier()


def _fork(work: Callable[[], Any], answer: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        said = work()
    except BaseException as err:
        traceback.print_exc(file=sys.__stderr__)
        said = err
    aside = answer.with_suffix(".tmp")
    aside.write_bytes(pickle.dumps(said))
    aside.rename(answer)
    os._exit(0)
