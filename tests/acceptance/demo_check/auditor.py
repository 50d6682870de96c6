"""Recomputes a recovery from the ranks' own logs and compares it with the receipt. Shares no code with what it audits.

It reads `rank-<r>.jsonl` and `rank-<r>.beats` below `<agent state>/runs/<job>/<generation>/logs/`, and the exit times
that the harness saw on pidfds of its own. Standard library only; nothing of server, agents or training side.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

SECONDS_TOLERANCE = 0.5
"""Server and ranks share one clock here; what differs is delivery and polling, all of it well below half a second."""
MOST_UNCERTAIN_S = 2.0
"""However busy the machine is, nothing is excused by more than that."""
SILENCE_TOLERANCE_S = 2.5
"""Of a node that fell silent the server knows its last heartbeat: they come each second, and are kept each second."""
LEAST_SAVE_INTERVAL = 20
LEAST_STEPS_AFTER_SAVE = 5
UNHEARD_S = 2.0
"""What a node did in its last moments it may not have told any more."""
LOSS_BAND = 0.05
"""Two-sided and relative, for the mean loss over all ranks where their number changed: each rank draws its own dropout
then, which moved single steps of the demo's job by up to 0.8 %. State and samples are compared exactly all the same.
"""
GONE_AFTER_THAW_S = 5.0
"""A rank that was frozen has this long to disappear once it goes on."""


@dataclass(frozen=True)
class Step:
    """One finished step, as the rank wrote it."""

    step: int
    at: float
    loss_hex: str
    learning_rate: float
    epoch: int
    span_start: int
    span_stop: int

    @property
    def samples(self) -> tuple[int, int, int]:
        return (self.epoch, self.span_start, self.span_stop)


@dataclass
class RankStory:
    """All that one rank of one generation wrote. `steps` maps step number to step, `node` is where it ran."""

    generation: int
    rank: int
    pid: int
    started_at: float
    node: str = ""
    starts: int = 1
    children: list[int] = field(default_factory=list)
    resumed_step: int | None = None
    parent_generation: int | None = None
    saved_digest: dict[str, str] = field(default_factory=dict)
    live_digest: dict[str, str] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    saves: dict[int, float] = field(default_factory=dict)
    """Step -> when it was saved."""
    beats: list[float] = field(default_factory=list)

    @property
    def last_sign_of_life(self) -> float:
        return max([self.started_at, *self.beats[-1:], *(step.at for step in self.steps.values())])

    @property
    def last_step_at(self) -> float:
        return max((step.at for step in self.steps.values()), default=self.started_at)

    def before(self, moment: float) -> RankStory:
        """The story as it was at a moment."""
        return replace(
            self,
            steps={number: step for number, step in self.steps.items() if step.at < moment},
            saves={step: at for step, at in self.saves.items() if at < moment},
            beats=[beat for beat in self.beats if beat < moment],
        )

    @property
    def largest_gap_s(self) -> float:
        return max((after - before for before, after in itertools.pairwise(self.beats)), default=0.0)


class FaultMark(Enum):
    """By what the logs show when a rank was hit."""

    DEATH = "death"
    """Its last sign of life."""
    FREEZE = "freeze"
    """Its last sign of life before it was thawed."""
    CUT = "cut"
    """Its last step: it lives on, and finishes none without its peers."""


@dataclass(frozen=True)
class Fence:
    """A node's proof of stop, as the receipt has it."""

    node: str
    kind: str
    at: float


Stories = dict[tuple[int, int], RankStory]
"""(generation, rank) -> story."""


@dataclass(frozen=True)
class Audit:
    """The recomputed numbers, and a sentence for each thing that is wrong. Seconds count from the fault."""

    generation: int
    killed_rank: int
    reached_step: int
    heard_step: int
    """The highest step that somebody must have heard of, whatever the broken node could not tell any more."""
    parent_step: int
    steps_lost: int
    steps_compared: int
    heard_compared: int
    """Of these, how many the server must have compared, whatever the broken node could not tell any more."""
    continuity: str
    detect_s: float
    stop_s: float
    first_step_s: float | None
    caught_up_s: float | None
    largest_beat_gap_s: float
    uncertain_s: float
    """How finely the recomputed seconds are known: so far apart are the broken rank's beats and the looks at exits."""
    overlap_margin_s: float
    wrong: tuple[str, ...]


