"""Nodes that should prove a stop and cannot be heard: what is told of them where nothing else has a human look.

A fault has an incident, and that waits for a fence. A job that its owner wants stopped has none, and would wait unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.breaker import absence_is_credible
from recovery.domain.fences import LEASE_SLACK_S, LEASE_WAIT_AT_MOST_S, open_shares
from recovery.domain.incident import Cause, CauseKind
from recovery.domain.lease import lease_ends_at
from recovery.domain.silence import Contact
from recovery.domain.situation import Situation
from recovery.domain.timeline import join_names


@dataclass(frozen=True, kw_only=True)
class UnprovenStop:
    """What a job's stop waits for, and nobody knows whether it ever comes."""

    generation: int
    """The newest that is not proven gone."""
    nodes: tuple[str, ...]
    silent_s: float
    """For how long each of them has been silent."""

    @property
    def cause(self) -> Cause:
        names = join_names(self.nodes)
        return Cause(
            kind=CauseKind.NODE_SILENT,
            rank=None,
            node=self.nodes[0],
            sentence=f"The job is to be stopped, but there has been no contact with {names} for {self.silent_s:.0f} s, "
            f"and nothing proves that generation {self.generation} is gone from there.",
        )


def unproven_stop(situation: Situation, now: float) -> UnprovenStop | None:
    """Silent nodes that hold up a stop; None if there are none, or if the breaker is open and has told somebody.

    A lease that proves it before long is waited for, as an incident does.
    """
    if not absence_is_credible(situation.fleet):
        return None
    found: dict[str, float] = {}
    newest = 0
    for generation, share in open_shares(situation):
        node = situation.fleet.node(share.node)
        if node is None or node.contact is not Contact.LOST or node.silent_s < situation.policy.unseen_s:
            continue
        ends_at = lease_ends_at(share, generation, node, synchronous=situation.job.synchronous)
        if ends_at is not None and now - LEASE_SLACK_S < ends_at <= now + LEASE_WAIT_AT_MOST_S:
            continue
        found[node.name] = node.silent_s
        newest = max(newest, generation.number)
    return UnprovenStop(generation=newest, nodes=tuple(found), silent_s=min(found.values())) if found else None
