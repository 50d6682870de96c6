"""The incident machine: `step` looks at one situation and says what is next. The engine calls it until nothing changes.

It is level-triggered: it reads conditions, not messages, so that a lost, late or repeated message costs time and
nothing else. Each call makes at most one transition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from recovery.domain.continuity import Verdict, VerdictKind
from recovery.domain.diagnosis import diagnose
from recovery.domain.generations import AssignmentPhase, GenerationView, ProofKind, ShareView
from recovery.domain.incident import TRANSITIONS, Cause, CauseKind, Incident, IncidentState
from recovery.domain.instructions import (
    Instruction,
    IssueReceipt,
    JobState,
    MarkContinuityBroken,
    MarkJob,
    PageOperator,
    PreparePlan,
    ReleaseNodes,
    RunPlan,
    StopGeneration,
)
from recovery.domain.lineage import NoCheckpoint, ParentChoice, choose_parent, reached_step
from recovery.domain.placement import NoCapacity, Placed, choose_nodes, lost_nodes, unseen_nodes
from recovery.domain.plan import RecoveryPlan
from recovery.domain.receipt import Receipt
from recovery.domain.rollout import endpoint_port, fingerprint_difference
from recovery.domain.situation import Command, Situation
from recovery.domain.timeline import Entry, EntryKind, join_names

S = IncidentState

_PROOF_WORDS = {
    ProofKind.CGROUP_EMPTY: "its control group is empty",
    ProofKind.PROC_SCAN_EMPTY: "no process carries its mark",
    ProofKind.NEVER_STARTED: "it never started there",
}


class ForbiddenTransition(Exception):
    """A handler asked for a move that TRANSITIONS does not hold: a bug in this file."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The next incident, what to do, and the sentences that tell it."""

    incident: Incident
    instructions: tuple[Instruction, ...] = ()
    entries: tuple[Entry, ...] = ()


