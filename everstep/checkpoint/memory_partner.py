"""Copies of a rank's part in another node's memory, so that a node's death costs no more than a rank's.

`MemoryTier` owns one on each rank. A thread sends what the rank's writer has put into memory to the rank with the same
place on the next node, and takes the part of the one before in turn; training goes on meanwhile.
"""

from __future__ import annotations

import queue
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from everstep.checkpoint.file_bytes import read_bytes, write_bytes
from everstep.checkpoint.manifest import ASIDE, MANIFEST, CheckpointName, rank_file, shard_file
from everstep.checkpoint.memory import Held, put_in_place
from everstep.errors import EverstepError

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Partners:
    """Global ranks: whom this rank sends to, and whom it receives from."""

    to_rank: int
    from_rank: int


def choose_partners(places: Sequence[object], rank: int) -> Partners | str:
    """Of `rank`, where `places` says which memory each rank has; a sentence where there can be none."""
    nodes: dict[object, list[int]] = {}
    for other, place in enumerate(places):
        nodes.setdefault(place, []).append(other)
    if len(nodes) < 2:
        return "all ranks share one node's memory: a copy there would be lost with it"
    sizes = {len(ranks) for ranks in nodes.values()}
    if len(sizes) > 1:
        return f"nodes have {min(sizes)} to {max(sizes)} ranks each: copies need the same number on each"
    order = list(nodes.values())
    node = next(at for at, ranks in enumerate(order) if rank in ranks)
    local = order[node].index(rank)
    return Partners(to_rank=order[(node + 1) % len(order)][local], from_rank=order[node - 1][local])


class PartnerCopies:
    """One rank's exchange. `done` is called in its thread with each snapshot and what went wrong, "" if nothing."""

    def __init__(
        self, group: dist.ProcessGroup, partners: Partners, root: Path, done: Callable[[CheckpointName, str], None]
    ) -> None:
        self._group = group
        self._partners = partners
        self._root = root
        self._done = done
        self._orders: queue.SimpleQueue[tuple[Held, bool]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="everstep-partner", daemon=True).start()

    def exchange(self, own: Held, *, good: bool) -> None:
        """Once for each snapshot that all ranks have begun, also where this rank's part failed."""
        self._orders.put((own, good))

    def _work(self) -> None:
        while True:
            own, good = self._orders.get()
            try:
                problem = self._exchange(own, good=good)
            except (RuntimeError, ValueError, OSError, EverstepError) as err:
                problem = f"{type(err).__name__}: {err}"
            self._done(own.name, problem)

    def _exchange(self, own: Held, *, good: bool) -> str:
        sends = _files(own.directory(self._root), own.rank) if good else []
        theirs = replace(own, rank=self._partners.from_rank, copied=True)
        final = theirs.directory(self._root)
        aside = final.with_name(f"{ASIDE}{final.name}-{uuid.uuid4().hex[:8]}")
        sizes = torch.tensor([path.stat().st_size for path in sends] or [-1, -1, -1], dtype=torch.int64)
        theirs_sizes = torch.zeros_like(sizes)
        self._swap(sizes, theirs_sizes)
        receives = _files(aside, theirs.rank) if int(theirs_sizes[0]) >= 0 else []
        outgoing = _chunks(sends, sizes.tolist())
        incoming = _chunks(receives, theirs_sizes.tolist())
        problem = "" if receives else "the partner's own part failed"
        try:
            if receives:
                problem = _begin(aside, receives)
            for at in range(max(len(outgoing), len(incoming))):
                send = _read(*outgoing[at]) if at < len(outgoing) else None
                receive = torch.empty(incoming[at][2], dtype=torch.uint8) if at < len(incoming) else None
                self._swap(send, receive)
                if receive is not None and not problem:
                    try:
                        write_bytes(*incoming[at][:2], receive)
                    except OSError as err:
                        problem = f"the partner's part cannot be kept: {err}"
            if receives and not problem:
                put_in_place(aside, final)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return problem if good else problem or "this rank's own part failed"

    def _swap(self, send: torch.Tensor | None, receive: torch.Tensor | None) -> None:
        works = []
        if send is not None:
            works.append(dist.isend(send, self._partners.to_rank, group=self._group))
        if receive is not None:
            works.append(dist.irecv(receive, self._partners.from_rank, group=self._group))
        for work in works:
            if work is not None:
                work.wait()


def _files(directory: Path, rank: int) -> list[Path]:
    """Of a part, the one that makes it count last."""
    return [directory / shard_file(rank), directory / rank_file(rank), directory / MANIFEST]


def _begin(aside: Path, files: Sequence[Path]) -> str:
    try:
        aside.mkdir(mode=0o700, parents=True)
        for path in files:
            path.touch(mode=0o600)  # also the shard of a rank that has nothing to write
    except OSError as err:
        return f"the partner's part cannot be kept: {err}"
    return ""


def _chunks(paths: Sequence[Path], sizes: Sequence[int]) -> list[tuple[Path, int, int]]:
    """(path, offset, bytes) in the order in which they are sent."""
    return [
        (path, at, min(_CHUNK_BYTES, size - at))
        for path, size in zip(paths, sizes, strict=False)
        for at in range(0, size, _CHUNK_BYTES)
    ]


def _read(path: Path, at: int, size_bytes: int) -> torch.Tensor:
    """What cannot be read is sent as zeros: the manifest's hashes find it, and the partner is not left waiting."""
    try:
        return read_bytes(path, at, size_bytes)
    except OSError:
        return torch.zeros(size_bytes, dtype=torch.uint8)