def read_stories(agents: Path, job: str) -> Stories:
    """All rank logs of a job below the agents' state folders. A line that is still being written is left out."""
    stories: Stories = {}
    for path in sorted(agents.glob(f"*/runs/{job}/*/logs/rank-*.jsonl")):
        story = _read_story(path)
        if story is not None:
            story.node = path.relative_to(agents).parts[0]
            key = (story.generation, story.rank)
            story.starts += stories[key].starts if key in stories else 0
            stories[key] = story
    return stories


def _read_story(path: Path) -> RankStory | None:
    story: RankStory | None = None
    for line in path.read_bytes().split(b"\n")[:-1]:
        entry = json.loads(line)
        if entry["kind"] == "start":
            starts = story.starts + 1 if story else 1
            story = RankStory(entry["generation"], entry["rank"], entry["pid"], entry["at"], starts=starts)
        elif story is not None:
            _add(story, entry)
    if story is not None:
        beats = path.with_suffix(".beats")
        if beats.exists():
            story.beats = [float(line) for line in beats.read_bytes().split(b"\n")[:-1]]
    return story


def _add(story: RankStory, entry: Mapping[str, Any]) -> None:
    match entry["kind"]:
        case "child":
            story.children.append(entry["child"] if "child" in entry else entry["pid"])
        case "resumed":
            story.resumed_step = entry["step"]
            story.parent_generation = entry.get("parent_generation")
            story.saved_digest = entry.get("saved_digest") or {}
            story.live_digest = entry.get("live_digest") or {}
        case "saved":
            story.saves[entry["step"]] = entry["at"]
        case "step":
            story.steps[entry["step"]] = Step(
                step=entry["step"],
                at=entry["at"],
                loss_hex=entry["loss_hex"],
                learning_rate=entry["learning_rate"],
                epoch=entry["epoch"],
                span_start=entry["span_start"],
                span_stop=entry["span_stop"],
            )


def audit(
    stories: Stories,
    *,
    old: int,
    opened_at: float,
    exits: Mapping[int, float],
    thaws: Mapping[int, float] | None = None,
    hit: int | None = None,
    mark: FaultMark = FaultMark.DEATH,
    fences: Sequence[Fence] = (),
    new_world: int | None = None,
    lateness_s: float = 0.0,
) -> Audit:
    """Judge the recovery of generation `old`. `new_world`: with how many ranks it was to go on, if with others.

    `exits` maps pids to the times at which their pidfds fired, `thaws` pids that were frozen to when they went on;
    `hit` is the rank that was broken, by default the one that died first, and `mark` tells by what its end shows.
    `lateness_s`: how much later than they happened the exits may have been seen.
    Raises `ValueError` where the logs hold too little to judge anything.
    """
    whole, after = _of_generation(stories, old), _of_generation(stories, old + 1)
    if not whole or not after:
        raise ValueError(f"There are no rank logs of generation {old if not whole else old + 1}.")
    thaws = thaws or {}
    # A frozen process does nothing, whatever it says once it is thawed; that it then says nothing is looked at apart.
    before = [story.before(thaws[story.pid]) if story.pid in thaws else story for story in whole]
    ends = {story.rank: _end_of(story, exits, thaws) for story in before}
    # Of exits that were seen as one, the first was of the rank that fell silent first: a killed one says nothing more.
    first = [story for story in before if ends[story.rank] <= min(ends.values()) + lateness_s]
    killed = min(first, key=lambda story: story.last_sign_of_life)
    if hit is not None:
        killed = next(story for story in before if story.rank == hit)
    fault_at = killed.last_step_at if mark is FaultMark.CUT else killed.last_sign_of_life
    reached = max((step for story in before for step in story.steps), default=0)
    parent = min(story.resumed_step or 0 for story in after)
    world = range(max(len(before), len(after)) if new_world is None else min(len(before), len(after)))
    compared, unequal = _compare(before, after, world=world, first=parent + 1, last=reached, bits=new_world is None)
    if new_world is not None:
        unequal += _outside_band(before, after, first=parent + 1, last=reached)
    equal = "bit-equal" if new_world is None else "state-equal"
    last_old = max(
        [story.last_sign_of_life for story in before]
        + [exits[pid] for pid in _pids(before) if pid in exits and pid not in thaws]
    )
    margin = min(story.started_at for story in after) - last_old
    wrong = [
        *_launch_faults(stories, old=old, before=before, after=after, parent=parent, new_world=new_world),
        *_drill_faults(before, killed),
        *_process_faults(before, exits, margin),
        *_late_faults(whole, after),
        *_thaw_faults(whole, exits, thaws),
        *_fence_faults(before, exits, thaws, fences),
        *_digest_faults(after),
        *unequal,
        *_span_faults(after),
        *_beat_faults([*before, *after]),
    ]
    return Audit(
        generation=max(generation for generation, _ in stories),
        killed_rank=killed.rank,
        reached_step=reached,
        heard_step=_heard_step(before, killed, fault_at),
        parent_step=parent,
        steps_lost=reached - parent,
        steps_compared=compared,
        heard_compared=_heard_compared(before, after, killed, first=parent + 1, until=fault_at - UNHEARD_S),
        continuity=equal if compared and not unequal and not _digest_faults(after) else "broken",
        detect_s=opened_at - fault_at,
        stop_s=last_old - fault_at,
        first_step_s=_since(fault_at, (_first_after(story, parent) for story in after)),
        caught_up_s=_since(fault_at, (_first_after(story, reached) for story in after)),
        largest_beat_gap_s=max(story.largest_gap_s for story in (*before, *after)),
        uncertain_s=min(killed.largest_gap_s + lateness_s, MOST_UNCERTAIN_S),
        overlap_margin_s=margin,
        wrong=tuple(wrong),
    )


