"""One rank's share in the snapshots that nodes keep in memory: whether they fit, which one is kept, which is under way.

`Saver` owns one where the run asked for it, tells it what the node's writer says, and asks it for the writer's orders.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from everstep.checkpoint.arena import available_bytes
from everstep.checkpoint.manifest import CheckpointName
from everstep.checkpoint.memory import Held, used_bytes
from everstep.checkpoint.memory_budget import Room, refuse_budget
from everstep.checkpoint.memory_load import place_of
from everstep.checkpoint.memory_partner import PartnerCopies, Partners, choose_partners
from everstep.errors import SaveFailed
from everstep.ranks import Team


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """token: of this generation. keep: the snapshot that this generation resumed from, and its token, if it was one."""

    root: Path
    token: str
    job: str
    total_steps: int
    parent: CheckpointName | None
    partner: bool
    keep: tuple[CheckpointName, str] | None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A snapshot of which this rank's part is complete; or why it is not. copy_of: the rank whose part came along."""

    name: CheckpointName
    problem: str
    size_bytes: int
    seconds: float
    copy_of: int | None


class MemoryTier:
    """Ask `room` on all ranks before the first snapshot, and again when the state has changed its size."""

    def __init__(self, settings: MemorySettings, team: Team) -> None:
        self.refusal = ""
        """Why nothing is kept any more; the same on all ranks."""
        self._settings = settings
        self._team = team
        self._partners: Partners | None = None
        self._copies: PartnerCopies | None = None
        self._whole = settings.keep
        self._complete: CheckpointName | None = None
        self._under_way: CheckpointName | None = None
        self._began = 0.0
        self._part: tuple[str, int] = ("", 0)
        self._copied: queue.SimpleQueue[tuple[CheckpointName, str]] = queue.SimpleQueue()
        self._news: list[Kept] = []

    @property
    def busy(self) -> bool:
        """Whether a snapshot of this rank is under way."""
        self._hear_of_copies()
        return self._under_way is not None

    @property
    def complete(self) -> CheckpointName | None:
        """The newest snapshot of which this rank's part is complete."""
        return self._complete

    def agree(self, complete: Sequence[CheckpointName | None]) -> None:
        """What is complete on each rank: the same on all is a whole snapshot, and the one before it may go."""
        found = set(complete)
        if len(found) == 1 and (name := found.pop()) is not None:
            self._whole = (name, self._settings.token)

    def room(self, *, part_bytes: int, alike_bytes: int, alike_in_part: int, untouched_bytes: int) -> None:
        """Find partners and see whether what is to be kept fits; sets `refusal`, on all ranks alike. A collective.

        alike_bytes: of what all ranks hold alike and each of them reads at a resume; alike_in_part: what this rank
        writes of that.
        """
        problem, place = "", ("", 0, self._team.rank)
        try:
            place = place_of(self._settings.root)
        except (SaveFailed, OSError) as err:
            problem = str(err)
        said = self._team.gather((place, part_bytes, alike_bytes, alike_in_part, untouched_bytes))
        places = [theirs for theirs, *_ in said]
        if self._settings.partner and self._copies is None:
            problem = self._find_partners(places) or problem
        mine = [sizes for theirs, *sizes in said if theirs == place]
        parts, alike, written, untouched = ([*column] for column in zip(*mine, strict=True))
        if not problem:
            try:
                problem = refuse_budget(
                    _room(self._settings.root),
                    part_bytes=sum(parts),
                    copies=2 if self._settings.partner else 1,
                    borrowed_bytes=max(alike) - sum(written),
                    untouched_bytes=sum(untouched),
                )
            except OSError as err:
                problem = f"what is free in {self._settings.root} is not known: {type(err).__name__}: {err}"
        problems = [f"rank {rank}: {theirs}" for rank, theirs in enumerate(self._team.gather(problem)) if theirs]
        self.refusal = problems[0] if problems else ""

    def _find_partners(self, places: Sequence[object]) -> str:
        found = choose_partners(places, self._team.rank)
        if isinstance(found, str):  # the same on all ranks
            return f"copies on a partner node were asked for, but {found}"
        self._partners, group = found, self._team.apart()
        assert group is not None
        self._copies = PartnerCopies(
            group, found, self._settings.root, lambda name, problem: self._copied.put((name, problem))
        )
        return ""

    def order(self, name: CheckpointName, *, flushed: CheckpointName | None) -> dict[str, Any]:
        """What the writer needs to keep this rank's part; what is not kept is removed first.

        flushed: the snapshot that is being copied to disk from memory, if there is one.
        """
        settings = self._settings
        self._under_way, self._began, self._part = name, time.monotonic(), ("", 0)
        keep = [(name, settings.token), *([] if self._whole is None else [self._whole])]
        return {
            "root": str(settings.root),
            "token": settings.token,
            "keep": [(asdict(kept), token) for kept, token in keep],
            "flushed": None if flushed is None else asdict(flushed),
            "ranks": [self._team.rank, *([] if self._partners is None else [self._partners.from_rank])],
            "described": {
                "parent": asdict(settings.parent) if settings.parent else None,
                "job": settings.job,
                "total_steps": settings.total_steps,
                "torch_version": torch.__version__,
            },
        }

    def written(self, name: CheckpointName, problem: str, *, size_bytes: int) -> None:
        """The writer has put this rank's part into memory, or could not."""
        if name != self._under_way:
            return
        if self._copies is None:
            self._finish(name, problem, size_bytes)
            return
        self._part = (problem, size_bytes)
        own = Held(
            name=name, token=self._settings.token, world_size=self._team.world_size, rank=self._team.rank, copied=False
        )
        self._copies.exchange(own, good=not problem)

    def news(self) -> list[Kept]:
        """What has become known since the last call."""
        self._hear_of_copies()
        found, self._news = self._news, []
        return found

    def _hear_of_copies(self) -> None:
        while not self._copied.empty():
            name, problem = self._copied.get()
            own, size_bytes = self._part
            self._finish(name, own, size_bytes, not_copied=problem)

    def _finish(self, name: CheckpointName, problem: str, size_bytes: int, *, not_copied: str = "") -> None:
        """A part without its copy still makes the snapshot newer than the one before, and is told as kept."""
        self._under_way = None
        seconds = time.monotonic() - self._began
        copy_of = None if self._partners is None or not_copied else self._partners.from_rank
        self._news.append(Kept(name=name, problem=problem, size_bytes=size_bytes, seconds=seconds, copy_of=copy_of))
        if problem:
            return
        self._complete = name
        if not_copied:
            self._news.append(Kept(name=name, problem=not_copied, size_bytes=0, seconds=seconds, copy_of=None))


def _room(root: Path) -> Room:
    free, held, memory = os.statvfs(root), used_bytes(root), available_bytes()
    return Room(
        place=str(root),
        tmpfs_bytes=free.f_bavail * free.f_frsize + held,
        memory_bytes=None if memory is None else memory + held,
    )
