"""Opens what should be a plain file of a checkpoint, and nothing else. Whoever reads a checkpoint comes through here.

A pipe under the name of a file would hold the reader up for ever, a device would never end.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

SMALL_BYTES = 256 << 20
"""More than a manifest ever has: that of 16,384 ranks has about 6 MB."""


def open_plain(path: Path) -> io.FileIO:
    """Open for reading, unbuffered. Raises OSError, also for what is no plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return io.FileIO(fd, "rb")


def read_plain(path: Path, *, limit_bytes: int = SMALL_BYTES) -> bytes:
    """The whole content. Raises OSError, also where it is longer than `limit_bytes`."""
    with open_plain(path) as file:
        content = bytearray()
        while block := file.read(min(1 << 20, limit_bytes + 1 - len(content))):
            content += block
            if len(content) > limit_bytes:
                raise OSError(errno.EFBIG, f"longer than {limit_bytes} bytes", str(path))
        return bytes(content)


def plain_size(path: Path) -> int:
    """Its length in bytes. Raises OSError, also for what is no plain file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return found.st_size