def step(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Return what is next. An outcome that equals its incident and carries nothing means: wait."""
    if incident.ended:
        return Outcome(incident=incident)
    if situation.job.stop_wanted:
        return _cancel(incident, situation, now)
    if situation.command is not None:
        return _obey(incident, situation, situation.command, now)
    handler = _HANDLERS.get(incident.state)
    outcome = handler(incident, situation, now) if handler else Outcome(incident=incident)
    overdue = incident.deadline_at is not None and now >= incident.deadline_at
    if overdue and outcome == Outcome(incident=incident):
        return _overdue(incident, situation, now)
    return outcome


def escalate_poisoned(incident: Incident, situation: Situation, now: float, *, attempts: int) -> Outcome:
    """Ask a human: every worker that tried the next step died of it."""
    return _escalate(
        incident, situation, now, f"The step after {incident.state.value} killed its worker {attempts} times."
    )


# --- States -------------------------------------------------------------------------------------------------------


def _detected(incident: Incident, situation: Situation, now: float) -> Outcome:
    broken = situation.generation(incident.broken_generation)
    known, told = _diagnosed(incident, situation)
    if broken is None or known.cause is None:
        # Nothing is stopped, so the job is what it was before its incident was opened.
        trains = broken is not None and broken.stepping
        before = MarkJob(job=incident.job, state=JobState.RUNNING if trains else JobState.LAUNCHING)
        text = "No rank of the job died: nothing was done."
        return _move(incident, S.FALSE_ALARM, situation, now, text, instructions=(before,))
    moved = _move(
        known,
        S.STOPPING,
        situation,
        now,
        f"Stopping what is left of generation {broken.number} on {join_names(broken.plan.nodes)}.",
        instructions=_stop_all(situation, except_generation=None),
    )
    return replace(moved, entries=(*told, *moved.entries))


def _diagnosed(incident: Incident, situation: Situation) -> tuple[Incident, tuple[Entry, ...]]:
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


def _stopping(incident: Incident, situation: Situation, now: float) -> Outcome:
    keep = incident.plan.generation if incident.plan else None
    stops = _stop_all(situation, except_generation=keep)
    if stops:
        return Outcome(incident=incident, instructions=stops)
    must_be_gone = situation.generations if keep is None else situation.unfenced_before(keep)
    unfenced = [generation for generation in must_be_gone if not generation.fenced]
    if unfenced:
        return _plan_ahead(incident, situation, now)
    gone = [g for g in situation.generations if g.run_ordered and g.number != keep]
    last = max(gone, key=lambda generation: generation.number, default=None)
    proofs = last.proofs if last else ()
    known = replace(
        incident,
        fenced_at=max((proof.at for proof in proofs), default=now),
        reached_step=reached_step(situation.generations, before=keep),
    )
    if incident.plan is not None and _is_stale(incident.plan, known, situation):
        return _plan_afresh(incident, situation, now)
    known, second_look = _second_look(known, situation)
    told = tuple(
        Entry(
            kind=EntryKind.PROOF,
            at=proof.at,
            text=f"Generation {last.number if last else 0} is gone from {proof.node}: {_PROOF_WORDS[proof.kind]}.",
            data={"node": proof.node, "proof": proof.kind.value, "evidence": proof.evidence},
        )
        for proof in proofs
    )
    moved = _move(known, S.PLACING, situation, now, "Every old node is fenced; choosing and preparing nodes.")
    return replace(moved, entries=(*second_look, *told, *moved.entries))


def _second_look(incident: Incident, situation: Situation) -> tuple[Incident, tuple[Entry, ...]]:
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


def _is_stale(plan: RecoveryPlan, incident: Incident, situation: Situation) -> bool:
    """Whether the last words of the old ranks call for another checkpoint than the plan that was made before them."""
    generation = situation.generation(plan.generation)
    if generation is None or generation.run_ordered:
        return False
    best = _choose_parent(incident, situation)
    return isinstance(best, NoCheckpoint) or best.parent != plan.parent


def _plan_afresh(incident: Incident, situation: Situation, now: float) -> Outcome:
    number = incident.plan.generation if incident.plan else 0
    decision = Entry(
        kind=EntryKind.DECISION,
        at=now,
        text=f"Gave up the plan of generation {number}: the old ranks had saved or done more than was known.",
    )
    stops = _stop_all(situation, except_generation=None)
    # It never ran and no more than one is made ahead, so that it costs nothing of the budget of plans.
    spared = replace(incident, plan=None, plans_made=incident.plans_made - 1)
    return Outcome(incident=spared, instructions=stops, entries=(decision,))


def _plan_ahead(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Make and prepare the plan while the old ranks die; if none can be made yet, `placing` will say why."""
    if incident.plan is not None:
        return Outcome(incident=incident)
    made = _make_plan(incident, situation)
    return _adopt(incident, made, now) if isinstance(made, RecoveryPlan) else Outcome(incident=incident)


def _placing(incident: Incident, situation: Situation, now: float) -> Outcome:
    if incident.plan is None:
        return _plan_or_wait(incident, situation, now)
    generation = situation.generation(incident.plan.generation)
    if generation is None or generation.wanted is AssignmentPhase.STOP:
        return _replan(incident, situation, now, why="its orders are gone", costs_rung=False)
    if generation.run_ordered:
        return _move(incident, S.LAUNCHING, situation, now, f"Generation {generation.number} has been ordered to run.")
    if generation.failed_shares:
        return _preparation_failed(incident, situation, generation, now)
    lost = lost_nodes(incident.plan, situation.fleet)
    if lost:
        return _replan(incident, situation, now, why=f"contact with {join_names(lost)} was lost", costs_rung=False)
    if not generation.prepared or situation.unfenced_before(generation.number):
        return Outcome(incident=incident)
    difference = fingerprint_difference(generation.shares)
    if difference:
        return _escalate(incident, situation, now, f"The nodes do not agree on the job: {difference}.")
    port = endpoint_port(generation)
    if port is None:
        return Outcome(incident=incident)
    return _move(
        replace(incident, run_ordered_at=now),
        S.LAUNCHING,
        situation,
        now,
        f"Launching generation {generation.number} on {join_names(incident.plan.nodes)} "
        f"from {_parent_words(incident.plan)}.",
        instructions=(RunPlan(job=incident.job, generation=generation.number, master_port=port),),
    )


def _launching(incident: Incident, situation: Situation, now: float) -> Outcome:
    generation = _live_generation(incident, situation)
    if generation is None:
        return _replan(incident, situation, now, why="its orders are gone", costs_rung=False)
    if situation.verdict is not None and situation.verdict.kind is VerdictKind.BROKEN:
        # Before anything else: what this generation saved must not become the next one's parent.
        return _broken(incident, situation, generation, situation.verdict, now)
    failed = _failure(generation)
    if failed:
        return _relaunch(incident, situation, generation, now, why=failed)
    if not generation.stepping:
        return Outcome(incident=incident)
    first_step_at = max((rank.first_step_at or now for rank in generation.ranks), default=now)
    return _move(
        replace(incident, first_step_at=first_step_at),
        S.VERIFYING,
        situation,
        now,
        f"All {generation.plan.world_size} ranks of generation {generation.number} are training again; "
        "comparing them with the old curve.",
    )


def _verifying(incident: Incident, situation: Situation, now: float) -> Outcome:
    generation = _live_generation(incident, situation)
    if generation is None:
        return _replan(incident, situation, now, why="its orders are gone", costs_rung=False)
    verdict = situation.verdict
    if verdict is not None and verdict.kind is VerdictKind.BROKEN:
        return _broken(incident, situation, generation, verdict, now)
    failed = _failure(generation)
    if failed:
        return _relaunch(incident, situation, generation, now, why=failed)
    if verdict is None or not (verdict.caught_up or generation.ended_well):
        return Outcome(incident=incident)
    return _recovered(incident, situation, generation, verdict, now)


def _waiting(incident: Incident, situation: Situation, now: float) -> Outcome:
    made = _make_plan(incident, situation)
    same = NoCapacity if incident.state is S.WAITING_FOR_CAPACITY else NoCheckpoint
    if isinstance(made, same):
        return Outcome(incident=incident)
    return _move(incident, S.PLACING, situation, now, "What was missing is there now.")


def _escalated(incident: Incident, situation: Situation, now: float) -> Outcome:
    """A human was asked for want of a proof; if it comes after all, for example after a reboot, recovery goes on."""
    keep = incident.plan.generation if incident.plan else None
    if not incident.awaits_proof or any(not g.fenced for g in situation.generations if g.number != keep):
        return Outcome(incident=incident)
    waiting_no_more = replace(incident, awaits_proof=False, escalation="")
    return _move(waiting_no_more, S.STOPPING, situation, now, "The missing proofs have come: recovery goes on.")


_Handler = Callable[[Incident, Situation, float], Outcome]
_HANDLERS: dict[IncidentState, _Handler] = {
    S.DETECTED: _detected,
    S.STOPPING: _stopping,
    S.PLACING: _placing,
    S.LAUNCHING: _launching,
    S.VERIFYING: _verifying,
    S.WAITING_FOR_CAPACITY: _waiting,
    S.WAITING_FOR_CHECKPOINT: _waiting,
    S.ESCALATED: _escalated,
}


# --- Planning -----------------------------------------------------------------------------------------------------


def _make_plan(incident: Incident, situation: Situation) -> RecoveryPlan | NoCapacity | NoCheckpoint:
    parent = _choose_parent(incident, situation)
    if isinstance(parent, NoCheckpoint):
        return parent
    placed = _place(incident, situation)
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
        placement_reason=placed.reason,
    )


