"""One row of the table: a job, the tier that it resumes from, and the faults that it has to survive."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.checkpoint.manifest import CheckpointName, newest_checkpoint, read_lineage
from everstep.checkpoint.memory import SHARED_MEMORY, held_in, whole_snapshots
from everstep.context import MEMORY_DIRECTORY
from everstep.elastic.launch import LAUNCH_FILE
from exactness import script
from exactness.comparison import Record, differences, read_record, replayed_steps
from exactness.faults import IN_MEMORY, ON_DISK, Fired, Kind, draw_faults, fire
from exactness.live import DidNotHappen, Live
from exactness.starting import ForkedGeneration, RunnerGeneration
from tests.integration.launches import Generation

PROJECT = Path(__file__).resolve().parents[3]
STEP_TIME_S = 0.02
"""Fast enough for three hundred, and slow enough for SIGTERM, which ranks talk about once a second."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What trains. `by_runner`: started by everstep's own runner and torch elastic, else forked (see `starting`)."""

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


@dataclass
class Result:
    """`differs` and `error` are empty where all is well; with an error nothing was compared."""

    job: Job
    tier: Tier
    fired: list[Fired] = field(default_factory=list)
    generations: int = 0
    from_memory: int = 0
    replayed: int = 0
    differs: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def identical(self) -> bool:
        return not self.differs and not self.error


def run_uninterrupted(job: Job, scale: Scale, root: Path) -> Record:
    """It saves nothing on its way, so that the comparison also shows that saving changes nothing."""
    scale = Scale(seed=scale.seed, steps=scale.steps, save_every=scale.steps)
    generation = _generation(
        job,
        scale,
        root,
        number=1,
        parent=None,
    )
    with generation:
        Live(generation, root, number=1, step_time_s=0.0).finish()
    return read_record(generation, root / "checkpoints", number=1, parent_step=0, world_size=job.ranks)


def run_case(job: Job, tier: Tier, scale: Scale, root: Path, *, whole: Record) -> Result:
    """Train under faults, and compare with the uninterrupted run."""
    result = Result(job=job, tier=tier)
    memory = tempfile.mkdtemp(prefix="exactness-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    try:
        records = _train(job, scale, root, result, memory=[Path(memory) / f"node-{node}" for node in range(job.nodes)])
    except Exception as err:
        known = isinstance(err, DidNotHappen)
        result.error = f"{type(err).__name__}: {err}" if known else traceback.format_exc()
        return result
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    result.generations = len(records)
    result.from_memory = sum(record.tier == "memory" for record in records)
    if tier.in_memory is (result.from_memory == 0):
        result.error = f"{result.from_memory} generations went on from memory"
    result.replayed = replayed_steps(records)
    result.differs = differences(whole, records, steps=scale.steps, world_size=job.ranks)
    return result


def _train(job: Job, scale: Scale, root: Path, result: Result, *, memory: list[Path]) -> list[Record]:
    tier = result.tier
    faults = draw_faults(
        f"{scale.seed} {job} {tier}",
        tier.kinds,
        count=scale.faults,
        ranks=job.ranks,
        steps=scale.steps,
        save_every=scale.save_every,
    )
    memory = memory if tier.in_memory else []
    records: list[Record] = []
    while not records or not records[-1].final:
        number, parent = len(records) + 1, _newest(root / "checkpoints", memory)
        generation = _generation(job, scale, root, number=number, parent=parent, words=tier.words, memory=memory)
        with generation:
            live = Live(generation, root, number=number, step_time_s=STEP_TIME_S, memory=memory, memory_dies=tier.lost)
            while faults:
                result.fired.append(fire(faults.pop(0), live))
                if result.fired[-1].ends:
                    break
            else:
                live.finish()
            live.see_gone()
        parent_step = parent.step if parent else 0
        records.append(
            read_record(generation, root / "checkpoints", number=number, parent_step=parent_step, world_size=job.ranks)
        )
    return records


def _newest(root: Path, memory: list[Path]) -> CheckpointName | None:
    """What the next generation goes on from: the newest checkpoint, or snapshot that the nodes together hold."""
    in_memory = [
        name
        for name, token in whole_snapshots(held for place in memory for held in held_in(place)).items()
        if (lineage := read_lineage(root, name.generation)) is not None and lineage.token == token
    ]
    return newest_checkpoint(root, in_memory=in_memory)


def _generation(
    job: Job,
    scale: Scale,
    root: Path,
    *,
    number: int,
    parent: CheckpointName | None,
    words: tuple[str, ...] = (),
    memory: Sequence[Path] = (),
) -> Generation:
    root.mkdir(exist_ok=True)
    asked = ["--wrapping", job.wrapping, "--seed", str(scale.seed), "--workers", str(job.workers)]
    asked += ["--steps", str(scale.steps), "--save-every", str(scale.save_every), "--step-time", str(STEP_TIME_S)]
    asked += [*(["--forget", scale.forget] if scale.forget else []), *words]
    generation = (RunnerGeneration if job.by_runner else ForkedGeneration)(
        root,
        [sys.executable, str(script.__file__), *asked],
        number=number,
        nodes=job.nodes,
        ranks_per_node=job.ranks // job.nodes,
        parent=(parent.generation, parent.step) if parent else None,
        environment={
            "PYTHONPATH": str(PROJECT),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        },
    )
    for directory, place in zip(generation.directories, memory, strict=False):
        _add_to_environment(directory / LAUNCH_FILE, {MEMORY_DIRECTORY: str(place)})
    return generation


def _add_to_environment(path: Path, more: dict[str, str]) -> None:
    launch = json.loads(path.read_text())
    path.write_text(json.dumps({**launch, "environment": launch["environment"] | more}))
