"""Which checkpoints are complete, seen from outside: a step's directory counts once its manifest is in place.

The layout is the training side's: `<checkpoint directory>/generation-<number>/step-<number>/manifest.json`. Seen from
outside means that no byte of the state is read: the manifest must be what was written, must be this checkpoint's, and
the files that it lists must be here with their sizes. Ranks check the rest while they load.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path

_MANIFEST = "manifest.json"
_GENERATION = re.compile(r"generation-(\d+)")
_STEP = re.compile(r"step-(\d+)")
_LONGEST_BYTES = 256 << 20


def complete_steps(checkpoint_directory: str, generation: int) -> list[int]:
    """Steps of a generation's complete checkpoints, in rising order."""
    return sorted(
        step
        for directory in _numbered(Path(checkpoint_directory), _GENERATION, generation)
        for place, step in _numbers(directory, _STEP)
        if _holds(place, generation, step)
    )


def is_complete(checkpoint_directory: str, generation: int, step: int) -> bool:
    """Whether the checkpoint that a plan names as parent is there, seen from this node."""
    return any(
        _holds(place, generation, step)
        for directory in _numbered(Path(checkpoint_directory), _GENERATION, generation)
        for place in _numbered(directory, _STEP, step)
    )


def _holds(place: Path, generation: int, step: int) -> bool:
    """Whether a directory holds this very checkpoint, with all its files."""
    try:
        said = json.loads(_content(place / _MANIFEST))
        claimed = said.pop("self_sha256")
        if hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest() != claimed:
            return False
        if (said["generation"], said["step"]) != (generation, step):
            return False
        return all(_plain_size(place / entry["name"]) == entry["size_bytes"] for entry in said["files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _content(path: Path) -> bytes:
    if _plain_size(path) > _LONGEST_BYTES:
        raise ValueError(f"{path} is longer than any manifest")
    return path.read_bytes()


def _plain_size(path: Path) -> int:
    """Raises OSError, ValueError for what is no plain file: reading a pipe would hold the agent up."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no plain file")
    return found.st_size


def _numbered(directory: Path, pattern: re.Pattern[str], number: int) -> list[Path]:
    return [path for path, found in _numbers(directory, pattern) if found == number]


def _numbers(directory: Path, pattern: re.Pattern[str]) -> list[tuple[Path, int]]:
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    return [(entry, int(match[1])) for entry in entries if (match := pattern.fullmatch(entry.name))]
