"""Does a node have the memory for what its ranks would keep there? Asked before anything is kept. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

SNAPSHOTS = 2
"""The last one that is whole on all nodes, and the one that is being written. Of its own ranks' parts a node holds one
more: the one that is on its way to disk. Nothing is on its way while a run resumes; what its ranks then need of other
nodes' parts takes that place."""
_LEFT_FREE = 0.1
"""Share of what is free that is never taken: training itself needs it."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a node has, in bytes: free in the tmpfs, and memory that may still be taken (None where unknown).

    Both count what the tier holds already as free: it is written over.
    """

    place: str
    tmpfs_bytes: int
    memory_bytes: int | None


def refuse_budget(room: Room, *, part_bytes: int, copies: int, borrowed_bytes: int, untouched_bytes: int) -> str:
    """A sentence with the numbers where it does not fit, else "".

    part_bytes: one snapshot of all ranks of this node. copies: 2 where a partner's parts are held as well.
    borrowed_bytes: what they read of other nodes' parts at a resume: under data parallelism nearly the whole state.
    untouched_bytes: memory that saving has reserved but not used until now.
    """
    needed = part_bytes * copies * SNAPSHOTS + max(part_bytes, borrowed_bytes)
    at_a_resume = borrowed_bytes > part_bytes
    what = f"{SNAPSHOTS if at_a_resume else SNAPSHOTS + 1} snapshots of {_mib(part_bytes)}"
    if copies > 1:
        what += f" and {SNAPSHOTS} of the partner node"
    if at_a_resume:
        what += f", and {_mib(borrowed_bytes)} of other nodes' parts at a resume,"
    if needed > room.tmpfs_bytes * (1 - _LEFT_FREE):
        return (
            f"{what} need {_mib(needed)} in {room.place}, where {_mib(room.tmpfs_bytes)} are free: "
            "mount a larger tmpfs there, shard the state over more ranks, or do without the memory tier"
        )
    if room.memory_bytes is not None and needed + untouched_bytes > room.memory_bytes * (1 - _LEFT_FREE):
        return (
            f"{what} need {_mib(needed)} of memory, and {_mib(room.memory_bytes)} are free"
            + (f", of which the copy for saving takes {_mib(untouched_bytes)}" if untouched_bytes else "")
            + ": give the job more memory, shard the state over more ranks, or do without the memory tier"
        )
    return ""


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // (1 << 20))} MiB"