def _choose_parent(incident: Incident, situation: Situation) -> ParentChoice | NoCheckpoint:
    return choose_parent(
        generations=situation.generations,
        checkpoints=situation.checkpoints,
        reached_step=reached_step(situation.generations),
        before_step=incident.roll_back_before,
    )


def _place(incident: Incident, situation: Situation) -> Placed | NoCapacity:
    broken = situation.generation(incident.broken_generation)
    keep = broken.plan.nodes if broken else ()
    avoided = (*incident.excluded_nodes, *incident.avoided_nodes)
    placed: Placed | NoCapacity = NoCapacity(reason="", missing=0)
    # The last resort is to try a node again that failed: attempts are few, and a page says more than an hour's wait.
    for excluded in dict.fromkeys((avoided, incident.excluded_nodes, ())):
        placed = choose_nodes(
            fleet=situation.fleet,
            job=incident.job,
            node_count=situation.job.node_count,
            ranks_per_node=situation.job.ranks_per_node,
            keep=keep,
            excluded=excluded,
        )
        if isinstance(placed, Placed):
            break
    return placed


def _adopt(incident: Incident, plan: RecoveryPlan, now: float) -> Outcome:
    known = replace(incident, plan=plan, plans_made=incident.plans_made + 1)
    decision = Entry(
        kind=EntryKind.DECISION,
        at=now,
        text=f"Planned generation {plan.generation} from {_parent_words(plan)} ({plan.parent_reason}) "
        f"on {plan.placement_reason}",
        data={
            "plan": plan.plan_id,
            "nodes": list(plan.nodes),
            "parent": None if plan.parent is None else [plan.parent.generation, plan.parent.step],
        },
    )
    return Outcome(incident=known, instructions=(PreparePlan(plan=plan),), entries=(decision,))


