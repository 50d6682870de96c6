"""What failed and why, in a sentence: of the broken generation, and of one that was launched to replace it."""

from __future__ import annotations

from dataclasses import replace

from recovery.domain.diagnosis import diagnose
from recovery.domain.generations import GenerationView, ShareView
from recovery.domain.incident import Cause, CauseKind, Incident
from recovery.domain.lineage import reached_step
from recovery.domain.situation import Situation
from recovery.domain.timeline import Entry, EntryKind


def diagnosed(incident: Incident, situation: Situation) -> tuple[Incident, tuple[Entry, ...]]:
    """The incident with its cause, and the sentence that tells it; unchanged if it is known, or if nothing died."""
    broken = situation.generation(incident.broken_generation)
    if incident.cause is not None or broken is None:
        return incident, ()
    cause = diagnose(broken.ranks) or _runner_lost(broken)
    if cause is None:
        return incident, ()
    fault = Entry(
        kind=EntryKind.FAULT,
        at=incident.fault_at,
        text=cause.sentence,
        data={"rank": cause.rank, "node": cause.node, "kind": cause.kind.value, "cascade": list(cause.cascade)},
    )
    return replace(incident, cause=cause, reached_step=reached_step(situation.generations)), (fault,)


def _runner_lost(generation: GenerationView) -> Cause | None:
    if not generation.failed_shares:
        return None
    share = generation.failed_shares[0]
    return Cause(kind=CauseKind.RUNNER_LOST, rank=None, node=share.node, sentence=f"{_share_words(share)}.")


def second_look(incident: Incident, situation: Situation) -> tuple[Incident, tuple[Entry, ...]]:
    """The cause once more, now that every old node has told what it knew: the first death heard may be an echo."""
    broken = situation.generation(incident.broken_generation)
    told = [rank for rank in broken.ranks if rank.signal or rank.exit_code is not None] if broken else []
    cause = diagnose(told)
    if (
        cause is None
        or incident.cause is None
        or (cause.rank, cause.kind) == (incident.cause.rank, incident.cause.kind)
    ):
        return incident, ()
    entry = Entry(
        kind=EntryKind.FAULT,
        at=incident.fault_at,
        text=f"On a second look, with word from every node: {cause.sentence}",
        data={"rank": cause.rank, "node": cause.node, "kind": cause.kind.value, "cascade": list(cause.cascade)},
    )
    return replace(incident, cause=cause), (entry,)


def failure_of(generation: GenerationView) -> str:
    """Why a running generation has failed; empty if it has not."""
    cause = diagnose(generation.ranks)
    if cause is not None:
        return cause.sentence.rstrip(".")
    if generation.failed_shares:
        return _share_words(generation.failed_shares[0])
    return ""


def _share_words(share: ShareView) -> str:
    return f"{share.node} could not run it: {share.detail or share.reason or 'its runner is gone'}"


def culprits(generation: GenerationView) -> tuple[str, ...]:
    """The node of the first death; else those whose runner is gone; else those on which no rank started."""
    cause = diagnose(generation.ranks)
    if cause is not None and cause.node is not None:
        return (cause.node,)
    if generation.failed_shares:
        return tuple(share.node for share in generation.failed_shares)
    started = {rank.node for rank in generation.ranks}
    return tuple(node for node in generation.plan.nodes if started and node not in started)
