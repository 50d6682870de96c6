"""Makes the plan of the next generation: its checkpoint, its nodes, and the sentence that says why."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import (
    PreparePlan,
)
from recovery.domain.lineage import NoCheckpoint, ParentChoice, choose_parent, reached_step
from recovery.domain.moves import Outcome, move, stop_all
from recovery.domain.placement import NoCapacity, Placed, choose_as_many, possible_sizes
from recovery.domain.plan import RecoveryPlan
from recovery.domain.silence import Contact
from recovery.domain.situation import Situation
from recovery.domain.snapshots import newest_whole
from recovery.domain.timeline import Entry, EntryKind, join_names

S = IncidentState


def make_plan(incident: Incident, situation: Situation) -> RecoveryPlan | NoCapacity | NoCheckpoint:
    """The plan of the next generation, or what is missing for it."""
    placed = _place(incident, situation)
    parent = best_parent(incident, situation, nodes=placed.nodes if isinstance(placed, Placed) else ())
    if isinstance(parent, NoCheckpoint):
        return parent
    if isinstance(placed, NoCapacity):
        return placed
    master = situation.fleet.node(placed.nodes[0])
    return RecoveryPlan(
        job=incident.job,
        generation=situation.fresh.generation,
        plan_id=situation.fresh.plan_id,
        run_id=situation.fresh.run_id,
        nodes=placed.nodes,
        ranks_per_node=situation.job.ranks_per_node,
        master_address=master.address if master else "",
        parent=parent.parent,
        parent_reason=parent.reason,
        parent_in_memory=parent.in_memory,
        placement_reason=placed.reason,
        lease=situation.job.lease,
        save_every=situation.job.save_every,
    )


def best_parent(
    incident: Incident, situation: Situation, *, nodes: Collection[str] = ()
) -> ParentChoice | NoCheckpoint:
    """The checkpoint that the incident's next generation resumes from on these nodes."""
    return parent_now(situation, before_step=incident.roll_back_before, nodes=nodes)


def parent_now(
    situation: Situation, *, before_step: int | None = None, without: int | None = None, nodes: Collection[str] = ()
) -> ParentChoice | NoCheckpoint:
    """The checkpoint to resume from as things stand; `without` leaves out a generation that is being given up.

    Without `nodes` it is one on disk; with them it may be a snapshot of which they hold every part in memory.
    """
    snapshot = newest_whole(situation.snapshots, nodes=nodes, fleet=situation.fleet)
    choice = choose_parent(
        generations=tuple(g for g in situation.generations if g.number != without),
        checkpoints=tuple(dict.fromkeys((*situation.checkpoints, *([] if snapshot is None else [snapshot])))),
        trust=situation.trust,
        reached_step=reached_step(situation.generations),
        before_step=before_step,
    )
    if isinstance(choice, ParentChoice) and snapshot is not None and choice.parent == snapshot:
        return replace(choice, in_memory=True, reason=f"{choice.reason}, held in the memory of its nodes")
    return choice


def _place(incident: Incident, situation: Situation) -> Placed | NoCapacity:
    broken = situation.generation(incident.broken_generation)
    keep = broken.plan.nodes if broken else ()
    unknown = tuple(name for name in keep if _is_unobserved(name, situation))
    if unknown:  # it may be back in a moment: no survivor loses its rank, and no job shrinks, for what is not known
        return NoCapacity(reason=f"nothing is known of {join_names(unknown)} right now.", missing=len(unknown))
    avoided = (*incident.excluded_nodes, *incident.avoided_nodes)
    job = situation.job
    sizes = possible_sizes(most=job.node_count, least=job.min_nodes, multiple_of=job.multiple_of)
    placed: Placed | NoCapacity = NoCapacity(reason="", missing=0)
    # The last resort is to try a node again that failed: attempts are few, and a page says more than an hour's wait.
    for excluded in dict.fromkeys((avoided, incident.excluded_nodes, ())):
        placed = choose_as_many(
            fleet=situation.fleet,
            job=incident.job,
            sizes=sizes,
            ranks_per_node=situation.job.ranks_per_node,
            keep=keep,
            excluded=excluded,
        )
        if isinstance(placed, Placed):
            break
    return placed


def _is_unobserved(name: str, situation: Situation) -> bool:
    node = situation.fleet.node(name)
    return node is not None and node.contact is Contact.UNOBSERVED


def _adopt(incident: Incident, plan: RecoveryPlan, now: float) -> Outcome:
    known = replace(incident, plan=plan, plans_made=incident.plans_made + 1)
    decision = Entry(
        kind=EntryKind.DECISION,
        at=now,
        text=f"Planned generation {plan.generation} from {parent_words(plan)} ({plan.parent_reason}) "
        f"on {plan.placement_reason}",
        data={
            "plan": plan.plan_id,
            "nodes": list(plan.nodes),
            "parent": None if plan.parent is None else [plan.parent.generation, plan.parent.step],
        },
    )
    return Outcome(incident=known, instructions=(PreparePlan(plan=plan),), entries=(decision,))


def plan_or_wait(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Take a plan, or wait for the nodes or the checkpoint that it needs."""
    made = make_plan(incident, situation)
    if isinstance(made, NoCapacity):
        return move(incident, S.WAITING_FOR_CAPACITY, situation, now, f"Waiting for nodes: {made.reason}")
    if isinstance(made, NoCheckpoint):
        return move(incident, S.WAITING_FOR_CHECKPOINT, situation, now, f"Waiting for a checkpoint: {made.reason}.")
    return _adopt(incident, made, now)


def parent_words(plan: RecoveryPlan) -> str:
    """The checkpoint of a plan, in words."""
    if plan.parent is None:
        return "the beginning"
    return f"{plan.parent}, in memory" if plan.parent_in_memory else str(plan.parent)


def is_stale(plan: RecoveryPlan, incident: Incident, situation: Situation) -> bool:
    """Whether the last words of the old ranks call for another checkpoint than the plan that was made before them."""
    generation = situation.generation(plan.generation)
    if generation is None or generation.run_ordered:
        return False
    best = best_parent(incident, situation, nodes=plan.nodes)
    return isinstance(best, NoCheckpoint) or best.parent != plan.parent


def plan_afresh(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Give up a plan that the old ranks' last words have overtaken."""
    number = incident.plan.generation if incident.plan else 0
    decision = Entry(
        kind=EntryKind.DECISION,
        at=now,
        text=f"Gave up the plan of generation {number}: the old ranks had saved or done more than was known.",
    )
    stops = stop_all(situation, except_generation=None)
    # It never ran and no more than one is made ahead, so that it costs nothing of the budget of plans.
    spared = replace(incident, plan=None, plans_made=incident.plans_made - 1)
    return Outcome(incident=spared, instructions=stops, entries=(decision,))


def plan_ahead(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Make and prepare the plan while the old ranks die; if none can be made yet, `placing` will say why."""
    if incident.plan is not None:
        return Outcome(incident=incident)
    made = make_plan(incident, situation)
    return _adopt(incident, made, now) if isinstance(made, RecoveryPlan) else Outcome(incident=incident)