def disagreements(found: Audit, receipt: Mapping[str, Any], *, of_silence: bool = False) -> list[str]:
    """Where the receipt says something else than the logs: a sentence each.

    `of_silence`: nobody told of the fault, so that its moment is known by heartbeats only, the stop is proven by time
    (`_fence_faults` looks at that), and of the last steps on the broken node nobody heard.
    """
    verdict = receipt["verdict"]
    unheard = found.reached_step - (receipt["reached_step"] or 0)
    if of_silence and 0 < unheard <= found.reached_step - found.heard_step:
        found = replace(
            found,
            reached_step=found.reached_step - unheard,
            steps_lost=found.steps_lost - unheard,
            steps_compared=min(found.steps_compared, found.steps_lost - unheard),
        )
    if of_silence and found.heard_compared <= verdict["steps_compared"] <= found.steps_compared:
        found = replace(found, steps_compared=verdict["steps_compared"])
    claimed = {
        "continuity": verdict["kind"],
        "steps_lost": verdict["steps_lost"],
        "steps_compared": verdict["steps_compared"],
        "generation": receipt["generation"],
        "reached_step": receipt["reached_step"],
        "parent_step": (receipt["parent"] or {}).get("step", 0),
    }
    words = [
        f"The receipt says {name} {value!r}, the ranks' logs say {getattr(found, name)!r}."
        for name, value in claimed.items()
        if value != getattr(found, name)
        # Losses of another number of ranks are nothing that the server could compare.
        and not (name == "steps_compared" and found.continuity == "state-equal")
    ]
    tolerance_s = (SILENCE_TOLERANCE_S if of_silence else SECONDS_TOLERANCE) + found.uncertain_s
    for name in ("detect_s", "stop_s", "first_step_s", "caught_up_s"):
        mine, theirs = getattr(found, name), receipt[name]
        if of_silence and name == "stop_s":
            continue
        if mine is None or theirs is None or abs(mine - theirs) > tolerance_s:
            words.append(f"The receipt says {name} {theirs}, the ranks' logs say {mine}.")
    return words


def _of_generation(stories: Stories, generation: int) -> list[RankStory]:
    return [story for (number, _), story in sorted(stories.items()) if number == generation]


def _heard_step(before: Sequence[RankStory], killed: RankStory, fault_at: float) -> int:
    return max(
        (
            step.step
            for story in before
            for step in story.steps.values()
            if story.node != killed.node or step.at < fault_at - UNHEARD_S
        ),
        default=0,
    )


def _heard_compared(
    before: Sequence[RankStory], after: Sequence[RankStory], killed: RankStory, *, first: int, until: float
) -> int:
    """Steps from `first` on that every rank has twice, made on the broken node before `until`."""
    told = [
        {step.step for step in story.steps.values() if story.node != killed.node or step.at < until} for story in before
    ]
    both = set.intersection(*told, *({*story.steps} for story in after))
    return sum(step >= first for step in both)


def _end_of(story: RankStory, exits: Mapping[int, float], thaws: Mapping[int, float]) -> float:
    return story.last_sign_of_life if story.pid in thaws else exits.get(story.pid, story.last_sign_of_life)


def _pids(stories: Iterable[RankStory]) -> list[int]:
    return [pid for story in stories for pid in (story.pid, *story.children)]


