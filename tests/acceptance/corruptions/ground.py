"""A checkpoint directory written by real ranks, and copies of it that may be damaged."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corruptions.crew import Crew
from everstep.checkpoint.manifest import CheckpointName, rank_file, shard_file

NEWEST, PARENT, OLDER, BESIDE, GHOST = (CheckpointName.parse(text) for text in ("2:8", "1:4", "1:2", "2:6", "1:6"))
"""Generation 2 went on from 1:4, so 1:6 is off the line: a ghost's writing, of the same step as 2:6."""
LINE = (OLDER, PARENT, BESIDE, NEWEST)


@dataclass(frozen=True)
class Ground:
    """What a crew has written. `truth` maps a checkpoint's name to the fingerprints of its state by rank."""

    root: Path
    crew: Crew
    truth: dict[str, list[str]]

    @classmethod
    def write(cls, crew: Crew, root: Path) -> Ground:
        """Two generations, the second of which went on from the middle of the first."""
        generations = [(1, None, [2, 4, 6]), (2, PARENT, [6, 8])]
        by_rank = crew.ask("write", root, generations)
        names = by_rank[0]
        truth = {name: [told[name] for told in by_rank] for name in names}
        if len({tuple(prints) for prints in truth.values()}) != len(truth):
            raise RuntimeError("two checkpoints hold the same state: nothing could be told from them")
        return cls(root, crew, truth)


class Case:
    """One copy of a ground, to be damaged. `target` is the checkpoint that is damaged and then loaded."""

    def __init__(self, ground: Ground, root: Path, rng: random.Random) -> None:
        self.ground = ground
        self.root = root
        self.rng = rng
        self.target = NEWEST
        self.expected: CheckpointName | None = NEWEST
        """What a run without a plan must go on from, where that is on trial; None: it must refuse to choose."""
        self.unreadable = ""
        """Reads of files whose path holds this end in EIO."""
        self.as_nobody = False
        self.agent_can_see = True
        """Whether names, sizes and the manifest's own hash, which are all that an agent looks at, give it away."""
        self.world_size = ground.crew.shape.world_size
        for path in ground.root.rglob("*"):
            copy = root / path.relative_to(ground.root)
            if path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.hardlink_to(path)

    @property
    def directory(self) -> Path:
        return self.target.directory(self.root)

    def shards(self) -> list[Path]:
        """Those of the target that hold any bytes."""
        return [path for rank in range(self.world_size) if (path := self.directory / shard_file(rank)).stat().st_size]

    def rank_files(self) -> list[Path]:
        return [self.directory / rank_file(rank) for rank in range(self.world_size)]

    def any_file(self) -> Path:
        return self.rng.choice([*self.shards(), *self.rank_files(), self.directory / "manifest.json"])

    def change(self, path: Path, change: Callable[[bytearray], None]) -> None:
        """Change a file's bytes, in this copy alone."""
        content = bytearray(path.read_bytes())
        change(content)
        self.put(path, bytes(content))

    def put(self, path: Path, content: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def take_over(self, path: Path, other: Path) -> None:
        """Another file's content in the place of this one."""
        self.put(path, other.read_bytes())

    def copy_directory(self, source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, copy_function=os.link)

    def reseal(self, change: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> None:
        """Change what the files say, and give them hashes that fit, as a writer with a bug would.

        change: called with the manifest and each rank's description; shards stay as they are.
        """
        described = [json.loads(path.read_bytes()) for path in self.rank_files()]
        manifest = json.loads((self.directory / "manifest.json").read_bytes())
        before = [entry.copy() for entry in manifest["files"]]
        change(manifest, described)
        for path, said in zip(self.rank_files(), described, strict=True):
            content = json.dumps(said).encode()
            self.put(path, content)
            for entry in manifest["files"]:
                # What the change itself has written into the manifest stays.
                if isinstance(entry, dict) and entry.get("name") == path.name and entry in before:
                    entry |= {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self.seal(manifest)

    def seal(self, manifest: dict[str, Any]) -> None:
        manifest.pop("self_sha256", None)
        sealed = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        self.put(self.directory / "manifest.json", json.dumps({**manifest, "self_sha256": sealed}).encode())