def _plan_or_wait(incident: Incident, situation: Situation, now: float) -> Outcome:
    made = _make_plan(incident, situation)
    if isinstance(made, NoCapacity):
        return _move(incident, S.WAITING_FOR_CAPACITY, situation, now, f"Waiting for nodes: {made.reason}")
    if isinstance(made, NoCheckpoint):
        return _move(incident, S.WAITING_FOR_CHECKPOINT, situation, now, f"Waiting for a checkpoint: {made.reason}.")
    return _adopt(incident, made, now)


def _parent_words(plan: RecoveryPlan) -> str:
    return "the beginning" if plan.parent is None else str(plan.parent)


# --- What goes wrong on the way -----------------------------------------------------------------------------------


def _preparation_failed(incident: Incident, situation: Situation, generation: GenerationView, now: float) -> Outcome:
    share = generation.failed_shares[0]
    why = f"{share.node} could not prepare it: {share.detail or share.reason}"
    if share.reason in ("port_busy", "older_generation"):
        return _replan(incident, situation, now, why=why, costs_rung=False)
    excluded = replace(incident, excluded_nodes=(*incident.excluded_nodes, share.node))
    return _replan(excluded, situation, now, why=why, costs_rung=True)


def _failure(generation: GenerationView) -> str:
    """Why a running generation has failed; empty if it has not."""
    cause = diagnose(generation.ranks)
    if cause is not None:
        return cause.sentence.rstrip(".")
    if generation.failed_shares:
        return _share_words(generation.failed_shares[0])
    return ""


def _share_words(share: ShareView) -> str:
    return f"{share.node} could not run it: {share.detail or share.reason or 'its runner is gone'}"


def _relaunch(incident: Incident, situation: Situation, generation: GenerationView, now: float, *, why: str) -> Outcome:
    """A generation that was launched has failed; the next plan avoids the node on which it died."""
    busy = any(share.reason == "port_busy" for share in generation.failed_shares)
    culprits = () if busy else _culprits(generation)
    avoided = replace(incident, avoided_nodes=(*incident.avoided_nodes, *culprits))
    return _replan(avoided, situation, now, why=why, costs_rung=not busy)


def _culprits(generation: GenerationView) -> tuple[str, ...]:
    """The node of the first death; else those whose runner is gone; else those on which no rank started."""
    cause = diagnose(generation.ranks)
    if cause is not None and cause.node is not None:
        return (cause.node,)
    if generation.failed_shares:
        return tuple(share.node for share in generation.failed_shares)
    started = {rank.node for rank in generation.ranks}
    return tuple(node for node in generation.plan.nodes if started and node not in started)


