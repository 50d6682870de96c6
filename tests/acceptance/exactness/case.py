"""One row of the table: a job is trained under faults and compared with one that nobody disturbed."""

from __future__ import annotations

import dataclasses
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from everstep.checkpoint.memory import SHARED_MEMORY
from exactness.comparison import Record, differences, replayed_steps
from exactness.faults import Fired, draw_faults, fire
from exactness.jobs import TIERS, Job, Scale, Tier, Training
from exactness.live import DidNotHappen


@dataclass
class Result:
    """`differs` and `error` are empty where all is well; an error says why nothing, or too little, is proven."""

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
    scale = dataclasses.replace(scale, save_every=scale.steps, forget="")
    with _training(job, TIERS[0], scale, root) as training:
        generation = training.generation(1, parent=None)
        with generation:
            training.live(generation, 1).finish()
        return training.record(generation, 1, parent=None)


def run_case(job: Job, tier: Tier, scale: Scale, root: Path, *, whole: Record) -> Result:
    """Train under faults, and compare with the uninterrupted run `whole`."""
    result = Result(job=job, tier=tier)
    try:
        with _training(job, tier, scale, root) as training:
            records = _train(training, result)
    except Exception as err:
        known = isinstance(err, DidNotHappen)
        result.error = f"{type(err).__name__}: {err}" if known else traceback.format_exc()
        return result
    result.generations = len(records)
    result.from_memory = sum(record.tier == "memory" for record in records)
    if tier.in_memory is (result.from_memory == 0):
        result.error = f"{result.from_memory} generations went on from memory"
    result.replayed = replayed_steps(records)
    result.differs = differences(whole, records, steps=scale.steps, world_size=job.ranks)
    return result


@contextmanager
def _training(job: Job, tier: Tier, scale: Scale, root: Path) -> Iterator[Training]:
    shared = SHARED_MEMORY if tier.in_memory and SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="exact-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryDirectory(prefix="exactness-", dir=shared, ignore_cleanup_errors=True) as kept,
    ):
        memory = [Path(kept) / f"node-{node}" for node in range(job.nodes)] if tier.in_memory else []
        yield Training(job=job, tier=tier, scale=scale, root=root, scratch=Path(scratch), memory=memory)


def _train(training: Training, result: Result) -> list[Record]:
    job, tier, scale = training.job, training.tier, training.scale
    faults = draw_faults(
        f"{scale.seed} {job} {tier}",
        tier.kinds,
        count=scale.faults,
        ranks=job.ranks,
        steps=scale.steps,
        save_every=scale.save_every,
    )
    records: list[Record] = []
    while not records or not records[-1].final:
        number, parent = len(records) + 1, training.newest()
        generation = training.generation(number, parent=parent)
        with generation:
            live = training.live(generation, number)
            while faults:
                result.fired.append(fire(faults.pop(0), live))
                if result.fired[-1].ends:
                    break
            else:
                live.finish()
            live.see_gone()
        records.append(training.record(generation, number, parent=parent))
    return records
