"""The agent's outbox: durable messages survive a server that is away, and an agent that ends in whatever way.

The daemon adds messages, the link sends from it. All decisions are `agents.protocol.outbox.Outbox`'s, which is held in
memory; the file only follows it. So a disk that is full, gone or read-only costs the agent nothing but its memory
between two lives, and that is told at once, as a numbered gap.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.log_lines import NodeLog
from agents.outbox_file import Content, OutboxDamaged, OutboxFile, read_outbox
from agents.protocol.messages import FromAgent, Message
from agents.protocol.outbox import Outbox
from agents.told import Told

log = NodeLog(__name__)

OUTBOX_FILE = "outbox.log"
_WORN_BYTES = 1 << 20
"""A file beyond this that holds more than twice what still waits is written anew."""
_TRY_AGAIN_S = 10.0

_ENDED_IN_MEMORY = "the agent ended while its outbox could not be written: what had not been sent by then may be lost"
_TORN = "the agent ended while it wrote a message to its disk: that one is lost"


class DiskOutbox:
    """What waits for the server, in memory and in `outbox.log`; `open` comes first."""

    def __init__(
        self,
        state_directory: Path,
        *,
        limit: int = 50_000,
        limit_bytes: int = 32 << 20,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = state_directory / OUTBOX_FILE
        self._limit, self._limit_bytes = limit, limit_bytes
        self._now = now
        self._box = Outbox(outbox_id=secrets.token_hex(16), limit=limit, limit_bytes=limit_bytes)
        self._file: OutboxFile | None = None
        self._worn_at = _WORN_BYTES
        self._failed_at = 0.0
        self.told = Told()
        """What was told of each generation, by what has ever been added."""

    @property
    def outbox_id(self) -> str:
        return self._box.outbox_id

    @property
    def on_disk(self) -> bool:
        """Whether it would survive the end of this agent."""
        return self._file is not None

    def __len__(self) -> int:
        return len(self._box)

    def open(self) -> None:
        """Go on with what an earlier life has left. A disk in trouble is told and is no reason to stop."""
        try:
            content = read_outbox(self._path)
        except OutboxDamaged as err:
            self._box.tell_gap(self._set_aside(str(err)))
            content = None
        except OSError as err:
            self._box.tell_gap(self._set_aside(f"it cannot be read ({err.strerror})"))
            content = None
        try:
            if content is not None:
                self._restore(content)
                if content.complete and not content.torn:
                    self._file = OutboxFile.open(self._path)
                    return
            self._rewrite()
        except OSError as err:
            self._fail(err)

    def add(self, message: Message) -> int:
        """Number a message and keep it until it is acknowledged."""
        shape = self._box.reshaped
        seq = self._box.add(message)
        self.told.take(message)
        self._keep_newest(shape)
        return seq

    def tell_gap(self, reason: str) -> int:
        """Tell of a loss outside this outbox, under a number of its own."""
        shape = self._box.reshaped
        seq = self._box.tell_gap(reason)
        self._keep_newest(shape)
        return seq

    def _keep_newest(self, shape: int) -> None:
        if self._file is None:
            return
        try:
            if self._box.reshaped == shape:
                self._file.append(self._box.newest)
            else:
                log.warning("the outbox is full: messages were dropped", waiting=len(self._box))
                self._rewrite()
        except OSError as err:
            self._fail(err)

    def begin(self, acknowledged: int) -> None:
        """A connection begins; see `Outbox.begin`."""
        shape = self._box.reshaped
        self._box.begin(acknowledged)
        if self._box.reshaped != shape and self._file is not None:
            try:
                self._rewrite()
            except OSError as err:
                self._fail(err)

    def acknowledge(self, through: int) -> None:
        """Forget everything up to and including `through`; on disk, some time later."""
        self._box.acknowledge(through)
        if self._file is None or self._file.size_bytes <= max(self._worn_at, 2 * self._box.size_bytes):
            return
        try:
            self._rewrite()
            self._worn_at = _WORN_BYTES
        except OSError as err:
            # The old file is still right, it only holds more than it has to.
            self._worn_at = 2 * self._file.size_bytes
            log.warning("the outbox could not be written anew; it goes on in its old file", error=err)

    def frames(self, *, after: int, through: int, max_bytes: int) -> list[tuple[int, bytes]]:
        return self._box.frames(after=after, through=through, max_bytes=max_bytes)

    def look(self) -> None:
        """Try to come back to a disk that failed. Called about once a second."""
        if self._file is not None:
            self._see_that_it_is_there(self._file)
            return
        if self._now() - self._failed_at < _TRY_AGAIN_S:
            return
        try:
            self._rewrite()
        except OSError as err:
            self._failed_at = self._now()
            log.warning("the outbox still cannot be written", path=self._path, error=err)
        else:
            log.info("the outbox is on disk again", path=self._path, waiting=len(self._box))

    def _see_that_it_is_there(self, file: OutboxFile) -> None:
        try:
            if file.is_gone:
                log.warning("the outbox was removed from its disk; it is written anew", path=self._path)
                self._rewrite()
        except OSError as err:
            self._fail(err)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _restore(self, content: Content) -> None:
        self._box = Outbox.restored(
            outbox_id=content.outbox_id,
            next_seq=content.next_seq,
            entries=content.entries,
            limit=self._limit,
            limit_bytes=self._limit_bytes,
        )
        self.told = content.told
        decoder = msgspec.msgpack.Decoder(FromAgent)
        for entry in content.entries:
            if entry.body is not None:
                with contextlib.suppress(msgspec.MsgspecError):  # of a later release; it is sent all the same
                    self.told.take(decoder.decode(entry.body))
        if content.torn:
            self._box.tell_gap(_TORN)
        if not content.complete:
            self._box.tell_gap(_ENDED_IN_MEMORY)

    def _set_aside(self, why: str) -> str:
        """Put a damaged file out of the way for somebody to look at. Returns what to tell of it."""
        aside = self._path.with_name("outbox.damaged")
        words = f"the agent's outbox on disk was damaged: {why}; what it held and had not been sent is lost"
        try:
            self._path.replace(aside)
        except OSError as err:
            log.error("the outbox is damaged and could not be set aside", path=self._path, why=why, error=err)
            return words
        log.error("the outbox was damaged and is set aside", path=aside, why=why)
        return f"{words} (the file is {aside})"

    def _rewrite(self) -> None:
        """Put everything that waits into a new file. Raises `OSError`; the old file is as it was then."""
        file = OutboxFile.replace(
            self._path,
            outbox_id=self._box.outbox_id,
            next_seq=self._box.next_seq,
            told=self.told,
            entries=self._box.entries,
        )
        if self._file is not None:
            self._file.close()
        self._file = file

    def _fail(self, error: OSError) -> None:
        """The disk does not follow any more: go on from memory, and say so."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.mark_incomplete()
            self._file.close()
            self._file = None
        self._failed_at = self._now()
        log.error("the outbox cannot be written; it goes on from memory", path=self._path, error=error)
        self._box.tell_gap(
            f"the agent's outbox cannot be written ({error.strerror}): it goes on from memory, and what waits is lost "
            f"if the agent ends before its disk is well"
        )
