"""What forbids a drill right now. Asked once, before anything is broken; a refusal names its guard and says why."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.drill_kinds import DrillKind, PromiseKind, Target
from recovery.domain.generations import AssignmentPhase, GenerationView
from recovery.domain.instructions import JobState
from recovery.domain.placement import NoCapacity, choose_as_many, possible_sizes
from recovery.domain.silence import Contact
from recovery.domain.situation import JobView, Situation
from recovery.domain.timeline import join_names

UNSEEN_MARGIN_S = 5.0
"""An agent that is cut for almost as long as a human is asked after may come back too late for it."""


@dataclass(frozen=True, kw_only=True)
class OtherDrill:
    """A drill that is not over."""

    id: str
    kind: DrillKind
    job: str


@dataclass(frozen=True, kw_only=True)
class DrillScene:
    """What is so at the moment that a drill is asked for."""

    situation: Situation
    open_incident: str = ""
    """Of the job, or of the control plane."""
    others: tuple[OtherDrill, ...] = ()
    supervised: bool = False
    """Whether somebody is there who can hold this server's processes down and start them again."""

    @property
    def job(self) -> JobView:
        return self.situation.job

    @property
    def generation(self) -> GenerationView | None:
        """The one that is wanted to run."""
        wanted = [one for one in self.situation.generations if one.wanted is AssignmentPhase.RUN]
        return max(wanted, key=lambda one: one.number, default=None)


@dataclass(frozen=True, kw_only=True)
class DrillWish:
    """What is asked for. `node` and `protocol` are of the node that is hit; None and 0 where there is none."""

    kind: DrillKind
    node: str | None
    protocol: int
    duration_s: float
    allow_waiting: bool = False
    """The asker knows that the job may have to wait, for a human or for a node."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    guard: str
    words: str


def why_not(wish: DrillWish, scene: DrillScene) -> Refusal | None:
    """The first guard that forbids the drill; None if all let it pass."""
    return (
        _unsteady(scene)
        or _wrong_duration(wish)
        or _overlap(wish, scene)
        or _cannot_hold_server(wish, scene)
        or _node_not_able(wish, scene)
        or (None if wish.allow_waiting else _would_wait(wish, scene))
    )


def _unsteady(scene: DrillScene) -> Refusal | None:
    job = scene.job
    if job.state is not JobState.RUNNING:
        words = f"Job {job.name} is {job.state.value}, not running: a drill starts from a steady state only."
        return Refusal(guard="steady_state", words=words)
    if scene.open_incident:
        return Refusal(guard="open_incident", words=f"{scene.open_incident} is open: let it end first.")
    if scene.generation is None:
        return Refusal(guard="steady_state", words=f"Job {job.name} has no running generation.")
    if not scene.generation.ranks:
        return Refusal(guard="steady_state", words="No rank has reported yet: wait until the job trains.")
    return None


def _wrong_duration(wish: DrillWish) -> Refusal | None:
    kind, asked = wish.kind, wish.duration_s
    if kind.lasts and not 1.0 <= asked <= kind.longest_s:
        words = f"{kind.name} lasts from 1 to {kind.longest_s:.0f} s, not {asked:g} s."
        return Refusal(guard="duration", words=words)
    if not kind.lasts and asked:
        return Refusal(guard="duration", words=f"{kind.name} is done in a moment: it has no duration.")
    return None


def _overlap(wish: DrillWish, scene: DrillScene) -> Refusal | None:
    for other in scene.others:
        if other.job == scene.job.id:
            words = f"Another drill ({other.id}, {other.kind.name}) runs on job {scene.job.name}: wait for its end."
            return Refusal(guard="overlap", words=words)
        if wish.kind.target is not Target.RANK and other.kind.target is not Target.RANK:
            words = f"Drill {other.id} ({other.kind.name}) is not over: drills break one node at a time."
            return Refusal(guard="size", words=words)
    return None


def _cannot_hold_server(wish: DrillWish, scene: DrillScene) -> Refusal | None:
    if wish.kind.target is Target.SERVER and not scene.supervised:
        words = (
            "Nobody is there who would start this server again: "
            f"{wish.kind.name} needs `everstep up`, which holds it down and starts it again."
        )
        return Refusal(guard="supervised", words=words)
    return None


def _node_not_able(wish: DrillWish, scene: DrillScene) -> Refusal | None:
    if wish.node is None or wish.kind.protocol <= 1:
        return None
    node = scene.situation.fleet.node(wish.node)
    if node is None or node.contact is not Contact.SEEN:
        words = f"{wish.node} is not in contact: a drill starts from a steady state only."
        return Refusal(guard="steady_state", words=words)
    if wish.protocol < wish.kind.protocol:
        words = (
            f"The agent of {wish.node} speaks protocol {wish.protocol}, {wish.kind.name} needs {wish.kind.protocol}: "
            "upgrade the agent first."
        )
        return Refusal(guard="agent", words=words)
    return None


def _would_wait(wish: DrillWish, scene: DrillScene) -> Refusal | None:
    """Whether the job could not go on by itself before the drill is over."""
    kind, job, generation = wish.kind, scene.job, scene.generation
    if wish.node is None or generation is None or kind.target is not Target.NODE:
        return None
    alone = len(generation.plan.nodes) == 1
    unseen_s = scene.situation.policy.unseen_s
    if kind.promise is PromiseKind.UNHARMED:
        if not alone or wish.duration_s + UNSEEN_MARGIN_S < unseen_s:
            return None
        words = (
            f"{wish.node} is the only node of job {job.name}: cut off for {wish.duration_s:.0f} s it is taken for "
            f"silent after {unseen_s:.0f} s, and a human is paged."
        )
        return _confirm(words)
    if not kind.takes_node:
        return None
    if alone:
        words = (
            f"{wish.node} is the only node of job {job.name}: nobody else could prove its ranks stopped, "
            "and recovery would wait for a human or for the node's return."
        )
        return _confirm(words)
    placed = choose_as_many(
        fleet=scene.situation.fleet,
        job=job.id,
        sizes=possible_sizes(most=job.node_count, least=job.min_nodes, multiple_of=job.multiple_of),
        ranks_per_node=job.ranks_per_node,
        keep=generation.plan.nodes,
        excluded=(wish.node,),
    )
    if isinstance(placed, NoCapacity):
        rest = join_names([name for name in generation.plan.nodes if name != wish.node])
        words = f"Without {wish.node} job {job.name} could not go on beside {rest}: {placed.reason}"
        return _confirm(words)
    return None


def _confirm(words: str) -> Refusal:
    return Refusal(guard="would_wait", words=f"{words} Ask again with allow_waiting to do it all the same.")
