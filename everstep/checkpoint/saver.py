"""Saves without holding training up: a copy into memory, and the node's writer does the rest.

`Run` owns one. All ranks call `save` together; what came of it is told by `news`, some steps later, on rank 0 for the
checkpoint as a whole and on each rank for what went wrong with its own part.
"""

from __future__ import annotations

import functools
import hashlib
import json
import select
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from everstep.checkpoint.arena import Arena
from everstep.checkpoint.description import SAME
from everstep.checkpoint.layout import Layout, Signature, plan_layout, signature
from everstep.checkpoint.manifest import ASIDE, CheckpointName
from everstep.checkpoint.memory_tier import MemorySettings, MemoryTier
from everstep.checkpoint.replicas import Replicas, handed_on_paths, synchronized_paths
from everstep.checkpoint.snapshot import Snapshot, collect
from everstep.checkpoint.structure_texts import StructureTexts
from everstep.checkpoint.wire import receive, send
from everstep.checkpoint.writers import Writer
from everstep.errors import EverstepError, SaveFailed
from everstep.ranks import Team

WhenBusy = Literal["wait", "skip"]

_PUBLISH_LIMIT_S = 600.0
_LOOK_EVERY_S = 0.05
_NEWS_EVERY_S = 0.02
"""Steps may be faster than that, and looking costs a tenth of what a step reports."""
_RETRY_AFTER_S = (0.5, 2.0, 8.0)
_SAME = json.dumps(SAME)


Trouble = Literal["failed", "skipped", "rehashed", "not_kept", "unwritable"]


@dataclass(frozen=True, kw_only=True)
class News:
    """What became of a save. `problem` is "" where all went well; sizes in bytes, times in seconds.

    kept: this rank's part of a snapshot is in memory, and a copy of that of the rank `copy_of`, if there are copies.
    not_kept: something of that is not. unwritable: this node's write test failed.
    """

    kind: Literal["saved", "kept"] | Trouble
    name: CheckpointName
    problem: str = ""
    size_bytes: int = 0
    save_time_s: float = 0.0
    note: str = ""
    copy_of: int | None = None


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """How a run saves. `bytes_per_s` limits what all nodes together send to the store; None does not.

    when_busy: what the next save does while the one before it is still being written: wait for at most `wait_limit_s`
    and then skip, or skip at once.
    look_at_lease: ends the process if this rank's lease has run out; returns the moment (CLOCK_BOOTTIME, ns) at which
    it held. None without a lease.
    """

    root: Path
    job: str
    total_steps: int
    parent: CheckpointName | None
    keep: int
    when_busy: WhenBusy = "wait"
    wait_limit_s: float = 30.0
    bytes_per_s: float | None = None
    memory: MemorySettings | None = None
    look_at_lease: Callable[[], int] | None = None


@dataclass(frozen=True, kw_only=True)
class _Statement:
    """What a rank says to all before a save, in a few hundred bytes.

    planned: its layout fits what it holds now. alike: the fingerprint of what it takes to be alike on all ranks.
    """

    busy: bool
    aside: str
    problem: str
    connected: bool
    planned: bool
    alike: bytes
    structures: dict[str, bytes]
    memory_busy: bool
    memory_complete: CheckpointName | None


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A snapshot as it is saved: collected states, live tensors by path, and each part's structure as JSON."""

    states: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    structures: dict[str, str]
    alike: bytes

    def digests(self) -> dict[str, bytes]:
        return {part: hashlib.sha256(text.encode()).digest()[:16] for part, text in self.structures.items()}

    def describe(self, own_keys: Mapping[str, str], *, same: Collection[str], handed_on: Collection[str]) -> str:
        """The fields of a rank's file, as JSON, from its parts on; of those in `same`, rank 0 writes the structure."""
        parts = (f"{json.dumps(part)}: {_SAME if part in same else text}" for part, text in self.structures.items())
        keys = json.dumps({"own_keys": own_keys, "handed_on": sorted(handed_on)})
        return f'"parts": {{{", ".join(parts)}}}, {keys[1:-1]}'