def _replan(incident: Incident, situation: Situation, now: float, *, why: str, costs_rung: bool) -> Outcome:
    """Give the plan up, have its generation stopped, and go back to the first unmet condition."""
    number = incident.plan.generation if incident.plan else incident.broken_generation
    spent = replace(incident, attempt=incident.attempt + costs_rung)
    policy = situation.policy
    if spent.attempt >= policy.max_attempts or spent.plans_made >= policy.max_plans:
        no_more = f"{spent.attempt} attempts" if spent.attempt >= policy.max_attempts else f"{spent.plans_made} plans"
        return _escalate(spent, situation, now, f"Generation {number} failed ({why}); {no_more} are used up.")
    return _move(
        replace(spent, plan=None, run_ordered_at=None, first_step_at=None),
        S.STOPPING,
        situation,
        now,
        f"Generation {number} failed: {why}. Trying again.",
        instructions=_stop_all(situation, except_generation=None),
    )


def _broken(
    incident: Incident, situation: Situation, generation: GenerationView, verdict: Verdict, now: float
) -> Outcome:
    """Continuity is broken: never resume from that generation; roll back once, then page."""
    why = verdict.findings[0].rstrip(".") if verdict.findings else "the replay differs"
    broken = MarkContinuityBroken(job=incident.job, generation=generation.number)
    stops = _stop_all(situation, except_generation=None)
    parent = generation.plan.parent
    further = None
    if parent is not None and incident.rollbacks < situation.policy.max_rollbacks:
        further = choose_parent(
            generations=tuple(g for g in situation.generations if g.number != generation.number),
            checkpoints=situation.checkpoints,
            reached_step=reached_step(situation.generations),
            before_step=parent.step,
        )
    if parent is None or further is None or isinstance(further, NoCheckpoint):
        receipt = _receipt(incident, situation, generation, verdict, now, state=S.ESCALATED)
        outcome = _escalate(incident, situation, now, f"Continuity is broken: {why}. The job is stopped.")
        return replace(outcome, instructions=(broken, *stops, IssueReceipt(receipt=receipt), *outcome.instructions))
    rolled = replace(
        incident,
        plan=None,
        run_ordered_at=None,
        first_step_at=None,
        rollbacks=incident.rollbacks + 1,
        roll_back_before=parent.step,
    )
    return _move(
        rolled,
        S.STOPPING,
        situation,
        now,
        f"Continuity is broken: {why}. Rolling back once, to before step {parent.step}.",
        instructions=(broken, *stops),
    )


def _overdue(incident: Incident, situation: Situation, now: float) -> Outcome:
    generation = _live_generation(incident, situation)
    match incident.state:
        case S.LAUNCHING if generation is not None:
            return _launch_overdue(incident, situation, generation, now)
        case S.VERIFYING if generation is not None and situation.verdict and situation.verdict.proven:
            return _recovered(incident, situation, generation, situation.verdict, now)
        case S.STOPPING:
            nodes = list(dict.fromkeys(n for g in situation.generations if not g.fenced for n in g.unfenced_nodes))
            why = f"No proof that the old ranks are gone from {join_names(nodes)}."
            return _escalate(replace(incident, awaits_proof=True), situation, now, why)
        case S.ESCALATED:
            return Outcome(incident=incident)
    waited = now - incident.state_since
    return _escalate(incident, situation, now, f"Nothing moved for {waited:.0f} s while {incident.state.value}.")


def _launch_overdue(incident: Incident, situation: Situation, generation: GenerationView, now: float) -> Outcome:
    """A launch that cannot be seen has not failed: it gets more time once, and then a human looks."""
    unseen = unseen_nodes(generation.plan, situation.fleet)
    if not unseen:
        return _relaunch(incident, situation, generation, now, why="its ranks did not train in time")
    why = f"There is no contact with {join_names(unseen)}: whether generation {generation.number} trains is not known."
    first_deadline = situation.policy.deadline(S.LAUNCHING, now=incident.state_since)
    if first_deadline is None or (incident.deadline_at or now) > first_deadline + 1.0:
        return _escalate(incident, situation, now, why)
    waiting = replace(incident, deadline_at=situation.policy.deadline(S.STOPPING, now=now))
    decision = Entry(kind=EntryKind.DECISION, at=now, text=f"{why} Nothing is stopped; waiting for contact.")
    return Outcome(incident=waiting, entries=(decision,))


