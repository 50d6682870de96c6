"""Which nodes of a generation are gone though nobody said so, and whether the generation can be seen at all."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.breaker import absence_is_credible
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.generations import GenerationView, Phase
from recovery.domain.incident import Cause, CauseKind
from recovery.domain.silence import Contact
from recovery.domain.situation import Situation
from recovery.domain.timeline import join_names
from recovery.domain.witnesses import Witness, is_confirmed, stands_still, witnesses


@dataclass(frozen=True, kw_only=True)
class MissingNode:
    """A node that is gone by the word of two witnesses."""

    name: str
    last_heard_at: float
    witnesses: tuple[Witness, ...]

    @property
    def sentence(self) -> str:
        return f"{self.name} is gone: {join_names([witness.sentence for witness in self.witnesses])}"


def missing_nodes(
    generation: GenerationView, situation: Situation, now: float, *, even_fenced: bool = False
) -> tuple[MissingNode, ...]:
    """Nodes of a generation that two witnesses miss. None while the breaker forbids it, or while its ranks step on.

    A node on which the generation is fenced already is missing no more, unless it is asked for (to tell the cause).

    A synchronous job that steps has all its ranks, whatever we can see of them.
    """
    if not absence_is_credible(situation.fleet) or peers_step_on(
        generation, situation.fleet, synchronous=situation.job.synchronous, now=now
    ):
        return ()
    found = []
    for name in generation.plan.nodes:
        node = situation.fleet.node(name)
        said = witnesses(
            name,
            generation=generation,
            fleet=situation.fleet,
            probes=situation.probes,
            synchronous=situation.job.synchronous,
            now=now,
        )
        gone = is_confirmed(said) and (even_fenced or not _fenced(generation, name))
        if gone and node is not None and node.last_heard_at is not None:
            found.append(MissingNode(name=name, last_heard_at=node.last_heard_at, witnesses=said))
    if len(found) == len(generation.plan.nodes):
        return ()  # none of its nodes can be seen: see `unseen_for_s`
    return tuple(found)


def unseen_for_s(generation: GenerationView, situation: Situation) -> float | None:
    """For how long not one node of a generation could be seen; None if one can, or if the breaker is open.

    Then nobody is there who could say whether it trains: a single node's ranks need no network to train on. A node
    whose ranks have done their last step has nothing to say of the others any more.
    """
    if not absence_is_credible(situation.fleet):
        return None
    silences = []
    for name in generation.plan.nodes:
        if generation.ended_well_on(name):
            continue
        node = situation.fleet.node(name)
        if node is None or node.contact is not Contact.LOST:
            return None
        silences.append(node.silent_s)
    return min(silences, default=None)


def hold_up_launch(generation: GenerationView, situation: Situation) -> tuple[str, ...]:
    """Lost nodes whose peers wait for them; asked once a launch is overdue, which makes the peers' wait the witness.

    Until it has made a step, a rank's limit is that of a setup: its stalled peers would be called so far too late.
    """
    if not absence_is_credible(situation.fleet) or not situation.job.synchronous:
        return ()
    contact = {node.name: node.contact for node in situation.fleet.nodes}
    stepped = {rank.node for rank in generation.ranks if rank.first_step_at is not None}
    nodes = generation.plan.nodes
    lost = tuple(name for name in nodes if contact.get(name) is Contact.LOST)
    waiting = any(contact.get(name) is Contact.SEEN and name not in stepped for name in nodes)
    return lost if waiting else ()


def node_lost(missing: tuple[MissingNode, ...], cascade: tuple[int, ...] = ()) -> Cause:
    """The cause of an incident whose nodes are gone; `cascade` are ranks that died of it elsewhere."""
    return Cause(
        kind=CauseKind.NODE_LOST,
        rank=None,
        node=missing[0].name,
        sentence="; ".join(node.sentence for node in missing) + ".",
        cascade=cascade,
        witnesses=tuple((witness.kind.value, witness.sentence) for node in missing for witness in node.witnesses),
    )


def node_silent(generation: GenerationView, silent_s: float) -> Cause:
    """The cause where nothing of a generation can be seen."""
    nodes = generation.plan.nodes
    return Cause(
        kind=CauseKind.NODE_SILENT,
        rank=None,
        node=nodes[0],
        sentence=f"There has been no contact with {join_names(nodes)} for {silent_s:.0f} s, and no other node that "
        f"could tell whether generation {generation.number} trains.",
    )


def peers_step_on(generation: GenerationView, fleet: FleetSnapshot, *, synchronous: bool, now: float) -> bool:
    """Whether a rank on a node in contact goes on, in a job in which none goes on alone."""
    if not synchronous:
        return False
    seen = {node.name for node in fleet.nodes if node.contact is Contact.SEEN}
    return any(
        rank.node in seen
        and not rank.exited
        and rank.progress_at is not None
        and rank.phase in (Phase.STEP, Phase.SAVE, Phase.EVALUATION)
        and not stands_still(rank, limits=generation.lease, now=now)
        for rank in generation.ranks
    )


def _fenced(generation: GenerationView, node: str) -> bool:
    return any(share.node == node and share.proof is not None for share in generation.shares)
