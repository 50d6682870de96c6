"""What failed and why, in a sentence: of the broken generation, and of one that was launched to replace it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recovery.domain.absences import missing_nodes, node_lost, node_silent, unseen_for_s
from recovery.domain.diagnosis import diagnose, is_echo
from recovery.domain.generations import NONFINITE_STEPS, GenerationView, RankView, ShareView
from recovery.domain.incident import Cause, CauseKind, Incident
from recovery.domain.lineage import reached_step
from recovery.domain.situation import Situation
from recovery.domain.timeline import Entry, EntryKind, join_names


def diagnosed(incident: Incident, situation: Situation, now: float) -> tuple[Incident, tuple[Entry, ...]]:
    """The incident with its cause, and the sentence that tells it; unchanged if it is known, or if nothing died."""
    broken = situation.generation(incident.broken_generation)
    if incident.cause is not None or broken is None:
        return incident, ()
    cause = first_hand_cause(broken, situation, now)
    silent_s = unseen_for_s(broken, situation) if cause is None else None
    if silent_s is not None and not broken.fenced:
        cause = node_silent(broken, silent_s)
    if cause is None:
        return incident, ()
    known = replace(incident, cause=cause, fault_at=_fault_at(incident, cause, situation))
    fault = Entry(
        kind=EntryKind.FAULT,
        at=known.fault_at,
        text=cause.sentence,
        data={"rank": cause.rank, "node": cause.node, "kind": cause.kind.value, "cascade": list(cause.cascade)},
    )
    return replace(known, reached_step=reached_step(situation.generations)), (fault,)


def _fault_at(incident: Incident, cause: Cause, situation: Situation) -> float:
    """When it broke: a node that is gone was heard last before the rank died elsewhere that told of it."""
    node = situation.fleet.node(cause.node) if cause.kind is CauseKind.NODE_LOST and cause.node else None
    if node is None or node.last_heard_at is None:
        return incident.fault_at
    return min(incident.fault_at, node.last_heard_at)


def first_hand_cause(
    generation: GenerationView, situation: Situation, now: float, *, told: Sequence[RankView] | None = None
) -> Cause | None:
    """What is known for certain to have broken it: a death, a runner that is gone, a node that two witnesses miss, or
    a loss that is not finite any more.

    A rank that died of a broken collective is no cause beside a node that is gone. `told` are the ranks whose deaths
    count, where not all do.
    """
    deaths = generation.ranks if told is None else told
    return _cause_of(deaths, generation, situation, now) or _runner_lost(generation) or loss_lost(generation)


def _cause_of(told: Sequence[RankView], generation: GenerationView, situation: Situation, now: float) -> Cause | None:
    died = diagnose(told)
    first = next((rank for rank in told if died is not None and rank.rank == died.rank), None)
    if died is not None and not (first is not None and is_echo(first, told)):
        return died
    missing = missing_nodes(generation, situation, now, even_fenced=True)
    if missing:
        return node_lost(missing, tuple(sorted(rank.rank for rank in told if rank.died)))
    return died


def _runner_lost(generation: GenerationView) -> Cause | None:
    if not generation.failed_shares:
        return None
    share = generation.failed_shares[0]
    return Cause(kind=CauseKind.RUNNER_LOST, rank=None, node=share.node, sentence=f"{_share_words(share)}.")


def loss_lost(generation: GenerationView) -> Cause | None:
    """The cause where nothing died, but what is trained is no longer a number."""
    step = generation.nonfinite_step
    if step is None or not generation.loss_lost:
        return None
    ranks = [str(rank.rank) for rank in generation.ranks if rank.nonfinite_count >= NONFINITE_STEPS]
    who = f"Rank {ranks[0]} reports" if len(ranks) == 1 else f"Ranks {join_names(ranks)} report"
    sentence = f"{who} a loss that is not finite from step {step} on."
    return Cause(kind=CauseKind.LOSS_NOT_FINITE, rank=None, node=None, sentence=sentence)


def second_look(incident: Incident, situation: Situation, now: float) -> tuple[Incident, tuple[Entry, ...]]:
    """The cause once more, now that every old node has told what it knew: the first death heard may be an echo."""
    if incident.cause is not None and incident.cause.kind is CauseKind.LOSS_NOT_FINITE:
        return incident, ()  # what died since is our own stop's work
    broken = situation.generation(incident.broken_generation)
    told = told_exits(broken) if broken else ()
    if incident.cause is not None and incident.cause.rank is None:
        # No rank's death was known when it was opened: those that came after it are our own stop's work.
        told = tuple(rank for rank in told if (rank.exited_at or 0.0) <= incident.opened_at)
    cause = _cause_of(told, broken, situation, now) if broken else None
    if (
        cause is None
        or incident.cause is None
        or (cause.rank, cause.kind) == (incident.cause.rank, incident.cause.kind)
    ):
        return incident, ()
    known = replace(incident, cause=cause, fault_at=_fault_at(incident, cause, situation))
    entry = Entry(
        kind=EntryKind.FAULT,
        at=known.fault_at,
        text=f"On a second look, with word from every node: {cause.sentence}",
        data={"rank": cause.rank, "node": cause.node, "kind": cause.kind.value, "cascade": list(cause.cascade)},
    )
    return known, (entry,)


def told_exits(generation: GenerationView) -> tuple[RankView, ...]:
    """Ranks whose end somebody saw; the others are gone because nothing of theirs was left."""
    return tuple(rank for rank in generation.ranks if rank.signal or rank.exit_code is not None)


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
