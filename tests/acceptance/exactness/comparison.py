"""Compares a run that was interrupted with one that was not: each step of each generation, and the final state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint.manifest import complete_checkpoints
from everstep.checkpoint.verify import read_rank_file
from tests.integration.launches import Generation

_FIELDS = ("loss_hex", "learning_rate", "grad_norm", "epoch", "span_start", "span_stop", "indices_digest")
Steps = dict[tuple[int, int], tuple[Any, ...]]
"""By (step, rank): what was reported, in the order of `_FIELDS`."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one generation has left behind.

    parent_step: where it began. tier: what it was loaded from. final: by rank, if it came to its end. saved: the
    SHA-256 of each block in the last checkpoint, by its tensor and place.
    """

    number: int
    parent_step: int
    tier: str
    steps: Steps
    final: dict[int, dict[str, str]]
    saved: dict[str, str]

    @property
    def last_step(self) -> int:
        return max((step for step, _ in self.steps), default=self.parent_step)


def read_record(generation: Generation, checkpoints: Path, *, number: int, parent_step: int, world_size: int) -> Record:
    steps: Steps = {}
    final: dict[int, dict[str, str]] = {}
    tier = ""
    for rank in range(world_size):
        for line in generation.log(rank):
            if line["kind"] == "step":
                steps[line["step"], rank] = tuple(line.get(field) for field in _FIELDS)
            elif line["kind"] == "resumed":
                tier = line["tier"]
        path = generation.directories[rank // generation.ranks_per_node] / "logs" / f"final-{rank}.json"
        if path.exists():
            final[rank] = json.loads(path.read_text())
    saved = _saved(checkpoints)
    return Record(number=number, parent_step=parent_step, tier=tier, steps=steps, final=final, saved=saved)


def _saved(checkpoints: Path) -> dict[str, str]:
    complete = complete_checkpoints(checkpoints)
    if not complete:
        return {}
    directory = complete[-1].name.directory(checkpoints)
    return {
        f"step {complete[-1].name.step}: {chunk['key']} from {chunk['offsets']} on": chunk["sha256"]
        for rank in range(complete[-1].world_size)
        for chunk in read_rank_file(directory, complete[-1], rank)["chunks"]
    }


def replayed_steps(records: Sequence[Record]) -> int:
    """Steps that were made more than once."""
    return sum(max(0, one.last_step - after.parent_step) for one, after in itertools.pairwise(records))


def differences(whole: Record, records: Sequence[Record], *, steps: int, world_size: int) -> list[str]:
    """What is not as in the uninterrupted run `whole`: nothing if the interrupted one is identical."""
    everything = {(step, rank) for step in range(1, steps + 1) for rank in range(world_size)}
    found = [
        f"the uninterrupted run lacks step {step} of rank {rank}" for step, rank in sorted(everything - {*whole.steps})
    ]
    for record in records:
        for place in sorted(record.steps):
            found += _step_differences(record.number, place, record.steps[place], whole.steps.get(place))
    ends = [*(record.parent_step for record in records[1:]), steps]
    made = {
        place
        for record, end in zip(records, ends, strict=True)
        for place in record.steps
        if record.parent_step < place[0] <= end
    }
    found += [
        f"step {step} of rank {rank} is missing in the line that survived" for step, rank in sorted(everything - made)
    ]
    for rank in range(world_size):
        mine, theirs = (record.final.get(rank, {}) for record in (records[-1], whole))
        found += _state_differences(f"final state of rank {rank}", mine, theirs)
    return found + _state_differences("last checkpoint", records[-1].saved, whole.saved)


def _step_differences(
    generation: int, place: tuple[int, int], made: tuple[Any, ...], expected: tuple[Any, ...] | None
) -> list[str]:
    if made == expected:
        return []
    step, rank = place
    said = ", ".join(
        f"{field} {mine} instead of {theirs}"
        for field, mine, theirs in zip(_FIELDS, made, expected or (None,) * len(_FIELDS), strict=True)
        if mine != theirs
    )
    return [f"step {step} of rank {rank} in generation {generation}: {said}"]


def _state_differences(where: str, mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    if not mine or not theirs:
        return [f"{where}: there is none"]
    paths = sorted(mine.keys() | theirs.keys())
    return [f"{where}: {path} differs" for path in paths if mine.get(path) != theirs.get(path)]
