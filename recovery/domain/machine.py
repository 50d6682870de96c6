"""The incident machine: `step` looks at one situation and says what is next. The engine calls it until nothing changes.

It is level-triggered: it reads conditions, not messages, so that a lost, late or repeated message costs time and
nothing else. Each call makes at most one transition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recovery.domain.absences import missing_nodes, peers_step_on
from recovery.domain.commands import cancel, obey
from recovery.domain.continuity import VerdictKind
from recovery.domain.endings import recovered
from recovery.domain.failures import diagnosed, failure_of, first_hand_cause, second_look, told_exits
from recovery.domain.fences import lease_proofs, nodes_with_last_words, proof_entry, proofs_of
from recovery.domain.generations import AssignmentPhase, GenerationView
from recovery.domain.incident import CauseKind, Incident, IncidentState
from recovery.domain.instructions import (
    JobState,
    MarkJob,
    RunPlan,
)
from recovery.domain.lineage import NoCheckpoint, reached_step
from recovery.domain.moves import Outcome, escalate, live_generation, move, stop_all, wait_for_fence
from recovery.domain.placement import NoCapacity, lost_nodes, unseen_nodes
from recovery.domain.planning import is_stale, make_plan, parent_words, plan_afresh, plan_ahead, plan_or_wait
from recovery.domain.rollout import endpoint_port, fingerprint_difference
from recovery.domain.setbacks import (
    continuity_broken,
    loss_lost,
    node_went_missing,
    past_deadline,
    preparation_failed,
    relaunch,
    replan,
)
from recovery.domain.situation import Situation
from recovery.domain.timeline import Entry, EntryKind, join_names
from recovery.domain.witnesses import stall_limit_s

S = IncidentState


def step(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Return what is next. An outcome that equals its incident and carries nothing means: wait."""
    if incident.ended:
        return Outcome(incident=incident)
    if situation.job.stop_wanted or situation.job.state is JobState.STOPPING:
        return cancel(incident, situation, now)
    if situation.command is not None:
        return obey(incident, situation, situation.command, now)
    handler = _HANDLERS.get(incident.state)
    outcome = handler(incident, situation, now) if handler else Outcome(incident=incident)
    overdue = incident.deadline_at is not None and now >= incident.deadline_at
    if overdue and outcome == Outcome(incident=incident):
        return past_deadline(incident, situation, now)
    return outcome


def _detected(incident: Incident, situation: Situation, now: float) -> Outcome:
    broken = situation.generation(incident.broken_generation)
    known, told = diagnosed(incident, situation, now)
    if broken is not None and known.cause is not None and known.cause.kind is CauseKind.NODE_SILENT:
        waiting = wait_for_fence(known, situation, now, known.cause.sentence)
        return replace(waiting, entries=(*told, *waiting.entries))
    if broken is None or known.cause is None:
        # Nothing is stopped, so the job is what it was before its incident was opened.
        trains = broken is not None and broken.stepping
        before = MarkJob(job=incident.job, state=JobState.RUNNING if trains else JobState.LAUNCHING)
        text = "No rank of the job died: nothing was done."
        return move(incident, S.FALSE_ALARM, situation, now, text, instructions=(before,))
    if known.cause.kind is CauseKind.LOSS_NOT_FINITE:
        lost = loss_lost(known, situation, broken, now)
        return replace(lost, entries=(*told, *lost.entries))
    moved = move(
        known,
        S.STOPPING,
        situation,
        now,
        f"Stopping what is left of generation {broken.number} on {join_names(broken.plan.nodes)}.",
        instructions=stop_all(situation, except_generation=None),
    )
    return replace(moved, entries=(*told, *moved.entries))


