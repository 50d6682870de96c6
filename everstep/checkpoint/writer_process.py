"""One process per node that hashes, writes and publishes what its ranks have copied: `python -m ... <socket fd>`.

The first rank of a node starts it (`writers.py`) with a listening socket; each rank of the node connects. It ends when
the last of them is gone, and dies with the rank that started it. Standard library only, so that it costs about ten
megabytes and starts in a blink.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.checkpoint.left_overs import left_over_directories
from everstep.checkpoint.manifest import CheckpointName, Manifest
from everstep.checkpoint.memory import Held, keep_only, keep_part
from everstep.checkpoint.publish import Publication, discard, publish, tell_done, tell_failed
from everstep.checkpoint.retention import remove_expired
from everstep.checkpoint.shards import BLOCK_BYTES, Pace, Part, copy_part, with_patience, write_part
from everstep.checkpoint.verify import verify
from everstep.checkpoint.wire import receive, send
from everstep.checkpoint.write_test import write_test
from everstep.elastic.lease_files import LeasePaths
from everstep.errors import CheckpointDamaged, CheckpointMissing, EverstepError
from everstep.rank_lease import PublishingLease

_NICENESS = 10
_PR_SET_PDEATHSIG = 1


class Node:
    """What the connections of one node's ranks share."""

    def __init__(self) -> None:
        self.one_at_a_time = threading.Lock()
        """Ranks of a node write one after the other: the store sees one stream from each node."""
        self._rehashing: queue.Queue[tuple[Connection, Path, CheckpointName, Pace]] = queue.Queue()
        self._connected = 0
        self._lock = threading.Lock()
        self._lease: PublishingLease | None = None
        threading.Thread(target=self._rehash, name="rehash", daemon=True).start()

    def joined(self) -> None:
        with self._lock:
            self._connected += 1

    def left(self) -> None:
        """The last one to leave ends the process: nobody is there for whom anything could be finished."""
        with self._lock:
            self._connected -= 1
            if not self._connected:
                os._exit(0)

    def look_at_lease(self, *, held_ns: int | None) -> Callable[[], None]:
        """What ends this process if the lease of its ranks has run out; where there is none, nothing does.

        held_ns: when the rank last found it held. Raises `LeaseUnusable`.
        """
        paths = LeasePaths.from_environment(os.environ)
        if paths is None:
            return lambda: None
        with self._lock:
            lease = self._lease = self._lease or PublishingLease(paths)
        return functools.partial(lease.check, held_ns=held_ns or 0)

    def rehash(self, connection: Connection, directory: Path, name: CheckpointName, pace: Pace) -> None:
        """Read it again from storage when nothing else is to be done, and tell."""
        self._rehashing.put((connection, directory, name, pace))

    def _rehash(self) -> None:
        while True:
            connection, directory, name, pace = self._rehashing.get()
            problem = ""
            try:
                verify(directory, from_storage=True, progress=pace.take)
            except CheckpointMissing:
                continue  # retention was faster
            except CheckpointDamaged as err:
                problem = str(err)
            connection.tell("rehashed", name, problem)


