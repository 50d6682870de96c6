"""Can this node write checkpoints? Only a real write tells: free space says little of quotas and of full targets.

Each node's writer does one at the start of a run, so that a store that refuses is known long before the first save.
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path

LARGEST_BYTES = 4 << 20
_LEFT_BEHIND_S = 3600.0


def write_test(root: Path, *, size_bytes: int) -> None:
    """Write, sync, rename, read back and delete a file under `root`. Raises OSError, also where other bytes come back.

    size_bytes: cut to `LARGEST_BYTES`.
    """
    root.mkdir(parents=True, exist_ok=True)
    prefix = f".write-test-{socket.gethostname()}-"
    _remove_left_behind(root, prefix)
    final, aside = root / f"{prefix}{os.getpid()}", root / f"{prefix}{os.getpid()}.tmp"
    content = os.urandom(max(1, min(size_bytes, LARGEST_BYTES)))
    try:
        with aside.open("wb", buffering=0) as file:
            _write_all(file.fileno(), content)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        aside.rename(final)
        if final.read_bytes() != content:
            raise OSError(errno.EIO, "other bytes came back than were written", str(final))
    finally:
        for path in (aside, final):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _remove_left_behind(root: Path, prefix: str) -> None:
    """What a test left that was killed in the middle."""
    with contextlib.suppress(OSError):
        for path in root.glob(f"{prefix}*"):
            if time.time() - path.lstat().st_mtime > _LEFT_BEHIND_S:
                path.unlink(missing_ok=True)


def _write_all(fd: int, content: bytes) -> None:
    data = memoryview(content)
    while len(data):
        data = data[os.write(fd, data) :]