def _stopping(incident: Incident, situation: Situation, now: float) -> Outcome:
    keep = incident.plan.generation if incident.plan else None
    stops = stop_all(situation, except_generation=keep)
    if stops:
        return Outcome(incident=incident, instructions=stops)
    must_be_gone = situation.generations if keep is None else situation.unfenced_before(keep)
    unfenced = [generation for generation in must_be_gone if not generation.fenced]
    proofs = lease_proofs(situation, now, except_generation=keep)
    if proofs:
        return Outcome(incident=incident, instructions=proofs)
    if unfenced or nodes_with_last_words(situation, now, except_generation=keep):
        return plan_ahead(incident, situation, now)
    gone = [g for g in situation.generations if g.run_ordered and g.number != keep]
    last = max(gone, key=lambda generation: generation.number, default=None)
    fences = last.proofs if last else ()
    known = replace(
        incident,
        fenced_at=max((proof.at for proof in fences), default=now),
        reached_step=reached_step(situation.generations, before=keep),
    )
    if incident.plan is not None and is_stale(incident.plan, known, situation):
        return plan_afresh(incident, situation, now)
    known, corrected = second_look(known, situation, now)
    told = tuple(proof_entry(last.number if last else 0, proof) for proof in sorted(fences, key=lambda proof: proof.at))
    moved = move(known, S.PLACING, situation, now, "Every old node is fenced; choosing and preparing nodes.")
    return replace(moved, entries=(*corrected, *told, *moved.entries))


def _placing(incident: Incident, situation: Situation, now: float) -> Outcome:
    if incident.plan is None:
        return plan_or_wait(incident, situation, now)
    generation = situation.generation(incident.plan.generation)
    if generation is None or generation.wanted is AssignmentPhase.STOP:
        return replan(incident, situation, now, why="its orders are gone", costs_rung=False)
    if generation.run_ordered:
        return move(incident, S.LAUNCHING, situation, now, f"Generation {generation.number} has been ordered to run.")
    if generation.failed_shares:
        return preparation_failed(incident, situation, generation, now)
    lost = lost_nodes(incident.plan, situation.fleet)
    if lost:
        return replan(incident, situation, now, why=f"contact with {join_names(lost)} was lost", costs_rung=False)
    if unseen_nodes(incident.plan, situation.fleet):
        return Outcome(incident=incident)
    if not generation.prepared or situation.unfenced_before(generation.number):
        return Outcome(incident=incident)
    if is_stale(incident.plan, incident, situation):
        # A node that came back after its fence has told of more.
        return plan_afresh(incident, situation, now)
    difference = fingerprint_difference(generation.shares)
    if difference:
        return escalate(incident, situation, now, f"The nodes do not agree on the job: {difference}.")
    port = endpoint_port(generation)
    if port is None:
        return Outcome(incident=incident)
    return move(
        replace(incident, run_ordered_at=now),
        S.LAUNCHING,
        situation,
        now,
        f"Launching generation {generation.number} on {join_names(incident.plan.nodes)} "
        f"from {parent_words(incident.plan)}.",
        instructions=(
            RunPlan(
                job=incident.job,
                generation=generation.number,
                master_port=port,
                fences=proofs_of(
                    older
                    for older in situation.generations
                    if incident.broken_generation <= older.number < generation.number
                ),
            ),
        ),
    )


def _launching(incident: Incident, situation: Situation, now: float) -> Outcome:
    generation = live_generation(incident, situation)
    if generation is None:
        return replan(incident, situation, now, why="its orders are gone", costs_rung=False)
    if situation.verdict is not None and situation.verdict.kind is VerdictKind.BROKEN:
        # Before anything else: what this generation saved must not become the next one's parent.
        return continuity_broken(incident, situation, generation, situation.verdict, now)
    if generation.loss_lost:
        return loss_lost(incident, situation, generation, now)
    failed = failure_of(generation)
    missing = missing_nodes(generation, situation, now)
    if missing:
        return node_went_missing(incident, situation, missing, now)
    if failed:
        return relaunch(incident, situation, generation, now, why=failed)
    if not generation.stepping:
        return Outcome(incident=incident)
    first_step_at = max((rank.first_step_at or now for rank in generation.ranks), default=now)
    return move(
        replace(incident, first_step_at=first_step_at),
        S.VERIFYING,
        situation,
        now,
        f"All {generation.plan.world_size} ranks of generation {generation.number} are training again; "
        "comparing them with the old curve.",
    )


def _verifying(incident: Incident, situation: Situation, now: float) -> Outcome:
    generation = live_generation(incident, situation)
    if generation is None:
        return replan(incident, situation, now, why="its orders are gone", costs_rung=False)
    verdict = situation.verdict
    if verdict is not None and verdict.kind is VerdictKind.BROKEN:
        return continuity_broken(incident, situation, generation, verdict, now)
    if generation.loss_lost:
        return loss_lost(incident, situation, generation, now)
    failed = failure_of(generation)
    missing = missing_nodes(generation, situation, now)
    if missing:
        return node_went_missing(incident, situation, missing, now)
    if failed:
        return relaunch(incident, situation, generation, now, why=failed)
    if verdict is None or not (verdict.caught_up or generation.ended_well):
        return Outcome(incident=incident)
    return recovered(incident, situation, generation, verdict, now)


