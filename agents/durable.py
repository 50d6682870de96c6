"""Small JSON files that survive a power cut: what the agent must not forget between two lives goes through here."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from agents.errors import StateUnusable


def write_json(path: Path, value: Any, *, mode: int = 0o600) -> None:
    """Replace `path` atomically; when this returns, the new content is on disk. Raises `StateUnusable`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(json.dumps(value, separators=(",", ":")).encode())
            file.flush()
            os.fsync(descriptor)
        aside.replace(path)
        _sync_directory(path.parent)
    except OSError as err:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise StateUnusable(f"{path} could not be written ({err}). Free space or repair the state directory.") from err


def read_json(path: Path) -> Any:
    """Return the content of `path`, None if there is no such file. Raises `StateUnusable` if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:
        raise StateUnusable(
            f"{path} could not be read ({err}). The agent will not guess what it holds: stop what runs on this node, "
            f"move the file away and start the agent again."
        ) from err


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
