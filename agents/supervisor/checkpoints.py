"""Which checkpoints are complete, seen from outside: a step's directory counts once its manifest is in place.

The layout is the training side's: `<checkpoint directory>/generation-<number>/step-<number>/manifest.json`.
"""

from __future__ import annotations

import re
from pathlib import Path

_MANIFEST = "manifest.json"
_GENERATION = re.compile(r"generation-(\d+)")
_STEP = re.compile(r"step-(\d+)")


def complete_steps(checkpoint_directory: str, generation: int) -> list[int]:
    """Steps of a generation's complete checkpoints, in rising order."""
    steps = []
    for directory in _numbered(Path(checkpoint_directory), _GENERATION, generation):
        for name, step in _numbers(directory, _STEP):
            if (name / _MANIFEST).is_file():
                steps.append(step)
    return sorted(steps)


def is_complete(checkpoint_directory: str, generation: int, step: int) -> bool:
    """Whether the checkpoint that a plan names as parent is there, seen from this node."""
    return any(
        (found / _MANIFEST).is_file()
        for directory in _numbered(Path(checkpoint_directory), _GENERATION, generation)
        for found in _numbered(directory, _STEP, step)
    )


def _numbered(directory: Path, pattern: re.Pattern[str], number: int) -> list[Path]:
    return [path for path, found in _numbers(directory, pattern) if found == number]


def _numbers(directory: Path, pattern: re.Pattern[str]) -> list[tuple[Path, int]]:
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    return [(entry, int(match[1])) for entry in entries if (match := pattern.fullmatch(entry.name))]