class Connection:
    """One rank, as its writer sees it."""

    def __init__(self, channel: socket.socket, node: Node) -> None:
        self._channel = channel
        self._node = node
        self._memory: memoryview | None = None
        self._abandoned = threading.Event()
        self._jobs: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._work, name="save", daemon=True).start()

    def serve(self) -> None:
        """Until the rank is gone, or cannot be served: it then learns that its writer is gone, and starts another."""
        try:
            self._serve()
        finally:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            self._node.left()

    def _serve(self) -> None:
        while True:
            message, fd = receive(self._channel)
            if message is None:
                return
            match message["op"]:
                case "arena":
                    if fd is None:  # there was no room for one more descriptor here
                        return
                    self._memory = memoryview(mmap.mmap(fd, message["size_bytes"], prot=mmap.PROT_READ))
                    os.close(fd)
                case "drop":
                    self._memory = None
                case "save":
                    if message["aside"] is not None:
                        self._abandoned.clear()
                    self._jobs.put({**message, "began": time.monotonic()})
                case "try":
                    self._jobs.put(message)
                case "abandon":
                    self._abandoned.set()

    def tell(self, about: str, name: CheckpointName, problem: str, **fields: Any) -> None:
        """Tell the rank how something ended; a rank that is gone needs no telling."""
        message = {"about": about, "generation": name.generation, "step": name.step, "problem": problem, **fields}
        with contextlib.suppress(OSError):
            send(self._channel, message)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            name = CheckpointName(**job["name"])
            if job["op"] == "try":
                self._try(job, name)
                continue
            kept = None if job["memory"] is None else self._keep(job, name)
            if job["aside"] is None:
                continue
            if kept is None:
                self._save(job, name, source=None)
            else:
                # From there it takes as long as the store needs, and the next snapshot does not wait for it.
                threading.Thread(target=self._save, args=(job, name), kwargs={"source": kept}, daemon=True).start()

    def _try(self, job: dict[str, Any], name: CheckpointName) -> None:
        problem = ""
        try:
            write_test(Path(job["root"]), size_bytes=job["size_bytes"])
        except Exception as err:  # whatever it is, the rank must hear of it
            problem = f"{type(err).__name__}: {err}"
        self.tell("tried", name, problem)

    def _save(self, job: dict[str, Any], name: CheckpointName, *, source: Path | None) -> None:
        """Bring the part to disk, from where it lies in memory or else from the rank's own copy, and publish."""
        if job["publication"] is not None:
            _remove_given_up(Path(job["publication"]["root"]), job, name)
        written = self._write(job, name, source=source)
        if job["publication"] is not None:
            self._publish(job, name) if written else discard(_publication(job, name))

    def _keep(self, job: dict[str, Any], name: CheckpointName) -> Path | None:
        """Put the part into memory, in place of the snapshots that are not needed any more; returns where it is."""
        order, root, memory = job["memory"], Path(job["memory"]["root"]), self._memory
        assert memory is not None
        part = Part(name=name, **job["part"])
        piece = Held(name=name, token=order["token"], world_size=part.world_size, rank=part.rank, copied=False)
        said = order["described"]
        problem, size_bytes = "", 0
        try:
            keep_only(
                root,
                {(CheckpointName(**kept), token) for kept, token in order["keep"]},
                token=piece.token,
                ranks=order["ranks"],
                flushed=CheckpointName(**order["flushed"]) if order["flushed"] else None,
            )
            size_bytes = keep_part(
                piece,
                root,
                part,
                memory,
                described={**said, "parent": CheckpointName(**said["parent"]) if said["parent"] else None},
                may_publish=self._node.look_at_lease(held_ns=job["lease_held_ns"]),
            )
        except Exception as err:  # whatever it is, the rank must hear of it
            problem = f"{type(err).__name__}: {err}"
        self.tell("memory", name, problem, size_bytes=size_bytes)
        return None if problem else piece.directory(root)

    def _write(self, job: dict[str, Any], name: CheckpointName, *, source: Path | None) -> bool:
        part = Part(name=name, **job["part"])
        aside, began = Path(job["aside"]), time.monotonic()
        memory = self._memory
        assert memory is not None

        def attempt() -> list[Any]:
            aside.mkdir(parents=True, exist_ok=True)
            pace = _share(job)
            with self._node.one_at_a_time:
                entries = write_part(aside, part, memory, pace) if source is None else copy_part(source, aside, pace)
            tell_done(aside, part.rank, entries)
            return entries

        problem = ""
        try:
            with_patience(attempt, pauses_s=tuple(job["pauses_s"]))
        except Exception as err:  # whatever it is, the rank must hear of it
            problem = f"{type(err).__name__}: {err}"
            tell_failed(aside, part.rank, problem)
        self.tell("part", name, problem, seconds=time.monotonic() - began)
        return not problem

    def _publish(self, job: dict[str, Any], name: CheckpointName) -> None:
        publication = _publication(job, name)
        problem = ""
        manifest: Manifest | None = None
        try:
            manifest = publish(
                publication,
                limit_s=job["limit_s"],
                abandoned=self._abandoned.is_set,
                may_publish=self._node.look_at_lease(held_ns=job["lease_held_ns"]),
            )
        except Exception as err:  # whatever it is, the rank must hear of it
            problem = str(err) if isinstance(err, EverstepError) else f"{type(err).__name__}: {err}"
            discard(publication)
        left = _retain(publication, keep=job["publication"]["keep"]) if manifest is not None else ""
        self.tell(
            "save",
            name,
            problem,
            size_bytes=manifest.size_bytes if manifest else 0,
            seconds=time.monotonic() - job["began"],
            left=left,
        )
        if manifest is not None:
            self._node.rehash(self, name.directory(publication.root), name, Pace(job["bytes_per_s"]))


def _share(job: dict[str, Any]) -> Pace:
    """This node's part of the rate; its blocks come between those of other nodes."""
    rate, nodes = job["bytes_per_s"], job["nodes"]
    if rate is None:
        return Pace(None)
    return Pace(rate / nodes, begin_after_s=job["node"] * BLOCK_BYTES / rate)


def _publication(job: dict[str, Any], name: CheckpointName) -> Publication:
    said = job["publication"]
    return Publication(
        root=Path(said["root"]),
        aside=Path(job["aside"]),
        name=name,
        parent=CheckpointName(**said["parent"]) if said["parent"] else None,
        job=said["job"],
        total_steps=said["total_steps"],
        world_size=job["part"]["world_size"],
        torch_version=said["torch_version"],
    )


def _remove_given_up(root: Path, job: dict[str, Any], name: CheckpointName) -> None:
    """What slower ranks have written for a save of this generation that was given up meanwhile: it takes up space.

    All of them are done with it, since no save begins before.
    """
    with contextlib.suppress(OSError):
        for left_over, directory in left_over_directories(root):
            if left_over.generation == name.generation and directory != Path(job["aside"]):
                shutil.rmtree(directory, ignore_errors=True)


def _retain(publication: Publication, *, keep: int) -> str:
    generation = publication.name.generation
    try:
        remove_expired(publication.root, generation=generation, parent=publication.parent, keep=keep)
    except OSError as err:
        return f"{type(err).__name__}: {err}"
    return ""


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main() -> int:
    _die_with(int(sys.argv[2]))
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is meant for the ranks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    node = Node()
    while True:
        channel, _ = listener.accept()
        node.joined()
        threading.Thread(target=Connection(channel, node).serve, name="rank", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