def _escalate(incident: Incident, situation: Situation, now: float, why: str) -> Outcome:
    moved = _move(
        replace(incident, escalation=why),
        S.ESCALATED,
        situation,
        now,
        f"This needs a human: {why}",
        instructions=(PageOperator(reason=why),),
    )
    page = Entry(kind=EntryKind.PAGE, at=now, text=f"Paged the operators: {why}")
    return replace(moved, entries=(*moved.entries, page))


# --- Ends ---------------------------------------------------------------------------------------------------------


def _recovered(
    incident: Incident, situation: Situation, generation: GenerationView, verdict: Verdict, now: float
) -> Outcome:
    receipt = _receipt(incident, situation, generation, verdict, now, state=S.RECOVERED)
    state = JobState.SUCCEEDED if generation.ended_well else JobState.RUNNING
    story = Entry(
        kind=EntryKind.RECEIPT,
        at=now,
        text=f"Recovered as generation {generation.number}: continuity {verdict.kind.value}, "
        f"{verdict.steps_compared} steps compared, {verdict.steps_lost} steps lost and done again.",
        data={"verdict": verdict.kind.value, "findings": list(verdict.findings)},
    )
    moved = _move(
        incident,
        S.RECOVERED,
        situation,
        now,
        f"The job trains on {join_names(generation.plan.nodes)}, proven {verdict.kind.value}."
        if verdict.proven
        else f"The job trains on {join_names(generation.plan.nodes)}; continuity could not be proven.",
        instructions=(
            IssueReceipt(receipt=receipt),
            MarkJob(job=incident.job, state=state),
            *(_stop_all(situation, except_generation=None) if generation.ended_well else ()),
            ReleaseNodes(job=incident.job, keep=generation.plan.nodes),
        ),
    )
    return replace(moved, entries=(story, *moved.entries))


def _receipt(
    incident: Incident,
    situation: Situation,
    generation: GenerationView,
    verdict: Verdict,
    now: float,
    *,
    state: IncidentState,
) -> Receipt:
    broken = situation.generation(incident.broken_generation)

    def since_fault(at: float | None) -> float | None:
        return None if at is None else round(at - incident.fault_at, 4)

    return Receipt(
        incident=incident.id,
        job=incident.job,
        state=state.value,
        verdict=verdict,
        cause=incident.cause,
        drill=incident.drill,
        broken_generation=incident.broken_generation,
        generation=generation.number,
        old_nodes=broken.plan.nodes if broken else (),
        new_nodes=generation.plan.nodes,
        parent=generation.plan.parent,
        reached_step=incident.reached_step,
        detect_s=round(incident.opened_at - incident.fault_at, 4),
        stop_s=since_fault(incident.fenced_at),
        launch_s=since_fault(incident.run_ordered_at),
        first_step_s=since_fault(incident.first_step_at),
        caught_up_s=since_fault(situation.caught_up_at),
        total_s=round(now - incident.fault_at, 4),
        attempts=incident.attempt + 1,
        fences=tuple(p for g in situation.generations if g.number < generation.number for p in g.proofs),
        issued_at=now,
    )


def _cancel(incident: Incident, situation: Situation, now: float) -> Outcome:
    """The job's owner wants it stopped: that ends the incident as soon as nothing runs any more."""
    incident, told = _diagnosed(incident, situation)
    stops = _stop_all(situation, except_generation=None)
    if stops or told or situation.job.state is not JobState.STOPPING:
        mark = MarkJob(job=incident.job, state=JobState.STOPPING)
        return Outcome(incident=incident, instructions=(*stops, mark), entries=told)
    if all(generation.fenced for generation in situation.generations):
        return _move(
            incident,
            S.CANCELLED,
            situation,
            now,
            "The job was stopped on request; nothing is relaunched.",
            instructions=(MarkJob(job=incident.job, state=JobState.STOPPED), ReleaseNodes(job=incident.job)),
        )
    if incident.deadline_at is not None and now >= incident.deadline_at and incident.state is not S.ESCALATED:
        return _overdue(incident, situation, now)
    return Outcome(incident=incident)


