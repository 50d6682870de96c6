"""Small JSON files that carry their own hash, and are put in place whole or not at all: manifests and lineage notes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint.plain_files import read_plain

FORMAT = 2
"""Of checkpoints. Other releases may write others."""


def put_sealed(path: Path, body: Mapping[str, Any], *, may_put: Callable[[], None] = lambda: None) -> None:
    """Put a JSON object in place, with its own hash, whole or not at all, and durably.

    may_put: called between all the slow work and the rename. Raises OSError; then nothing is in place.
    """
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w") as file:
        file.write(json.dumps({**body, "self_sha256": _self_hash(body)}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    may_put()
    aside.rename(path)
    try:
        sync_directory(path.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def read_sealed(path: Path) -> dict[str, Any]:
    """What `put_sealed` has put there. Raises OSError, or ValueError where it is not what was written."""
    try:
        body = json.loads(read_plain(path))
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
    if not isinstance(body, dict):
        raise ValueError("it holds no object")
    claimed = body.pop("self_sha256", None)
    if body.get("format", FORMAT) != FORMAT:
        raise ValueError(f"it has format {body['format']!r}; this release reads format {FORMAT}")
    if _self_hash(body) != claimed:
        raise ValueError("it is not what was written")
    return body


def sync_directory(path: Path) -> None:
    """A rename is durable only when its directory has been synced."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _self_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
