"""Where ranks keep snapshots in this node's memory, and the removal of those that no job comes back for.

    /dev/shm/everstep-<user id>/<tag of this agent>.<job>/

The ranks make the directory and write into it; that outlives them, their runner and the agent, and ends with the boot.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - below it, each user has a directory that is closed to others
_USER = "everstep-"


class MemoryPlaces:
    """One agent's places. The tag keeps agents that share a machine from removing what is another's."""

    def __init__(self, state_directory: Path, *, shared: Path = SHARED_MEMORY) -> None:
        self._shared = shared
        self._tag = hashlib.sha256(str(state_directory.absolute()).encode()).hexdigest()[:12]

    def place(self, job: str, *, uid: int) -> Path:
        """Of a job whose ranks run as `uid`. The caller has checked that the job's name is safe in a path."""
        return self._shared / f"{_USER}{uid}" / f"{self._tag}.{job}"

    def clean(self, keep: Collection[str]) -> list[str]:
        """Remove what is kept for other jobs than these; returns their names. What cannot be removed stays."""
        removed = []
        for user in self._shared.glob(f"{_USER}*"):
            if not _is_own_directory(user):
                continue  # anybody may put a link here
            for place in user.glob(f"{self._tag}.*"):
                job = place.name.removeprefix(f"{self._tag}.")
                if job not in keep:
                    shutil.rmtree(place, ignore_errors=True)
                    removed.append(job)
            with contextlib.suppress(OSError):
                user.rmdir()  # unless something is kept in it
        return removed


def _is_own_directory(path: Path) -> bool:
    """A directory of the user in its name, and not a link to one."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and path.name == f"{_USER}{found.st_uid}"
