"""One row of the table: a job, the tier that it resumes from, and the faults that it has to survive."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from everstep.checkpoint.manifest import CheckpointName, newest_checkpoint
from exactness import script
from exactness.comparison import Record, differences, read_record, replayed_steps
from exactness.faults import Fired, draw_faults, fire
from exactness.live import DidNotHappen, Live
from exactness.starting import ForkedGeneration
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

TIERS: dict[str, tuple[str, ...]] = {"disk": ()}
"""Where a run resumes from, and the words that make the script keep its checkpoints there."""


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
    tier: str
    fired: list[Fired] = field(default_factory=list)
    generations: int = 0
    replayed: int = 0
    differs: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def identical(self) -> bool:
        return not self.differs and not self.error


def run_uninterrupted(job: Job, scale: Scale, root: Path) -> Record:
    """It saves nothing on its way, so that the comparison also shows that saving changes nothing."""
    scale = Scale(seed=scale.seed, steps=scale.steps, save_every=scale.steps)
    generation = _generation(job, scale, root, number=1, parent=None, more=())
    with generation:
        Live(generation, root, number=1, step_time_s=0.0).finish()
    return read_record(generation, number=1, parent_step=0, world_size=job.ranks)


def run_case(job: Job, tier: str, scale: Scale, root: Path, *, whole: Record) -> Result:
    """Train under faults, and compare with the uninterrupted run."""
    result = Result(job=job, tier=tier)
    try:
        records = _train(job, scale, root, result)
    except Exception as err:
        known = isinstance(err, DidNotHappen)
        result.error = f"{type(err).__name__}: {err}" if known else traceback.format_exc()
        return result
    result.generations = len(records)
    result.replayed = replayed_steps(records)
    result.differs = differences(whole, records, steps=scale.steps, world_size=job.ranks)
    return result


def _train(job: Job, scale: Scale, root: Path, result: Result) -> list[Record]:
    faults = draw_faults(
        f"{scale.seed} {job} {result.tier}",
        count=scale.faults,
        ranks=job.ranks,
        steps=scale.steps,
        save_every=scale.save_every,
    )
    records: list[Record] = []
    while not records or records[-1].last_step < scale.steps or not records[-1].final:
        number, newest = len(records) + 1, newest_checkpoint(root / "checkpoints")
        parent = newest.name if newest else None
        generation = _generation(job, scale, root, number=number, parent=parent, more=TIERS[result.tier])
        with generation:
            live = Live(generation, root, number=number, step_time_s=STEP_TIME_S)
            while faults:
                result.fired.append(fire(faults.pop(0), live))
                if result.fired[-1].ends:
                    break
            else:
                live.finish()
            live.see_gone()
        parent_step = parent.step if parent else 0
        records.append(read_record(generation, number=number, parent_step=parent_step, world_size=job.ranks))
    return records


def _generation(
    job: Job, scale: Scale, root: Path, *, number: int, parent: CheckpointName | None, more: tuple[str, ...]
) -> Generation:
    root.mkdir(exist_ok=True)
    words = ["--wrapping", job.wrapping, "--seed", str(scale.seed), "--workers", str(job.workers)]
    words += ["--steps", str(scale.steps), "--save-every", str(scale.save_every), "--step-time", str(STEP_TIME_S)]
    words += [*(["--forget", scale.forget] if scale.forget else []), *more]
    return (Generation if job.by_runner else ForkedGeneration)(
        root,
        [sys.executable, str(script.__file__), *words],
        number=number,
        nodes=job.nodes,
        ranks_per_node=job.ranks // job.nodes,
        parent=(parent.generation, parent.step) if parent else None,
        environment={
            "PYTHONPATH": str(PROJECT),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            "LOGLEVEL": "CRITICAL",  # torch elastic would tell of each rank that was killed
        },
    )
