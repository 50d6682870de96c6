"""The kinds of cases, and the run through them. `__main__` prints what it finds, and a slice of it is a test."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from corruptions import damages, failing_saves
from corruptions.crew import Crew, Shape
from corruptions.failing_saves import Trial, judge_failing_save
from corruptions.ground import Case, Ground
from corruptions.judges import Result, judge_damaged, judge_line, judge_whole
from corruptions.nonsense import deep_manifest, nonsense

Damage = Callable[[Case], str]

DAMAGED: dict[str, tuple[Damage, int]] = {
    "bit flip in a shard": (damages.flip_in_shard, 24),
    "bit flip in a rank's file": (damages.flip_in_rank_file, 12),
    "bit flip in the manifest": (damages.flip_in_manifest, 12),
    "zeroed block": (damages.zeroed_block, 6),
    "truncated file": (damages.truncated, 10),
    "half-written manifest": (damages.half_written_manifest, 6),
    "extended file": (damages.extended, 6),
    "deleted file": (damages.deleted_file, 6),
    "shard of another rank": (damages.shard_of_another_rank, 6),
    "shard of another step": (damages.shard_of_another_step, 6),
    "shard of another generation": (damages.shard_of_another_generation, 5),
    "rank's file of another": (damages.rank_file_of_another, 6),
    "one rank of another step": (damages.one_rank_of_another_step, 5),
    "all ranks of another step": (damages.all_ranks_of_another_step, 3),
    "manifest of another step": (damages.manifest_of_another_step, 4),
    "renamed directory": (damages.renamed_directory, 8),
    "no plain file": (damages.no_plain_file, 7),
    "no permission": (damages.no_permission, 2),
    "EIO in reading": (damages.read_error, 4),
    "nonsense under right hashes": (nonsense, 20),
    "brackets without end": (deep_manifest, 1),
}
LINES: dict[str, tuple[Damage, int]] = {
    "off the line": (damages.off_the_line, 4),
    "lineage note damaged": (damages.lineage_note_damaged, 3),
}
SAVES: dict[str, tuple[Callable[[Trial], str], int]] = {
    "ENOSPC, the store is full": (failing_saves.no_space, 3),
    "ENOSPC at some write": (failing_saves.no_space_at_some_write, 2),
    "ENOSPC for the manifest": (failing_saves.no_space_for_the_manifest, 1),
    "EIO in writing": (failing_saves.write_error, 4),
    "read-only store": (failing_saves.read_only, 2),
    "storage with a hiccup": (failing_saves.hiccup, 2),
    "writer killed in mid-save": (failing_saves.writer_killed, 3),
    "writer killed before the rename": (failing_saves.writer_killed_before_the_rename, 1),
    "writer killed before the manifest": (failing_saves.leader_killed_before_the_manifest, 2),
}
CONTROLS: dict[str, tuple[Damage, int]] = {
    "control: untouched": (damages.untouched, 6),
    "control: times changed": (damages.times_changed, 2),
    "control: unrelated file": (damages.unrelated_file, 2),
    "control: left over of a killed save": (damages.left_over_of_a_killed_save, 2),
    "control: another damaged beside": (damages.another_damaged_beside, 4),
    "control: store moved": (damages.store_moved, 2),
}
KINDS = {**DAMAGED, **LINES, **SAVES, **CONTROLS}

SHAPES = {Shape(1, False): 3, Shape(2, False): 3, Shape(2, True): 3, Shape(4, True): 1}
"""Each with how often it is drawn."""


def draw(cases: int, rng: random.Random) -> list[str]:
    """That many kinds, each about as often as its share says."""
    due = {kind: cases * share / sum(share for _, share in KINDS.values()) for kind, (_, share) in KINDS.items()}
    drawn = [kind for kind, count in due.items() for _ in range(int(count))]
    rest = sorted(due, key=lambda kind: (int(due[kind]) - due[kind], rng.random()))
    drawn += rest[: cases - len(drawn)]
    rng.shuffle(drawn)
    return drawn


def run_cases(kinds: Sequence[str], *, seed: int, shapes: Sequence[Shape] = tuple(SHAPES)) -> Iterator[Result]:
    """One case for each of the kinds, each on a shape that is drawn for it."""
    rng = random.Random(f"corruptions {seed}")
    drawn = [(kind, rng.choices(shapes, [SHAPES[shape] for shape in shapes])[0]) for kind in kinds]
    with tempfile.TemporaryDirectory(prefix="corruptions-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)  # so that permissions of files decide
        crews = {shape: stack.enter_context(contextlib.closing(Crew(shape, folder, seed=seed))) for shape in shapes}
        grounds = {
            shape: Ground.write(crew, folder / f"ground-{number}") for number, (shape, crew) in enumerate(crews.items())
        }
        for number, (kind, shape) in enumerate(drawn):
            own = folder / f"case-{number}"
            own.mkdir()
            yield _run(kind, grounds[shape], own, random.Random(f"{seed} {number} {kind}"))
            shutil.rmtree(own)


def _run(kind: str, ground: Ground, folder: Path, rng: random.Random) -> Result:
    if kind in SAVES:
        return judge_failing_save(kind, ground.crew, folder, rng, SAVES[kind][0])
    case = Case(ground, folder / "checkpoints", rng)
    damage, judge = next(
        (table[kind][0], judge)
        for table, judge in ((DAMAGED, judge_damaged), (LINES, judge_line), (CONTROLS, judge_whole))
        if kind in table
    )
    return judge(kind, case, damage(case))
