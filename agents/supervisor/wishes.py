"""What the server wishes of a generation that runs, as files in the run's directory which its ranks read.

    pinned.json   {"keep": ["<generation>:<step>", ...]}: checkpoints that retention may not remove
    save-request  a number: when it has risen, the ranks save at the next step that they agree on

Both hold the whole wish and not a change of it, so that a wish that is written twice, or late, does no harm.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from agents.protocol.messages import Assignment
from agents.supervisor.owned_files import open_directory, replace_file

PINNED = "pinned.json"
SAVE_REQUEST = "save-request"


@dataclass(frozen=True, kw_only=True)
class Wishes:
    keep: tuple[str, ...] = ()
    save_request: int = 0

    @classmethod
    def of(cls, assignment: Assignment) -> Wishes:
        return cls(keep=tuple(assignment.keep), save_request=assignment.save_request)


def write_wishes(directory: Path, wishes: Wishes, *, before: Wishes | None) -> None:
    """Write what differs from what was written before, None if nothing was. Raises `OSError`."""
    place = open_directory(directory)
    try:
        if before is None or wishes.keep != before.keep:
            replace_file(PINNED, place, json.dumps({"keep": wishes.keep}).encode())
        if before is None or wishes.save_request != before.save_request:
            replace_file(SAVE_REQUEST, place, f"{wishes.save_request}\n".encode())
    finally:
        os.close(place)
