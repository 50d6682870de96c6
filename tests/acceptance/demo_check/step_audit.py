"""Recomputes what a job lost that should not have noticed a drill: the ranks' own logs against the server's rows.

Shares no code with what it audits; standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demo_check.auditor import RankStory, Stories


@dataclass(frozen=True)
class Unharmed:
    """What was found, and a sentence for each thing that is wrong."""

    steps_checked: int
    steps_lost: int
    """Steps that ranks did again, or that no rank did."""
    events_lost: int
    """Steps and saves of the ranks' logs that the server does not have, or not once."""
    largest_step_gap_s: float
    """Longest time without a step of any rank, from the fault on."""
    wrong: tuple[str, ...]


def audit_unharmed(
    stories: Stories,
    *,
    generation: int,
    pids: Mapping[int, int],
    since: float,
    until: float,
    rows: Mapping[int, Sequence[Mapping[str, Any]]],
    checkpoints: Sequence[Mapping[str, Any]],
    stall_limit_s: float,
) -> Unharmed:
    """Judge one generation between two moments. `pids`: rank -> process before the fault; `rows`: rank -> the server's
    step rows; `checkpoints`: the server's. Raises `ValueError` where there is nothing to judge.
    """
    mine = [story for (number, _), story in sorted(stories.items()) if number == generation]
    if {story.rank for story in mine} != set(pids) or not pids:
        raise ValueError(f"There are no logs of all ranks of generation {generation}.")
    wrong: list[str] = []
    newest = max(number for number, _ in stories)
    if newest != generation:
        wrong.append(f"The job was relaunched: there are logs of generation {newest}.")
    checked = lost = missing = 0
    gap_s = 0.0
    for story in mine:
        if story.starts > 1 or story.pid != pids[story.rank]:
            wrong.append(f"Rank {story.rank} was process {pids[story.rank]} and is {story.pid}: it was started again.")
        holes = _holes(story)
        lost += len(holes)
        if holes:
            wrong.append(f"Rank {story.rank} never logged step {holes[0]} and {len(holes) - 1} others.")
        told = [step for step in story.steps.values() if step.at <= until]
        checked += len(told)
        unheard = _unheard(story, rows[story.rank], until=until)
        missing += len(unheard)
        wrong += unheard[:4]
        rank_gap_s = _longest_gap_s(story, since=since, until=until)
        gap_s = max(gap_s, rank_gap_s)
        if rank_gap_s > stall_limit_s:
            wrong.append(f"Rank {story.rank} made no step for {rank_gap_s:.1f} s.")
    known = {(one["generation"], one["step"]) for one in checkpoints}
    unknown = [
        step for story in mine for step, at in story.saves.items() if (generation, step) not in known and at <= until
    ]
    missing += len(unknown)
    wrong += [f"The server does not know of the checkpoint of step {step}." for step in unknown[:4]]
    return Unharmed(
        steps_checked=checked,
        steps_lost=lost,
        events_lost=missing,
        largest_step_gap_s=gap_s,
        wrong=tuple(wrong),
    )


def _holes(story: RankStory) -> list[int]:
    """Steps between the first and the last that the rank did not log."""
    if not story.steps:
        return [0]
    return [step for step in range(min(story.steps), max(story.steps)) if step not in story.steps]


def _unheard(story: RankStory, rows: Sequence[Mapping[str, Any]], *, until: float) -> list[str]:
    """A sentence for each step that the server does not have exactly as the rank logged it, exactly once."""
    counts: dict[int, int] = {}
    losses: dict[int, float | None] = {}
    for row in rows:
        counts[row["step"]] = counts.get(row["step"], 0) + 1
        losses[row["step"]] = row["loss"]
    words = []
    for number, step in sorted(story.steps.items()):
        if step.at > until:
            continue
        if counts.get(number, 0) != 1:
            words.append(f"The server has step {number} of rank {story.rank} {counts.get(number, 0)} times, not once.")
        elif losses[number] != float.fromhex(step.loss_hex):
            words.append(f"The server has another loss for step {number} of rank {story.rank} than the rank.")
    made = set(story.steps)
    words += [
        f"The server has step {number} of rank {story.rank}, which it never made." for number in set(counts) - made
    ]
    return words


def _longest_gap_s(story: RankStory, *, since: float, until: float) -> float:
    """The longest time without a step between the last one before `since` and `until`."""
    moments = sorted(step.at for step in story.steps.values() if step.at <= until)
    first = max((at for at in moments if at <= since), default=since)
    return max((later - at for at, later in itertools.pairwise([first, *(at for at in moments if at > first), until])))
