"""Files that the agent puts into a run's directory for the job's ranks, who own the directory and may do as they like.

The agent may be root and the job may put links there: a file is made fresh under the directory's own descriptor, and
put in place by a rename. `lease` and `wishes` use it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def open_directory(directory: Path) -> int:
    """A descriptor of the directory itself, never of what a link names. Raises `OSError`."""
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def create_file(name: str, directory: int, content: bytes, uid: int, gid: int) -> int:
    """Make a new private file; its descriptor, open for reading and writing. Raises `OSError` if there is one."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(f"{name} could not be written whole")
        if uid != os.geteuid():
            os.fchown(descriptor, uid, gid)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def replace_file(name: str, directory: int, content: bytes) -> None:
    """Put a file of the directory's owner in place, whole or not at all. Raises `OSError`; nothing has changed then."""
    owner = os.fstat(directory)
    aside = f".{name}.{secrets.token_hex(8)}"
    try:
        os.close(create_file(aside, directory, content, owner.st_uid, owner.st_gid))
        os.replace(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=directory)
        raise
