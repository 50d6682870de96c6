"""A file system whose only file hangs when it is read: gives a real process in state D that SIGKILL does not end.

FUSE, by hand (fuse(4), linux/fuse.h): once the request to read is in our hands, the reader waits for our answer, and no
signal ends that wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_MS_NOSUID_NODEV = 6
_MNT_FORCE, _MNT_DETACH = 1, 2
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _INIT, _INTERRUPT = 1, 2, 3, 14, 15, 26, 36
_ENOSYS = 38
_ROOT, _FILE = 1, 2


@contextlib.contextmanager
def hung_file(place: Path) -> Iterator[Path]:
    """Mount it at `place`; reading the path that is yielded hangs until the end of the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as err:
        pytest.skip(f"no process can be brought into state D here: /dev/fuse: {err.strerror}")
    place.mkdir()
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"hung", bytes(place), b"fuse.hung", _MS_NOSUID_NODEV, options.encode()) != 0:
        os.close(device)
        pytest.skip(f"no process can be brought into state D here: mount: {os.strerror(ctypes.get_errno())}")
    server = threading.Thread(target=_serve, args=(device,), daemon=True)
    server.start()
    try:
        yield place / "file"
    finally:
        libc.umount2(bytes(place), _MNT_FORCE | _MNT_DETACH)  # by force: all waits end
        server.join(5)
        os.close(device)


def _attributes(node: int) -> bytes:
    mode = 0o040755 if node == _ROOT else 0o100644
    return struct.pack("<QQQQQQIIIIIIIIII", node, 10, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _serve(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return
        _, kind, unique, node, *_ = _IN.unpack(request[: _IN.size])
        body, error = _answer(kind, node)
        if body is None:
            continue
        with contextlib.suppress(OSError):
            os.write(device, _OUT.pack(_OUT.size + len(body), -error, unique) + body)


def _answer(kind: int, node: int) -> tuple[bytes | None, int]:
    """(body, error); no body means no answer, now or ever."""
    match kind:
        case k if k == _INIT:
            return struct.pack("<IIIIHHIIHHI", 7, 31, 0, 0, 12, 10, 1 << 16, 1, 0, 0, 0).ljust(64, b"\0"), 0
        case k if k == _LOOKUP:
            return struct.pack("<QQQQII", _FILE, 0, 1, 1, 0, 0) + _attributes(_FILE), 0
        case k if k == _GETATTR:
            return struct.pack("<QII", 1, 0, 0) + _attributes(node), 0
        case k if k == _OPEN:
            return struct.pack("<QII", 1, 0, 0), 0
        case k if k in (_READ, _FORGET, _INTERRUPT):
            return None, 0
    return b"", _ENOSYS