def _compare(
    before: Sequence[RankStory], after: Sequence[RankStory], *, world: range, first: int, last: int, bits: bool
) -> tuple[int, list[str]]:
    """Steps that every rank has twice, and a sentence for each difference (at most twelve); `bits`: losses too."""
    old, new = {story.rank: story.steps for story in before}, {story.rank: story.steps for story in after}
    compared, words = 0, []
    for number in range(first, last + 1):
        pairs = [(rank, old.get(rank, {}).get(number), new.get(rank, {}).get(number)) for rank in world]
        compared += all(was is not None and now is not None for _, was, now in pairs)
        for rank, was, now in pairs:
            if was is None or now is None:
                continue
            where = f"Step {number}, rank {rank}"
            if was.samples != now.samples:
                words.append(f"{where}: samples {now.samples} after {was.samples}: the sampler was not restored.")
            if was.learning_rate != now.learning_rate:
                words.append(
                    f"{where}: learning rate {now.learning_rate!r} after {was.learning_rate!r}: "
                    "the scheduler was not restored."
                )
            if bits and was.loss_hex != now.loss_hex:
                words.append(f"{where}: the replayed loss is {now.loss_hex}, it was {was.loss_hex}.")
    return compared, words[:12]


def _outside_band(before: Sequence[RankStory], after: Sequence[RankStory], *, first: int, last: int) -> list[str]:
    """Steps whose mean loss over all ranks was another one than before; each rank has its share of the samples."""
    words = []
    for number in range(first, last + 1):
        was, now = _mean_loss(before, number), _mean_loss(after, number)
        if was is not None and now is not None and not abs(now - was) <= LOSS_BAND * abs(was):
            words.append(f"Step {number}: the replayed loss over all ranks is {now:.4f}, it was {was:.4f}.")
    return words[:6]


def _mean_loss(stories: Sequence[RankStory], step: int) -> float | None:
    losses = [float.fromhex(story.steps[step].loss_hex) for story in stories if step in story.steps]
    return sum(losses) / len(losses) if len(losses) == len(stories) else None


def _launch_faults(
    stories: Stories,
    *,
    old: int,
    before: Sequence[RankStory],
    after: Sequence[RankStory],
    parent: int,
    new_world: int | None,
) -> list[str]:
    words = []
    newest = max(generation for generation, _ in stories)
    if newest != old + 1:
        words.append(f"There were {newest - old} relaunches, not one.")
    for story in (*before, *after):
        if story.starts > 1:
            words.append(f"Rank {story.rank} of generation {story.generation} was started {story.starts} times.")
    if new_world is not None and {story.rank for story in after} != set(range(new_world)):
        words.append(f"The new generation has {len(after)} ranks, not {new_world}.")
    if new_world is None and {story.rank for story in before} != {story.rank for story in after}:
        words.append("The ranks of the new generation are not those of the old one.")
    if any(story.resumed_step != parent for story in after):
        words.append(f"The ranks resumed at different steps: {[story.resumed_step for story in after]}.")
    if parent and not any(parent in story.saves for story in before):
        words.append(f"The ranks resumed at step {parent}, which generation {old} never logged as saved.")
    for story in stories.values():
        made = [one.saves.get(story.resumed_step or 0) for one in _of_generation(stories, story.parent_generation or 0)]
        if any(at is not None and at > story.started_at for at in made):
            words.append(
                f"Rank {story.rank} of generation {story.generation} resumed at step {story.resumed_step}, "
                "which was saved after its start."
            )
    return words


def _drill_faults(before: Sequence[RankStory], killed: RankStory) -> list[str]:
    words = []
    saves = sorted({step for story in before for step in story.saves})
    for earlier, later in itertools.pairwise(saves):
        if later - earlier < LEAST_SAVE_INTERVAL:
            words.append(f"Saves at steps {earlier} and {later} are less than {LEAST_SAVE_INTERVAL} steps apart.")
    last = max(killed.steps, default=0)
    past = last - max((step for step in saves if step <= last), default=0)
    if past < LEAST_STEPS_AFTER_SAVE:
        words.append(f"The rank died {past} steps after a save; at least {LEAST_STEPS_AFTER_SAVE} were asked for.")
    return words


def _process_faults(before: Sequence[RankStory], exits: Mapping[int, float], margin: float) -> list[str]:
    words = [
        f"a process of generation {story.generation} outlived the stop: pid {pid}, of rank {story.rank}"
        for story in before
        for pid in (story.pid, *story.children)
        if pid not in exits
    ]
    if margin <= 0:
        words.append(
            f"The generations overlapped: a new rank started {-margin:.3f} s before the last old sign of life."
        )
    return words


