"""Whose bytes are these? Finds the part of another save that lies where a checkpoint's own should.

`everstep checkpoint verify` asks once a hash differs: a shard of another step or rank has the same size and is whole in
itself, and only the hashes in its own rank's file tell where it belongs. Standard library only.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.plain_files import read_plain


class Origins:
    """The blocks of all complete checkpoints under a root by hash; their files are read when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, sha256: str, *, besides: tuple[CheckpointName, str]) -> str:
        """In words, where a block with this hash belongs; "" if nowhere. `besides`: where it was found (file name)."""
        homes = [home for home in self._blocks.get(sha256, []) if home[:2] != besides]
        if not homes:
            return ""
        name, file, key = homes[0]
        return f"{key} in {file} of checkpoint {name}"

    @functools.cached_property
    def _blocks(self) -> dict[str, list[tuple[CheckpointName, str, str]]]:
        found: dict[str, list[tuple[CheckpointName, str, str]]] = {}
        for manifest in complete_checkpoints(self._root):
            directory = manifest.name.directory(self._root)
            for entry in manifest.files:
                if entry.sha256 is None:
                    continue
                try:
                    chunks = json.loads(read_plain(directory / entry.name, limit_bytes=entry.size_bytes))["chunks"]
                    blocks = [(chunk["sha256"], chunk["key"]) for chunk in chunks]
                except (OSError, ValueError, LookupError, TypeError, RecursionError):
                    continue  # damaged, too
                shard = entry.name.replace("rank-", "shard-").replace(".json", ".bin")
                for sha256, key in blocks:
                    found.setdefault(sha256, []).append((manifest.name, shard, key))
        return found
