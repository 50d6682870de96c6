"""What the product says of one case, by every way that a checkpoint is taken in, held against the truth.

Four look: `examine`, which `everstep checkpoint verify` prints; the ranks, which load; the choice of a run without a
plan; and the agent, by which a plan is prepared.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from agents.supervisor.checkpoints import is_complete
from corruptions.crew import Reply, failing_reads, nobody
from corruptions.ground import LINE, Case
from everstep.checkpoint.lineage import newest_checkpoint
from everstep.checkpoint.manifest import CheckpointName
from everstep.checkpoint.verify import examine
from everstep.errors import CheckpointDamaged, CheckpointMissing, EverstepError


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case. `found`: by what verification has found it; `accepted_bad` and `refused_good` say how, or are ""."""

    kind: str
    shape: str
    what: str
    found: tuple[str, ...] = ()
    accepted_bad: str = ""
    refused_good: str = ""

    @property
    def right(self) -> bool:
        return not (self.accepted_bad or self.refused_good)


def judge_damaged(kind: str, case: Case, what: str) -> Result:
    """A checkpoint that something was done to: nobody may take it for what it is not."""
    found, said, bad = _verified(case)
    replies = _load(case, case.target)
    bad = bad or _wrong(case, case.target, replies)
    loaded = all(reply.outcome == "loaded" for reply in replies)
    if not bad and not found and not loaded:
        refusal = next(reply.said for reply in replies if reply.outcome != "loaded")
        bad = f"verification finds nothing, and a rank says {refusal}"
    listed, visible = _listed(case), {"manifest", "size", "no manifest"} & set(found)
    if not bad and listed and visible and case.agent_can_see:
        bad = f"the agent takes it for complete: {said}"
    bad = bad or _bad_choice(case)
    return Result(kind=kind, shape=str(case.ground.crew.shape), what=what, found=found, accepted_bad=bad)


def judge_line(kind: str, case: Case, what: str) -> Result:
    """What a run without a plan goes on from: exactly that, or no choice at all where nobody can tell."""
    bad, good = "", ""
    try:
        chosen = newest_checkpoint(case.root)
    except EverstepError as err:
        good = f"refused to choose: {err}" if case.expected else ""
    else:
        name = chosen.name if chosen else None
        if case.expected is None or name not in LINE:
            bad = f"chose {name}"
        elif name != case.expected:
            good = f"chose {name} instead of {case.expected}"
    bad = bad or _bad_choice(case)
    shape = str(case.ground.crew.shape)
    return Result(kind=kind, shape=shape, what=what, found=("line",), accepted_bad=bad, refused_good=good)


def judge_whole(kind: str, case: Case, what: str) -> Result:
    """A checkpoint that nothing is wrong with: everybody must take it for what it is."""
    found, said, good = _verified(case)
    replies = _load(case, case.target)
    bad = _wrong(case, case.target, replies) or _bad_choice(case)
    refusals = [reply.said for reply in replies if reply.outcome != "loaded"]
    good = good or "; ".join([said] if found else refusals[:1])
    chosen = None if good else newest_checkpoint(case.root)
    if not good and (chosen is None or chosen.name != case.expected):
        good = f"chose {chosen and chosen.name} instead of {case.expected}"
    if not good and not _listed(case):
        good = "the agent takes it for incomplete"
    shape = str(case.ground.crew.shape)
    return Result(kind=kind, shape=shape, what=what, found=found, accepted_bad=bad, refused_good=good)


def _verified(case: Case) -> tuple[tuple[str, ...], str, str]:
    """By what faults were found, the first in words, and what escaped that should not have."""
    medium = failing_reads(case.unreadable) if case.unreadable else contextlib.nullcontext()
    try:
        with medium, nobody() if case.as_nobody else contextlib.nullcontext():
            examination = examine(case.directory)
    except CheckpointMissing as err:
        return ("no manifest",), str(err), ""
    except BaseException as err:
        return (), "", f"verification ended in {type(err).__name__}: {err}"
    kinds = tuple(sorted({fault.kind for fault in examination.faults}))
    return kinds, str(examination.faults[0]) if kinds else "", ""


def _load(case: Case, name: CheckpointName) -> list[Reply]:
    replies: list[Reply] = case.ground.crew.ask(
        "load", name.directory(case.root), unreadable=case.unreadable, as_nobody=case.as_nobody
    )
    return replies


def _wrong(case: Case, name: CheckpointName, replies: list[Reply]) -> str:
    """How ranks took in what was never saved under this name; "" if they did not."""
    truth = case.ground.truth.get(str(name), [""] * len(replies))
    for rank, (reply, true) in enumerate(zip(replies, truth, strict=True)):
        if reply.outcome == "loaded" and reply.said != true:
            return f"rank {rank} loaded {name} with other values than were saved"
        if reply.outcome == "escaped":
            return f"on rank {rank} the load ended in {reply.said}"
    return ""


def _bad_choice(case: Case) -> str:
    """How a run without a plan would go on from something that it must not; "" if it would not."""
    try:
        chosen = newest_checkpoint(case.root)
    except (CheckpointDamaged, CheckpointMissing):
        return ""
    except BaseException as err:
        return f"the choice ended in {type(err).__name__}: {err}"
    if chosen is None or chosen.name not in LINE:
        return f"a run alone would go on from {chosen and chosen.name}"
    return _wrong(case, chosen.name, _load(case, chosen.name))


def _listed(case: Case) -> bool:
    return is_complete(str(case.root), case.target.generation, case.target.step)
