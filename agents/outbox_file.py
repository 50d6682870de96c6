"""The outbox's file: a state byte, then records with a checksum each, appended as messages come; rewritten when worn.

One write(2) per message and nothing else: a file of this kind needs no page cache of its own and no checkpoints that
stall the loop, and each record's checksum tells a damaged one, which an embedded database does not. A message is in the
kernel's hands before it is sent; a power cut may take the newest ones, and the server's count then shows it
(`Outbox.begin`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents.protocol.outbox import Entry
from agents.told import Told

_MAGIC = b"everstep outbox 1 "
_STATE_AT = len(_MAGIC)
_COMPLETE, _INCOMPLETE = b"D", b"M"
"""Whether the disk holds all, or the memory of the agent holds more."""
_START = len(_MAGIC) + 2
_HEAD = struct.Struct("<II")
"""Checksum and length of a record."""
_LARGEST_RECORD = 8 << 20
_LARGEST_FILE = 512 << 20


class _Begun(msgspec.Struct, frozen=True, array_like=True):
    """The first record of a file: what does not follow from the entries in it."""

    outbox_id: str
    next_seq: int
    told: Told


class OutboxDamaged(Exception):
    """The file holds something else than an outbox; the text says what."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a file held."""

    outbox_id: str
    next_seq: int
    told: Told
    """As of before the entries."""
    entries: list[Entry]
    complete: bool
    """False if the agent that wrote it went on from memory."""
    torn: bool
    """Its last record was not written to its end."""


class OutboxFile:
    """An open file. All methods raise `OSError`; after one, what the file holds up to then is still good."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = size

    @classmethod
    def replace(cls, path: Path, *, outbox_id: str, next_seq: int, told: Told, entries: Iterable[Entry]) -> OutboxFile:
        """Write everything aside and put it in the place of what is there."""
        aside = path.with_name(f".{path.name}.new")
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            file = cls(descriptor, 0)
            file._write(_MAGIC + _COMPLETE + b"\n")
            file._write(_record(_Begun(outbox_id=outbox_id, next_seq=next_seq, told=told)))
            for entry in entries:
                file._write(_record(entry))
            aside.replace(path)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        return file

    @classmethod
    def open(cls, path: Path) -> OutboxFile:
        """Go on with a file that was read as complete and not torn."""
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        return cls(descriptor, os.fstat(descriptor).st_size)

    def append(self, entry: Entry) -> None:
        """In the kernel's hands when this returns."""
        self._write(_record(entry))

    def mark_incomplete(self) -> None:
        """Say that the memory holds more from now on; overwrites one byte, for which also a full disk has room."""
        if os.pwrite(self._descriptor, _INCOMPLETE, _STATE_AT) != 1:
            raise OSError(errno.EIO, "nothing was written")

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed it, so that nothing written to it would be found again."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self.size_bytes + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size_bytes)
            raise
        self.size_bytes += len(data)


def read_outbox(path: Path) -> Content | None:
    """Return what a file holds, None if there is none. Raises `OSError` or `OutboxDamaged`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_FILE:
            raise OutboxDamaged("it is no regular file of a likely size")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read()
    finally:
        os.close(descriptor)
    if len(data) < _START or not data.startswith(_MAGIC):
        raise OutboxDamaged("it does not begin like an outbox of this release")
    payloads, torn = _payloads(data)
    try:
        if not payloads:
            raise OutboxDamaged("it ends before its first record")
        begun = msgspec.msgpack.decode(payloads[0], type=_Begun)
        decoder = msgspec.msgpack.Decoder(Entry)
        entries = [decoder.decode(payload) for payload in payloads[1:]]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise OutboxDamaged(f"a record cannot be read ({err})") from err
    _check_order(entries)
    return Content(
        outbox_id=begun.outbox_id,
        next_seq=max([begun.next_seq, *(entry.last + 1 for entry in entries)]),
        told=begun.told,
        entries=entries,
        complete=data[_STATE_AT : _STATE_AT + 1] == _COMPLETE,
        torn=torn,
    )


def _record(value: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(value)
    return _HEAD.pack(zlib.crc32(payload), len(payload)) + payload


def _payloads(data: bytes) -> tuple[list[bytes], bool]:
    """The records' content, and whether the last one stops short. Raises `OutboxDamaged`."""
    found: list[bytes] = []
    at = _START
    while at < len(data):
        if at + _HEAD.size > len(data):
            return found, True
        checksum, length = _HEAD.unpack_from(data, at)
        if length > _LARGEST_RECORD:
            raise OutboxDamaged(f"the record at byte {at} has an unlikely length")
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length:
            return found, True
        if zlib.crc32(payload) != checksum:
            raise OutboxDamaged(f"the record at byte {at} does not match its checksum")
        found.append(payload)
        at += _HEAD.size + length
    return found, False


def _check_order(entries: list[Entry]) -> None:
    due = None
    for entry in entries:
        if entry.last < entry.first or (due is not None and entry.first != due):
            raise OutboxDamaged(f"message {entry.first} stands where {due} is due")
        due = entry.last + 1
