"""When a node may be called off by somebody's word, and when a fence provider is used without being asked.

A word that a node is off is as strong as the node's own proof, and a wrong one lets two copies of a job run. So it is
taken only where nothing better is to be had: the node is out of contact, and something may still run on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.absences import missing_nodes
from recovery.domain.breaker import absence_is_credible
from recovery.domain.incident import CauseKind, Incident, IncidentState
from recovery.domain.silence import Contact
from recovery.domain.situation import Situation
from recovery.domain.timeline import join_names

RULE_VERSION = "fence-policy-1"

MAX_ATTEMPTS = 3
BACK_OFF_S = 10.0
"""Before the second attempt; it doubles with each further one."""


@dataclass(frozen=True, kw_only=True)
class FenceCandidate:
    """A node that somebody wants to call off, or to have switched off."""

    name: str
    contact: Contact
    silent_s: float
    unproven: tuple[str, ...]
    """What may still run on it: `generation 2 of llm-7b`."""
    trains_on: tuple[str, ...] = ()
    """Names of jobs whose ranks elsewhere step on, in which none steps alone: its ranks live."""


def why_not_fenced(node: FenceCandidate) -> str:
    """Why nobody's word that this node is off is taken now, with what to do; empty if it is."""
    match node.contact:
        case Contact.SEEN:
            return f"{node.name} is in contact: its own agent stops what has to go there and proves it."
        case Contact.SUSPECT:
            return (
                f"{node.name} was heard {node.silent_s:.0f} s ago and does not count as lost yet: "
                "wait a few seconds and look again."
            )
        case Contact.UNOBSERVED:
            return (
                f"Whether {node.name} is in contact is not known: no web process has listened for long enough. "
                "Wait a minute and look again."
            )
        case Contact.LOST if not node.unproven:
            return f"Nothing waits for a proof of {node.name}: whatever was ordered to run there is proven gone."
        case Contact.LOST if node.trains_on:
            return (
                f"{join_names(node.trains_on)} trains on, and no rank of it steps alone: {node.name} is not off, "
                "only its agent cannot be reached. Stop the job first if the node has to be switched off."
            )
    return ""


def next_attempt_at(*, attempts: int, last_ended_at: float | None) -> float | None:
    """When a provider may be asked (again), Unix seconds; None if its attempts are used up."""
    if attempts >= MAX_ATTEMPTS:
        return None
    if last_ended_at is None:
        return 0.0
    return last_ended_at + BACK_OFF_S * 2.0 ** (attempts - 1)


def nodes_to_fence(incident: Incident, situation: Situation, now: float) -> tuple[str, ...]:
    """Lost nodes that a provider should switch off unasked, for an incident of a lost node that waits for its proof.

    Only nodes that two witnesses missed are named: the incident's own, and those that they miss now. Never while the
    breaker is open: then what is silent is the network.
    """
    if incident.state not in (IncidentState.STOPPING, IncidentState.WAITING_FOR_FENCE) or not incident.stop_ordered:
        return ()
    if incident.cause is None or incident.cause.kind is not CauseKind.NODE_LOST:
        return ()
    if not absence_is_credible(situation.fleet):
        return ()
    named = {incident.cause.node}
    waited_for: list[str] = []
    for generation in situation.generations:
        if generation.fenced:
            continue
        named |= {missing.name for missing in missing_nodes(generation, situation, now)}
        waited_for += generation.unfenced_nodes
    lost = {node.name for node in situation.fleet.nodes if node.contact is Contact.LOST}
    return tuple(name for name in dict.fromkeys(waited_for) if name in named and name in lost)