def _obey(incident: Incident, situation: Situation, command: Command, now: float) -> Outcome:
    """Do what an operator asked. What broke is told first, where the incident was too young to have told it."""
    known, told = _diagnosed(incident, situation)
    outcome = _obeyed(known, situation, command, now)
    return replace(outcome, entries=(*told, *outcome.entries))


def _obeyed(incident: Incident, situation: Situation, command: Command, now: float) -> Outcome:
    match command:
        case Command.PAUSE if incident.state not in (S.PAUSED, S.ESCALATED):
            return _move(incident, S.PAUSED, situation, now, "Paused by an operator; nothing more is ordered.")
        case Command.RESUME if incident.state is S.PAUSED:
            return _move(incident, S.STOPPING, situation, now, "Resumed by an operator.")
        case Command.RETRY if incident.state in (S.PAUSED, S.ESCALATED):
            fresh = replace(
                incident, plan=None, attempt=0, plans_made=0, run_ordered_at=None, first_step_at=None, escalation="",
                excluded_nodes=(), avoided_nodes=(),
            )  # fmt: skip
            return _move(
                fresh,
                S.STOPPING,
                situation,
                now,
                "Tried again by an operator.",
                instructions=(*_taint(incident, situation), *_stop_all(situation, except_generation=None)),
            )
        case Command.CLOSE:
            return _close(incident, situation, now)
    return Outcome(incident=incident)


def _close(incident: Incident, situation: Situation, now: float) -> Outcome:
    generation = _live_generation(incident, situation)
    taint = _taint(incident, situation)
    trains = generation is not None and generation.stepping and not _failure(generation) and not taint
    if trains and generation is not None:
        ends: tuple[Instruction, ...] = (
            MarkJob(job=incident.job, state=JobState.RUNNING),
            ReleaseNodes(job=incident.job, keep=generation.plan.nodes),
        )
    else:
        ends = (
            *taint,
            *_stop_all(situation, except_generation=None),
            MarkJob(job=incident.job, state=JobState.STOPPING, reason="its incident was closed by an operator"),
        )
    return _move(incident, S.CLOSED_BY_OPERATOR, situation, now, "Closed by an operator.", instructions=ends)


def _taint(incident: Incident, situation: Situation) -> tuple[Instruction, ...]:
    """Mark a generation that is proven broken, though an operator's word came before the machine's."""
    verdict = situation.verdict
    if incident.plan is None or verdict is None or verdict.kind is not VerdictKind.BROKEN:
        return ()
    return (MarkContinuityBroken(job=incident.job, generation=incident.plan.generation),)


# --- Common -------------------------------------------------------------------------------------------------------


def _live_generation(incident: Incident, situation: Situation) -> GenerationView | None:
    """The plan's generation, if it exists and is not being stopped."""
    generation = situation.generation(incident.plan.generation) if incident.plan else None
    return None if generation is None or generation.wanted is AssignmentPhase.STOP else generation


def _stop_all(situation: Situation, *, except_generation: int | None) -> tuple[Instruction, ...]:
    return tuple(
        StopGeneration(job=generation.plan.job, generation=generation.number)
        for generation in situation.generations
        if generation.wanted is not AssignmentPhase.STOP and generation.number != except_generation
    )


def _move(
    incident: Incident,
    state: IncidentState,
    situation: Situation,
    now: float,
    text: str,
    *,
    instructions: tuple[Instruction, ...] = (),
) -> Outcome:
    if state not in TRANSITIONS[incident.state]:
        raise ForbiddenTransition(f"{incident.id}: {incident.state.value} -> {state.value} is not in TRANSITIONS")
    moved = replace(incident, state=state, state_since=now, deadline_at=situation.policy.deadline(state, now=now))
    entry = Entry(kind=EntryKind.STATE, at=now, text=text, data={"from": incident.state.value, "to": state.value})
    return Outcome(incident=moved, instructions=instructions, entries=(entry,))