def _late_faults(before: Sequence[RankStory], after: Sequence[RankStory]) -> list[str]:
    """What an old generation did once the new one had made a step."""
    began = min((step.at for story in after for step in story.steps.values()), default=None)
    if began is None:
        return []
    words = []
    for story in before:
        late = [f"made step {step.step}" for step in story.steps.values() if step.at > began]
        late += [f"saved step {step}" for step, at in story.saves.items() if at > began]
        words += [
            f"Two generations at once: rank {story.rank} of generation {story.generation} {what} after generation "
            f"{after[0].generation} had made one."
            for what in late
        ]
    return words[:6]


def _thaw_faults(before: Sequence[RankStory], exits: Mapping[int, float], thaws: Mapping[int, float]) -> list[str]:
    """What frozen ranks did once they were thawed; a process that never went on is none of these."""
    words = []
    for story in before:
        if story.pid not in thaws:
            continue
        thawed_at = thaws[story.pid]
        words += [
            f"Rank {story.rank} made step {step.step} after it was thawed."
            for step in story.steps.values()
            if step.at > thawed_at
        ]
        words += [
            f"Rank {story.rank} saved step {step} after it was thawed."
            for step, at in story.saves.items()
            if at > thawed_at
        ]
        for pid in (story.pid, *story.children):
            lived_s = exits.get(pid, thawed_at) - thaws.get(pid, thawed_at)
            if lived_s > GONE_AFTER_THAW_S:
                words.append(f"Process {pid} of rank {story.rank} lived for {lived_s:.1f} s after it was thawed.")
    return words[:6]


def _fence_faults(
    before: Sequence[RankStory], exits: Mapping[int, float], thaws: Mapping[int, float], fences: Sequence[Fence]
) -> list[str]:
    """Proofs of stop that the processes themselves disprove."""
    words = []
    for fence in fences:
        for story in before:
            if story.node != fence.node:
                continue
            acted = max([story.last_step_at, *story.saves.values()])
            pids = [pid for pid in (story.pid, *story.children) if pid not in thaws]
            last = max([acted, *(exits[pid] for pid in pids if pid in exits)])
            if last > fence.at + SECONDS_TOLERANCE:
                words.append(
                    f"{fence.node} was called fenced ({fence.kind}) {last - fence.at:.1f} s before the last of rank "
                    f"{story.rank} was over."
                )
    return words


def _digest_faults(after: Sequence[RankStory]) -> list[str]:
    words = []
    for story in after:
        parts = sorted(set(story.saved_digest) | set(story.live_digest))
        if not parts:
            words.append(f"Rank {story.rank} logged no state digest.")
        for part in parts:
            if story.saved_digest.get(part) != story.live_digest.get(part):
                words.append(f"Rank {story.rank}: the {part} was not restored: its digest is not the saved one.")
    return words


def _span_faults(after: Sequence[RankStory]) -> list[str]:
    """Within an epoch, each step's samples begin where those of the step before ended."""
    words = []
    for story in after:
        steps = [story.steps[number] for number in sorted(story.steps)]
        for before, behind in itertools.pairwise(steps):
            if behind.step != before.step + 1:
                words.append(f"Rank {story.rank} logged step {behind.step} right after step {before.step}.")
            elif behind.epoch == before.epoch and behind.span_start != before.span_stop:
                words.append(f"Rank {story.rank}: step {behind.step} does not begin where step {before.step} ended.")
            elif behind.epoch != before.epoch and (behind.epoch != before.epoch + 1 or behind.span_start != 0):
                words.append(f"Rank {story.rank}: step {behind.step} does not begin the epoch after {before.epoch}.")
    return words[:6]


def _beat_faults(stories: Sequence[RankStory]) -> list[str]:
    return [
        f"Rank {story.rank} of generation {story.generation} left no beats."
        for story in stories
        if len(story.beats) < 2
    ]


def _first_after(story: RankStory, step: int) -> float | None:
    return min((done.at for done in story.steps.values() if done.step > step), default=None)


def _since(fault_at: float, times: Iterable[float | None]) -> float | None:
    """Seconds from the fault to the latest of the times; None if one of them is unknown."""
    known = list(times)
    if not known or any(at is None for at in known):
        return None
    return max(at for at in known if at is not None) - fault_at
