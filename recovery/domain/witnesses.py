"""Absence needs two witnesses: that a node is silent is one; that the job or another node misses it too, the second.

What a live agent says first-hand (an exit, a kernel line) needs no second witness and is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agents.protocol.messages import Phase
from recovery.domain.diagnosis import is_echo
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.generations import GenerationView, RankView
from recovery.domain.plan import LeaseLimits
from recovery.domain.silence import Contact

RULE_VERSION = "witnesses-1"

STALL_AT_LEAST_S = 5.0
STALL_PACES = 8.0
"""A rank that has not finished a step for this many of its longest recent steps stands still."""


class WitnessKind(StrEnum):
    """Who says that a node is gone."""

    HEARTBEAT = "heartbeat"
    PEER_FAILED = "peer_failed"
    """A rank on another node died of a broken collective."""
    PEER_STALLED = "peer_stalled"
    """The ranks on the other nodes stand still."""
    PROBE = "probe"
    """Another node's agent gets no answer from its kernel."""
    ENGINE = "engine"
    """A fence provider or an engine's API says that it is off."""


@dataclass(frozen=True, kw_only=True)
class Witness:
    """One reason to believe that a node is gone, in a sentence."""

    kind: WitnessKind
    sentence: str


@dataclass(frozen=True, kw_only=True)
class ProbeView:
    """The newest answered look of another agent at a node."""

    node: str
    prober: str
    asked_at: float
    reachable: bool
    detail: str = ""


def witnesses(
    name: str,
    *,
    generation: GenerationView,
    fleet: FleetSnapshot,
    probes: Sequence[ProbeView],
    synchronous: bool,
    now: float,
) -> tuple[Witness, ...]:
    """Everything that speaks for the absence of a node on which a generation should run; none if it is in contact."""
    node = fleet.node(name)
    if node is None or node.contact is not Contact.LOST or node.last_heard_at is None:
        return ()
    heartbeat = f"{name} has been silent for {node.silent_s:.0f} s"
    found = [Witness(kind=WitnessKind.HEARTBEAT, sentence=heartbeat)]
    seen = {other.name for other in fleet.nodes if other.contact is Contact.SEEN}
    peers = [rank for rank in generation.ranks if rank.node != name and rank.node in seen]
    dead = next((rank for rank in peers if rank.died and is_echo(rank, generation.ranks)), None)
    if dead is not None and not _broke_by_itself(generation.ranks):
        sentence = f"rank {dead.rank} on {dead.node} died of a broken collective"
        found.append(Witness(kind=WitnessKind.PEER_FAILED, sentence=sentence))
    living = [rank for rank in peers if not rank.exited and rank.finished_step is None]
    if synchronous and living and all(stands_still(rank, limits=generation.lease, now=now) for rank in living):
        longest = min(now - (rank.progress_seen_at or rank.progress_at or now) for rank in living)
        sentence = f"the ranks on the other nodes have made no progress for {longest:.0f} s"
        found.append(Witness(kind=WitnessKind.PEER_STALLED, sentence=sentence))
    probe = max((p for p in probes if p.node == name), key=lambda p: p.asked_at, default=None)
    if probe is not None and not probe.reachable and probe.asked_at > node.last_heard_at:
        sentence = f"{probe.prober} gets no answer from it ({probe.detail or 'no route'})"
        found.append(Witness(kind=WitnessKind.PROBE, sentence=sentence))
    return tuple(found)


def _broke_by_itself(ranks: Sequence[RankView]) -> bool:
    """A rank's own death explains what its peers died of: then their errors say nothing of a node that is silent."""
    told = [rank for rank in ranks if rank.died and (rank.signal or rank.exit_code is not None)]
    return any(not is_echo(rank, ranks) for rank in told)


def stands_still(rank: RankView, *, limits: LeaseLimits | None, now: float) -> bool:
    """Whether a rank has made no progress for longer than its phase allows. A rank that never spoke is not judged."""
    seen_at = rank.progress_seen_at or rank.progress_at
    if seen_at is None:
        return False
    return now - seen_at > stall_limit_s(rank, limits=limits)


def stall_limit_s(rank: RankView, *, limits: LeaseLimits | None) -> float:
    """Seconds without progress after which a rank stands still, by its phase and its own pace."""
    limits = limits or LeaseLimits()
    match rank.phase:
        case Phase.SETUP | None:
            return limits.setup_s
        case Phase.COMPILE:
            return limits.compile_s
        case Phase.SAVE:
            return limits.save_s
        case Phase.EVALUATION:
            return limits.evaluation_s
        case Phase.STEP:
            return max(STALL_AT_LEAST_S, STALL_PACES * (rank.pace_s or 0.0))
    return limits.setup_s


def setting_up_until(generation: GenerationView, *, since: float) -> float:
    """Until when its ranks may be short of their first step: the job's own limits say so, not how long others take.

    since: when the launch began; a rank that has not spoken is in its setup since then. `since` where a rank is gone
    or was never started: its agent should have said so long ago.
    """
    living = [rank for rank in generation.ranks if not rank.exited]
    if len(living) < generation.plan.world_size:
        return since
    spoke_at = [rank.progress_seen_at or rank.progress_at or since for rank in living]
    return max(at + stall_limit_s(rank, limits=generation.lease) for at, rank in zip(spoke_at, living, strict=True))


def is_confirmed(found: Iterable[Witness]) -> bool:
    """Two witnesses of different kinds."""
    return len({witness.kind for witness in found}) >= 2
