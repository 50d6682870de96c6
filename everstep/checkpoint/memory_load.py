"""Puts a snapshot together from what the memory of all nodes holds, so that it is read like a checkpoint on disk.

`Run.resume` calls `look` and `assemble` on all ranks together. Each node gets a directory of its own with all files of
the checkpoint: its own parts as links, of the others only those blocks that its ranks load, sent by ranks that hold
them over the ranks' own process group. What nobody reads stays a hole, and what is read is hashed like anything else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.file_bytes import read_bytes, write_bytes
from everstep.checkpoint.manifest import (
    CheckpointName,
    FileEntry,
    Manifest,
    rank_file,
    read_manifest,
    shard_file,
    write_manifest,
)
from everstep.checkpoint.memory import Held, held_in, prepare_root
from everstep.checkpoint.reader import needed_blocks
from everstep.checkpoint.storage import Block
from everstep.errors import CheckpointDamaged, EverstepError
from everstep.ranks import Team

_CHUNK_BYTES = 32 << 20
_ASSEMBLED = ".assembled-"


Place = tuple[str, int, int]
"""Of a node's memory: equal places are the same memory, whatever a node is called."""


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    sender: int
    receiver: int
    block: Block


def look(team: Team, root: Path) -> list[list[Held]]:
    """What each rank finds in its node's memory, in rank order; a collective. Makes nothing."""
    try:
        mine = held_in(root)
    except OSError:
        mine = []
    return team.gather(mine)


def place_of(root: Path) -> Place:
    """Which memory `root` is in: the kernel, and its directory there. Makes it. Raises `SaveFailed`, OSError."""
    prepare_root(root)
    found = root.stat()
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), found.st_dev, found.st_ino


def assemble(
    team: Team,
    seen: Sequence[Sequence[Held]],
    root: Path,
    *,
    name: CheckpointName,
    token: str,
    tracked: Mapping[str, Any],
) -> Path:
    """The directory from which this rank reads the snapshot, of which `seen` has every part. A collective.

    Raises `CheckpointDamaged`, on all ranks alike, where files that were there a moment ago cannot be used.
    """
    places = _agree(team, name, lambda: place_of(root))
    pieces = [{held.rank: held for held in sorted(one, reverse=True) if _is(held, name, token)} for one in seen]
    holders = [
        [rank for rank, held in enumerate(pieces) if source in held]
        for source in range(next(held.world_size for one in pieces for held in one.values()))
    ]
    # Ranks that hold the same take turns in sending.
    senders = [ranks[source % len(ranks)] for source, ranks in enumerate(holders)]
    described = _agree(team, name, lambda: _read_described(root, pieces[team.rank], senders, team.rank))
    leader = places.index(places[team.rank])
    directory = name.directory(root / f"{_ASSEMBLED}{leader:05d}")
    merged = {source: entry for one in described for source, entry in one.items()}

    def lay_out() -> None:
        if leader == team.rank:
            _lay_out(root, directory, pieces[team.rank], merged)

    _agree(team, name, lay_out)
    if all(len(held) == len(holders) for held in pieces):
        return directory
    needs = team.gather(_needs(team, directory, pieces[team.rank], tracked))
    transfers = _plan(places, senders, needs)
    group = team.apart()
    _agree(team, name, lambda: _transfer(team.rank, group, root, directory, pieces[team.rank], transfers))
    return directory


def disband(root: Path) -> None:
    """Remove what `assemble` made here, once no rank reads it any more, whether it came to its end or not."""
    for directory in root.glob(f"{_ASSEMBLED}*"):
        shutil.rmtree(directory, ignore_errors=True)


def _is(held: Held, name: CheckpointName, token: str) -> bool:
    return (held.name, held.token) == (name, token)


def _agree(team: Team, name: CheckpointName, work: Any) -> list[Any]:
    """What each rank's work gave; the same error on all where one failed."""
    result, problem = None, ""
    try:
        result = work()
    except (EverstepError, OSError, RuntimeError) as err:
        problem = f"{type(err).__name__}: {err}"
    said = team.gather((result, problem))
    problems = [f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(said) if theirs]
    if problems:
        raise CheckpointDamaged(f"Snapshot {name} cannot be put together from the nodes' memory: {problems[0]}")
    return [theirs for theirs, _ in said]


def _read_described(
    root: Path, mine: Mapping[int, Held], senders: Sequence[int], rank: int
) -> dict[int, tuple[Manifest, bytes]]:
    """Manifest and rank file of each part that this rank sends from."""
    found = {}
    for source, sender in enumerate(senders):
        if sender == rank:
            directory = mine[source].directory(root)
            found[source] = read_manifest(directory), (directory / rank_file(source)).read_bytes()
    return found


def _lay_out(
    root: Path, directory: Path, mine: Mapping[int, Held], described: Mapping[int, tuple[Manifest, bytes]]
) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)
    entries: list[FileEntry] = []
    for source, (manifest, text) in sorted(described.items()):
        entries += manifest.files
        (directory / rank_file(source)).write_bytes(text)
        shard = directory / shard_file(source)
        if source in mine:
            os.link(mine[source].directory(root) / shard.name, shard)
            continue
        entry = manifest.file(shard.name)
        assert entry is not None
        with shard.open("wb") as file:
            file.truncate(entry.size_bytes)
    first = described[0][0]
    whole = Manifest(**{**vars(first), "files": tuple(sorted(entries, key=lambda entry: entry.name))})
    write_manifest(directory, whole, may_publish=lambda: None)


def _needs(team: Team, directory: Path, mine: Mapping[int, Held], tracked: Mapping[str, Any]) -> list[Block]:
    try:
        blocks = needed_blocks(directory, rank=team.rank, world_size=team.world_size, tracked=tracked)
    except EverstepError:
        return []  # reading it will say so
    return [block for block in blocks if block.rank not in mine]


def _plan(places: Sequence[Place], senders: Sequence[int], needs: Sequence[Sequence[Block]]) -> list[_Transfer]:
    """The same list on every rank, each block once for each place: done in this order, nobody waits in a circle."""
    planned: dict[tuple[Place, Block], _Transfer] = {}
    for receiver, blocks in enumerate(needs):
        for block in blocks:
            transfer = _Transfer(sender=senders[block.rank], receiver=receiver, block=block)
            planned.setdefault((places[receiver], block), transfer)
    return list(planned.values())


def _transfer(
    rank: int,
    group: dist.ProcessGroup | None,
    root: Path,
    directory: Path,
    mine: Mapping[int, Held],
    transfers: Sequence[_Transfer],
) -> None:
    """Send and receive. What cannot be read or written is told at the end: nobody is left waiting for bytes."""
    problem: OSError | None = None
    for transfer in transfers:
        block = transfer.block
        if rank == transfer.sender:
            path = mine[block.rank].directory(root) / shard_file(block.rank)
        elif rank == transfer.receiver:
            path = directory / shard_file(block.rank)
        else:
            continue
        for at in range(block.at, block.at + block.size_bytes, _CHUNK_BYTES):
            size_bytes = min(_CHUNK_BYTES, block.at + block.size_bytes - at)
            chunk = torch.zeros(size_bytes, dtype=torch.uint8)
            try:
                if rank == transfer.sender:
                    chunk = read_bytes(path, at, size_bytes)
            except OSError as err:
                problem = err
            if rank == transfer.sender:
                dist.send(chunk, transfer.receiver, group=group)
                continue
            dist.recv(chunk, transfer.sender, group=group)
            try:
                write_bytes(path, at, chunk)
            except OSError as err:
                problem = err
    if problem is not None:
        raise problem