def _waiting(incident: Incident, situation: Situation, now: float) -> Outcome:
    made = make_plan(incident, situation)
    same = NoCapacity if incident.state is S.WAITING_FOR_CAPACITY else NoCheckpoint
    if isinstance(made, same):
        return Outcome(incident=incident)
    return move(incident, S.PLACING, situation, now, "What was missing is there now.")


def _waiting_for_fence(incident: Incident, situation: Situation, now: float) -> Outcome:
    """A proof may still come: by the node's return, its reboot, a provider, an attestation, or a lease that ends."""
    keep = incident.plan.generation if incident.plan else None
    if not incident.stop_ordered:
        return _perhaps_healthy(incident, situation, now)
    proofs = lease_proofs(situation, now, except_generation=keep)
    if proofs:
        return Outcome(incident=incident, instructions=proofs)
    if any(not generation.fenced for generation in situation.generations if generation.number != keep):
        return Outcome(incident=incident)
    fenced = replace(incident, escalation="")
    return move(fenced, S.STOPPING, situation, now, "The missing proofs have come: recovery goes on.")


def _perhaps_healthy(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Nothing of the generation can be seen, and it may train: it is not stopped before something is known."""
    broken = situation.generation(incident.broken_generation)
    if broken is None:
        return Outcome(incident=incident)
    stops = stop_all(situation, except_generation=None)
    proofs = lease_proofs(situation, now)
    if proofs:
        return Outcome(incident=incident, instructions=proofs)
    cause = first_hand_cause(broken, situation, now, told=told_exits(broken))
    known = replace(incident, escalation="")
    if cause is not None:
        fault = Entry(kind=EntryKind.FAULT, at=now, text=cause.sentence, data={"node": cause.node})
        text = f"Now it is known what happened. Stopping what is left of generation {broken.number}."
        moved = move(replace(known, cause=cause), S.STOPPING, situation, now, text, instructions=stops)
        return replace(moved, entries=(fault, *moved.entries))
    if broken.fenced:
        text = f"Generation {broken.number} is proven gone: recovery goes on."
        return move(known, S.STOPPING, situation, now, text, instructions=stops)
    if not _trained_on(incident, broken, situation, now):
        return Outcome(incident=incident)
    before = MarkJob(job=incident.job, state=JobState.RUNNING if broken.stepping else JobState.LAUNCHING)
    unseen = unseen_nodes(broken.plan, situation.fleet)
    seen = tuple(name for name in broken.plan.nodes if name not in unseen)
    text = f"{join_names(seen)} can be seen again, and the job has trained on: nothing was stopped."
    return move(known, S.FALSE_ALARM, situation, now, text, instructions=(before,))


def _trained_on(incident: Incident, broken: GenerationView, situation: Situation, now: float) -> bool:
    """Whether a generation that could not be seen goes on; what it did before it died in silence is no sign of that."""
    if broken.ended_well:
        return True
    went_on = any(
        (rank.progress_at or 0.0) > incident.fault_at
        and now - (rank.progress_at or 0.0) <= stall_limit_s(rank, limits=broken.lease)
        for rank in broken.ranks
    )
    return went_on and (
        not unseen_nodes(broken.plan, situation.fleet)
        # In a synchronous job the steps of one rank tell of all.
        or peers_step_on(broken, situation.fleet, synchronous=situation.job.synchronous, now=now)
    )


_Handler = Callable[[Incident, Situation, float], Outcome]
_HANDLERS: dict[IncidentState, _Handler] = {
    S.DETECTED: _detected,
    S.STOPPING: _stopping,
    S.PLACING: _placing,
    S.LAUNCHING: _launching,
    S.VERIFYING: _verifying,
    S.WAITING_FOR_CAPACITY: _waiting,
    S.WAITING_FOR_CHECKPOINT: _waiting,
    S.WAITING_FOR_FENCE: _waiting_for_fence,
}
