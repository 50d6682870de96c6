"""What trains in `make exactness`, where it resumes from, and how its generations are started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.lineage import lineage_token, newest_snapshot
from everstep.checkpoint.manifest import CheckpointName
from everstep.checkpoint.memory import held_in, whole_snapshots
from everstep.context import MEMORY_DIRECTORY
from everstep.elastic.launch import LAUNCH_FILE
from exactness import script
from exactness.comparison import Record, read_record
from exactness.faults import IN_MEMORY, ON_DISK, Kind
from exactness.live import Live
from tests.integration.forked_generation import ForkedGeneration
from tests.integration.launches import Generation

PROJECT = Path(__file__).resolve().parents[3]
STEP_TIME_S = 0.02
"""Fast enough for three hundred, and slow enough for SIGTERM, which ranks talk about once a second."""


class RunnerGeneration(Generation):
    """By the real runner and torch elastic, whose words on each killed rank are no news here."""

    runner_stderr = subprocess.DEVNULL


@dataclass(frozen=True, kw_only=True)
class Job:
    """What trains. `by_runner`: started by everstep's own runner and torch elastic, else a `ForkedGeneration`."""

    ranks: int
    wrapping: str
    nodes: int = 1
    workers: int = 0
    by_runner: bool = False

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.nodes} node{'s' * (self.nodes > 1)}, {self.wrapping}"


JOBS = [
    Job(ranks=2, wrapping="ddp", by_runner=True),
    Job(ranks=2, wrapping="fsdp2", nodes=2, workers=2),
    Job(ranks=4, wrapping="ddp", nodes=2),
    Job(ranks=4, wrapping="fsdp2"),
]


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Where a run resumes from, and the words that make the script keep its state there.

    `lost`: what a node keeps in memory is lost with its runner, and only its partner's copy is left.
    """

    name: str
    words: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = IN_MEMORY
    in_memory: bool = True
    lost: bool = False

    def __str__(self) -> str:
        return self.name


MEMORY_EVERY = 3
_KEEP = ("--memory-every", str(MEMORY_EVERY))
TIERS = [
    Tier(name="disk", kinds=ON_DISK, in_memory=False),
    Tier(name="memory", words=_KEEP),
    Tier(name="partner", words=(*_KEEP, "--memory-partner"), lost=True),
]


def tiers_of(job: Job) -> list[Tier]:
    """One node has no partner."""
    return [tier for tier in TIERS if job.nodes > 1 or not tier.lost]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How long the job is and how often it breaks."""

    seed: int
    steps: int = 300
    save_every: int = 10
    faults: int = 5
    forget: str = ""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job's generations over one checkpoint directory. `scratch`: for what ranks put aside; its path is short.
    `memory`: where each node keeps its snapshots; empty where none does."""

    job: Job
    tier: Tier
    scale: Scale
    root: Path
    scratch: Path
    memory: Sequence[Path] = ()

    @property
    def _checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def newest(self) -> CheckpointName | None:
        """What the next generation goes on from: the newest checkpoint, or snapshot that the nodes together hold."""
        in_memory = [
            name
            for name, token in whole_snapshots(held for place in self.memory for held in held_in(place)).items()
            if lineage_token(self._checkpoints, name.generation) == token
        ]
        return newest_snapshot(self._checkpoints, in_memory)

    def generation(self, number: int, *, parent: CheckpointName | None) -> Generation:
        """Enter it to start it."""
        job, scale = self.job, self.scale
        self.root.mkdir(exist_ok=True)
        words = ["--wrapping", job.wrapping, "--seed", str(scale.seed), "--workers", str(job.workers)]
        words += ["--steps", str(scale.steps), "--save-every", str(scale.save_every), "--step-time", str(STEP_TIME_S)]
        words += [*(["--forget", scale.forget] if scale.forget else []), *self.tier.words]
        generation = (RunnerGeneration if job.by_runner else ForkedGeneration)(
            self.root,
            [sys.executable, str(script.__file__), *words],
            number=number,
            nodes=job.nodes,
            ranks_per_node=job.ranks // job.nodes,
            parent=(parent.generation, parent.step) if parent else None,
            environment={"PYTHONPATH": str(PROJECT), "TMPDIR": str(self.scratch)},
        )
        for directory, place in zip(generation.directories, self.memory, strict=False):
            _add_to_environment(directory / LAUNCH_FILE, {MEMORY_DIRECTORY: str(place)})
        return generation

    def live(self, generation: Generation, number: int) -> Live:
        return Live(
            generation,
            self.root,
            number=number,
            step_time_s=STEP_TIME_S,
            memory=self.memory,
            memory_dies=self.tier.lost,
        )

    def record(self, generation: Generation, number: int, *, parent: CheckpointName | None) -> Record:
        return read_record(
            generation,
            self._checkpoints,
            number=number,
            parent_step=parent.step if parent else 0,
            world_size=self.job.ranks,
        )


def _add_to_environment(path: Path, more: dict[str, str]) -> None:
    launch = json.loads(path.read_text())
    path.write_text(json.dumps({**launch, "environment": launch["environment"] | more}))