class Saver:
    """One rank's share in every save of a run."""

    def __init__(self, settings: SaveSettings, team: Team) -> None:
        self._settings = settings
        self._team = team
        self._texts = StructureTexts()
        self._replicas = Replicas()
        self._writer: Writer | None = None
        self._writer_problem = ""
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._planned_for: tuple[Signature, frozenset[str]] | None = None
        self._part_of: CheckpointName | None = None
        """The save whose part of this rank is being written: from the copy, which is then in use, or from memory."""
        self._part_from_copy = True
        self._memory_part_of: CheckpointName | None = None
        """The snapshot in memory whose part is being written, always from the copy."""
        self._publishing: CheckpointName | None = None
        self._memory = None if settings.memory is None else MemoryTier(settings.memory, team)
        self._memory_measured = False
        self._arena_touched = False
        self._lost: CheckpointName | None = None
        self._listening = False
        self._listen_next = 0.0
        self._news: list[News] = []

    @property
    def busy(self) -> bool:
        """Whether a save to disk is under way, or one to memory reads what was copied, as far as this rank knows."""
        return self._part_of is not None or self._memory_part_of is not None or self._publishing is not None

    @property
    def _copy_in_use(self) -> bool:
        return self._memory_part_of is not None or (self._part_of is not None and self._part_from_copy)

    @property
    def _memory_busy(self) -> bool:
        return self._memory is not None and self._memory.busy

    @property
    def keeps_in_memory(self) -> bool:
        """Whether snapshots may be kept in memory; the same on all ranks."""
        return self._memory is not None and not self._memory.refusal

    # --- Saving, all ranks together -------------------------------------------------------------------------------

    def test_storage(self, name: CheckpointName, *, size_bytes: int) -> None:
        """Let each node's writer write and read a file of this size where checkpoints go; `news` says what fails.

        A collective; it starts the writers, and waits for nothing else. name: where training stands.
        """
        problems = self._connect()
        if problems:
            self._refuse(name, problems)
        elif self._writer is not None and self._writer.leads:
            order = {"op": "try", "name": asdict(name), "root": str(self._settings.root), "size_bytes": size_bytes}
            self._listening = self._send(order)

    def save(
        self,
        name: CheckpointName,
        tracked: Mapping[str, Any],
        *,
        to_disk: bool = True,
        to_memory: bool = False,
        look: Callable[[dict[str, Any]], None] | None = None,
    ) -> bool:
        """Copy the state and leave the rest to the writer; False where nothing was begun, and `news` says why.

        A collective. Never raises for what storage or a state does: training goes on. Where snapshots are kept in
        memory, each save goes there first, and to disk from there. One for memory alone waits for nothing: it is
        skipped while an earlier save needs the copy. `look` is shown the collected states while they are copied.
        """
        taken, problem = _attempt(lambda: self._capture(tracked))
        to_memory = (to_memory or to_disk) and self.keeps_in_memory
        statements = self._until_free(name, taken, problem, to_disk=to_disk)
        if statements is None:
            return False
        to_memory = to_memory and self._agree_on_memory(name, statements)
        problems = [f"rank {rank}: {said.problem}" for rank, said in enumerate(statements) if said.problem]
        if problems or taken is None:
            return self._refuse(name, problems)
        if not all(said.connected for said in statements):
            problems = self._connect()
            if problems:
                return self._refuse(name, problems)
        alike = len({said.alike for said in statements}) == 1
        planned = alike and all(said.planned for said in statements)
        if not planned:
            planned = not self._compare(tracked, taken, in_doubt=not alike) and all(said.planned for said in statements)
        own_keys = {
            path: f"{path}@rank-{self._team.rank:05d}" for path in taken.tensors if path in self._replicas.differing
        }
        tensors = {own_keys.get(path, path): tensor for path, tensor in taken.tensors.items()}
        first = statements[0].structures if self._team.rank else {}
        same = {part for part, digest in statements[self._team.rank].structures.items() if first.get(part) == digest}
        handed_on = own_keys.keys() & handed_on_paths(tracked) if own_keys else ()
        described = taken.describe(own_keys, same=same, handed_on=handed_on)
        if not planned:
            problems = self._plan(tensors, described)
            if problems:
                return self._refuse(name, problems)
            self._planned_for = self._plan_key(taken)
        to_memory = to_memory and self._has_room(name, tensors, described)
        if to_disk or to_memory:
            aside = Path(statements[0].aside) if to_disk else None
            meanwhile = None if look is None else functools.partial(look, taken.states)
            self._hand_over(name, tensors, described, aside=aside, to_memory=to_memory, meanwhile=meanwhile)
        return to_disk or to_memory

    def _agree_on_memory(self, name: CheckpointName, statements: list[_Statement]) -> bool:
        """Whether all ranks are done with the snapshot before; all come to the same."""
        assert self._memory is not None
        self._memory.agree([said.memory_complete for said in statements])
        busy = [rank for rank, said in enumerate(statements) if said.memory_busy]
        if busy:
            self._tell("not_kept", name, f"the snapshot before it is still being copied (ranks {busy[:8]})")
        return not busy

    def _has_room(self, name: CheckpointName, tensors: Mapping[str, torch.Tensor], described: str) -> bool:
        """Asked once for each layout; a collective then."""
        assert self._memory is not None and self._layout is not None
        if not self._memory_measured:
            self._memory_measured = True
            untouched = 0 if self._arena_touched or self._arena is None else self._arena.size_bytes
            part_bytes = self._layout.size_bytes + 2 * len(_text(self._layout, described))
            own = {f"{path}@rank-{self._team.rank:05d}" for path in self._replicas.differing}
            alike = {key: one.nbytes for key, one in tensors.items() if key not in own and not isinstance(one, DTensor)}
            self._memory.room(
                part_bytes=part_bytes,
                alike_bytes=sum(alike.values()),
                alike_in_part=sum(chunk.size_bytes for chunk in self._layout.chunks if chunk.key in alike),
                untouched_bytes=untouched,
            )
            if self._memory.refusal:
                self._tell("not_kept", name, f"no snapshots are kept from here on: {self._memory.refusal}")
        return not self._memory.refusal

    def _capture(self, tracked: Mapping[str, Any]) -> _Taken:
        states = collect(tracked)
        snapshot = Snapshot.of(states)
        several = self._team.world_size > 1
        return _Taken(
            states=states,
            tensors=snapshot.tensors,
            structures={part: self._texts.of(part, structure) for part, structure in snapshot.structures.items()},
            alike=self._replicas.fingerprint(snapshot.tensors) if several else b"",
        )

    def _compare(self, tracked: Mapping[str, Any], taken: _Taken, *, in_doubt: bool) -> bool:
        """Compare tensor by tensor what may be alike; True where other ones differ than before. A collective."""
        before = self._replicas.differing
        if self._team.world_size > 1:
            if in_doubt:
                self._replicas.doubt()
            checksums = self._team.gather(self._replicas.checksums(taken.tensors))
            self._replicas.compare(checksums, synchronized=synchronized_paths(tracked, taken.tensors))
        return self._replicas.differing != before

    def _until_free(
        self, name: CheckpointName, taken: _Taken | None, problem: str, *, to_disk: bool
    ) -> list[_Statement] | None:
        """What every rank says once none is busy with an earlier save; None where this one is skipped."""
        statements = self._team.gather(self._statement(name, taken, problem, to_disk=to_disk))
        busy = [rank for rank, said in enumerate(statements) if said.busy]
        if busy and to_disk:
            busy = self._await_free(self._settings.wait_limit_s if self._settings.when_busy == "wait" else 0.0)
            statements = [] if busy else self._team.gather(self._statement(name, taken, problem, to_disk=to_disk))
        if busy:
            kind: Literal["skipped", "not_kept"] = "skipped" if to_disk else "not_kept"
            self._tell(kind, name, f"the save before it is still being written (ranks {busy[:8]})")
            return None
        return statements

    def _statement(self, name: CheckpointName, taken: _Taken | None, problem: str, *, to_disk: bool) -> _Statement:
        self._listen(0)
        directory = name.directory(self._settings.root)
        return _Statement(
            busy=self.busy if to_disk else self._copy_in_use,
            aside=str(directory.with_name(f"{ASIDE}{directory.name}-{uuid.uuid4().hex[:8]}")),
            problem=problem,
            connected=self._writer is not None,
            planned=taken is not None and self._planned_for == self._plan_key(taken),
            alike=b"" if taken is None else taken.alike,
            structures={} if taken is None or self._team.world_size == 1 else taken.digests(),
            memory_busy=self._memory_busy,
            memory_complete=None if self._memory is None else self._memory.complete,
        )

    def _await_free(self, limit_s: float, *, with_memory: bool = False) -> list[int]:
        """Wait until no rank has a save under way; returns the ranks that still have. A collective.

        with_memory: wait for copies of snapshots on other nodes as well.
        """
        deadline = time.monotonic() + limit_s
        while True:
            self._listen(0)
            busy = self.busy or (with_memory and self._memory_busy)
            said = self._team.gather((busy, self._lost, time.monotonic() > deadline))
            if self._publishing is not None and any(lost == self._publishing for _, lost, _ in said):
                self._send({"op": "abandon"})
            ranks = [rank for rank, (is_busy, _, _) in enumerate(said) if is_busy]
            if not ranks or said[0][2]:
                return ranks
            self._listen(_LOOK_EVERY_S)

    def _connect(self) -> list[str]:
        self._drop_writer()
        writer, problem = _attempt(lambda: Writer(self._team))
        self._writer = writer
        problems = self._team.gather(problem)
        if self._writer is not None and self._arena is not None:
            self._lend_arena()
        return [f"rank {rank}: {said}" for rank, said in enumerate(problems) if said]

    def _plan_key(self, taken: _Taken) -> tuple[Signature, frozenset[str]]:
        """What a layout depends on."""
        return signature(taken.tensors), self._replicas.differing

    def _plan(self, tensors: Mapping[str, torch.Tensor], described: str) -> list[str]:
        self._memory_measured = False
        layout, problem = _attempt(lambda: plan_layout(tensors, self._team))
        if layout is not None:
            self._layout = layout
            _, problem = _attempt(lambda: self._make_room(layout.size_bytes + 2 * len(_text(layout, described))))
        return [f"rank {rank}: {said}" for rank, said in enumerate(self._team.gather(problem)) if said]

    def _make_room(self, size_bytes: int) -> None:
        if self._arena is not None and self._arena.size_bytes >= size_bytes:
            return
        if self._arena is not None:
            self._send({"op": "drop"})  # the writer's hold on it would count against the new one
            self._arena.close()
            self._arena = None
        self._arena, self._arena_touched = Arena(size_bytes), False
        self._lend_arena()

    def _lend_arena(self) -> None:
        assert self._arena is not None
        self._send({"op": "arena", "size_bytes": self._arena.size_bytes}, fd=self._arena.fd)

    def _hand_over(
        self,
        name: CheckpointName,
        tensors: Mapping[str, torch.Tensor],
        described: str,
        *,
        aside: Path | None,
        to_memory: bool,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """The copy, and word to the writer. What fails here fails on this rank alone: its part is lost."""
        layout, settings = self._layout, self._settings
        assert layout is not None

        def copy() -> int:
            text = _text(layout, described)
            self._make_room(layout.size_bytes + len(text))
            assert self._arena is not None
            layout.copy(tensors, self._arena.view, meanwhile=meanwhile)
            self._arena.write(layout.size_bytes, text)
            self._arena_touched = True
            return len(text)

        described_bytes, problem = _attempt(copy)
        memory = self._memory.order(name, flushed=self._part_of) if self._memory is not None and to_memory else None
        if aside is not None:
            self._lost = None
            self._publishing = name if self._team.leads else None
        if described_bytes is None or self._writer is None:
            problem = problem or "its writer is gone"
            if memory is not None:
                self._lose_memory(name, problem)
            if aside is not None:
                self._lose(name, problem)
            return
        # What was copied may have waited for a frozen process: the writer counts from here on.
        held_ns = settings.look_at_lease() if settings.look_at_lease else None
        if aside is not None:
            self._part_of, self._part_from_copy = name, True
        self._memory_part_of = name if memory is not None else None
        sent = self._send(
            {
                "op": "save",
                "name": asdict(name),
                "aside": None if aside is None else str(aside),
                "memory": memory,
                "lease_held_ns": held_ns,
                "limit_s": _PUBLISH_LIMIT_S,
                "pauses_s": _RETRY_AFTER_S,
                "bytes_per_s": settings.bytes_per_s,
                "nodes": self._writer.nodes,
                "node": self._writer.node,
                "part": {
                    "rank": self._team.rank,
                    "world_size": self._team.world_size,
                    "shard_bytes": layout.size_bytes,
                    "described_at": layout.size_bytes,
                    "described_bytes": described_bytes,
                },
                "publication": {
                    "root": str(settings.root),
                    "parent": asdict(settings.parent) if settings.parent else None,
                    "job": settings.job,
                    "total_steps": settings.total_steps,
                    "torch_version": torch.__version__,
                    "keep": settings.keep,
                }
                if self._team.leads and aside is not None
                else None,
            }
        )
        self._listening = sent

    # --- What became of it ---------------------------------------------------------------------------------------

    def news(self) -> list[News]:
        """What has become known since the last call. Costs nothing while nothing is under way, and little else."""
        if self._listening and (now := time.monotonic()) >= self._listen_next:
            self._listen_next = now + _NEWS_EVERY_S
            self._listen(0)
        if self._memory is not None:
            for kept in self._memory.news():
                self._news.append(
                    News(
                        kind="not_kept" if kept.problem else "kept",
                        name=kept.name,
                        problem=kept.problem,
                        size_bytes=kept.size_bytes,
                        save_time_s=kept.seconds,
                        copy_of=kept.copy_of,
                    )
                )
        found, self._news = self._news, []
        return found

    def settle(self) -> None:
        """Wait until no save is under way on any rank, for longer than that takes by the rate. A collective."""
        rate, size_bytes = self._settings.bytes_per_s, self._layout.size_bytes if self._layout else 0
        expected_s = size_bytes * self._team.world_size / rate if rate else 0.0
        self._await_free(_PUBLISH_LIMIT_S + 2 * expected_s, with_memory=True)

    def close(self, *, limit_s: float = 0.0) -> None:
        """Let the writer go, once this rank's share of a save that is under way is done, or the limit has passed."""
        deadline = time.monotonic() + limit_s
        while (self.busy or self._memory_busy) and (left_s := deadline - time.monotonic()) > 0:
            self._listen(left_s)
        self._drop_writer()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _listen(self, limit_s: float) -> None:
        """Take in what the writer has said; wait for its first word for at most `limit_s`."""
        while self._writer is not None:
            channel = self._writer.channel
            if not select.select([channel], [], [], limit_s)[0]:
                return
            limit_s = 0
            message, _ = receive(channel)
            if message is None:
                self._drop_writer()
                return
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        name = CheckpointName(generation=message["generation"], step=message["step"])
        problem = message["problem"]
        match message["about"]:
            case "memory":
                self._memory_part_of = None
                assert self._memory is not None
                self._memory.written(name, problem, size_bytes=message["size_bytes"])
                if self._part_of == name and not problem:
                    self._part_from_copy = False
            case "part":
                self._part_of = None
                if problem:
                    self._lose(name, problem)
            case "save":
                self._publishing = None
                if problem:
                    self._tell("failed", name, problem)
                else:
                    self._news.append(
                        News(
                            kind="saved",
                            name=name,
                            size_bytes=message["size_bytes"],
                            save_time_s=message["seconds"],
                            note=message["left"],
                        )
                    )
            case "rehashed":
                self._tell("rehashed", name, problem)
            case "tried" if problem:
                self._tell("unwritable", name, problem)

    def _lose(self, name: CheckpointName, problem: str) -> None:
        """This rank's part will not come; rank 0's writer is told when all ranks next talk to each other."""
        self._lost, self._part_of = name, None
        self._tell("failed", name, f"rank {self._team.rank}: {problem}")
        if self._team.leads:
            self._publishing = None

    def _lose_memory(self, name: CheckpointName, problem: str) -> None:
        assert self._memory is not None
        self._memory_part_of = None
        self._memory.written(name, problem, size_bytes=0)

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._memory_part_of is not None:
            self._lose_memory(self._memory_part_of, "its writer has died")
        if self._part_of is not None:
            self._lose(self._part_of, "its writer has died")
        elif self._publishing is not None:
            self._tell("failed", self._publishing, "its writer has died")
        self._publishing = None
        self._listening = False

    def _refuse(self, name: CheckpointName, problems: list[str]) -> bool:
        self._tell("failed", name, "; ".join(problems)[:2000])
        return False

    def _tell(
        self,
        kind: Literal["failed", "skipped", "rehashed", "not_kept", "unwritable"],
        name: CheckpointName,
        problem: str,
    ) -> None:
        self._news.append(News(kind=kind, name=name, problem=problem))

    def _send(self, message: dict[str, Any], *, fd: int | None = None) -> bool:
        if self._writer is None:
            return False
        try:
            send(self._writer.channel, message, fd=fd)
        except OSError:
            self._drop_writer()
            return False
        return True


def _text(layout: Layout, described: str) -> bytes:
    return f'{{"chunks": {layout.text}, {described}}}'.encode()


def _attempt(work: Any) -> tuple[Any, str]:
    """(result, "") or (None, what went wrong): whatever it is, other ranks must not be left waiting."""
    try:
        return work(), ""
    except (EverstepError, SaveFailed) as err:
        return None, str(err)
    except Exception as err:
        return None, f"{type(err).__name__}: {err}"
