"""What the machine does when something goes wrong on the way: plan again, roll back, or ask a human."""

from __future__ import annotations

from dataclasses import replace

from recovery.domain.absences import MissingNode, hold_up_launch
from recovery.domain.continuity import Verdict
from recovery.domain.endings import make_receipt, recovered
from recovery.domain.failures import culprits
from recovery.domain.fences import LEASE_SLACK_S, LEASE_WAIT_AT_MOST_S, next_lease_end
from recovery.domain.generations import GenerationView
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import (
    IssueReceipt,
    MarkContinuityBroken,
    PageOperator,
)
from recovery.domain.lineage import NoCheckpoint
from recovery.domain.moves import Outcome, escalate, live_generation, move, stop_all, wait_for_fence
from recovery.domain.placement import unseen_nodes
from recovery.domain.planning import parent_now
from recovery.domain.situation import Situation
from recovery.domain.timeline import Entry, EntryKind, join_names
from recovery.domain.trust import came_again
from recovery.domain.witnesses import setting_up_until

S = IncidentState


def preparation_failed(incident: Incident, situation: Situation, generation: GenerationView, now: float) -> Outcome:
    """A node could not prepare: plan again without it. A busy port or an old number costs no attempt."""
    share = generation.failed_shares[0]
    why = f"{share.node} could not prepare it: {share.detail or share.reason}"
    if share.reason in ("port_busy", "older_generation"):
        return replan(incident, situation, now, why=why, costs_rung=False)
    excluded = replace(incident, excluded_nodes=(*incident.excluded_nodes, share.node))
    return replan(excluded, situation, now, why=why, costs_rung=True)


def relaunch(incident: Incident, situation: Situation, generation: GenerationView, now: float, *, why: str) -> Outcome:
    """A generation that was launched has failed; the next plan avoids the node on which it died."""
    busy = any(share.reason == "port_busy" for share in generation.failed_shares)
    nodes = () if busy else culprits(generation)
    avoided = replace(incident, avoided_nodes=(*incident.avoided_nodes, *nodes))
    return replan(avoided, situation, now, why=why, costs_rung=not busy)


def node_went_missing(
    incident: Incident, situation: Situation, missing: tuple[MissingNode, ...], now: float
) -> Outcome:
    """A node of the new generation is gone too: that is no fault of the job, so that it costs no attempt."""
    avoided = (*incident.avoided_nodes, *(node.name for node in missing))
    why = "; ".join(node.sentence for node in missing)
    return replan(replace(incident, avoided_nodes=avoided), situation, now, why=why, costs_rung=False)


def replan(incident: Incident, situation: Situation, now: float, *, why: str, costs_rung: bool) -> Outcome:
    """Give the plan up, have its generation stopped, and go back to the first unmet condition."""
    number = incident.plan.generation if incident.plan else incident.broken_generation
    spent = replace(incident, attempt=incident.attempt + costs_rung)
    policy = situation.policy
    if spent.attempt >= policy.max_attempts or spent.plans_made >= policy.max_plans:
        no_more = f"{spent.attempt} attempts" if spent.attempt >= policy.max_attempts else f"{spent.plans_made} plans"
        return escalate(spent, situation, now, f"Generation {number} failed ({why}); {no_more} are used up.")
    return move(
        replace(spent, plan=None, run_ordered_at=None, first_step_at=None),
        S.STOPPING,
        situation,
        now,
        f"Generation {number} failed: {why}. Trying again.",
        instructions=stop_all(situation, except_generation=None),
    )


def continuity_broken(
    incident: Incident, situation: Situation, generation: GenerationView, verdict: Verdict, now: float
) -> Outcome:
    """Continuity is broken: never resume from that generation; roll back once, then page."""
    why = verdict.findings[0].rstrip(".") if verdict.findings else "the replay differs"
    broken = MarkContinuityBroken(job=incident.job, generation=generation.number)
    stops = stop_all(situation, except_generation=None)
    parent = generation.plan.parent
    further = None
    if parent is not None and incident.rollbacks < situation.policy.max_rollbacks:
        further = parent_now(situation, before_step=parent.step, without=generation.number)
    if parent is None or further is None or isinstance(further, NoCheckpoint):
        receipt = make_receipt(incident, situation, generation, verdict, now, state=S.ESCALATED)
        outcome = escalate(incident, situation, now, f"Continuity is broken: {why}. The job is stopped.")
        return replace(outcome, instructions=(broken, *stops, IssueReceipt(receipt=receipt), *outcome.instructions))
    rolled = replace(
        incident,
        plan=None,
        run_ordered_at=None,
        first_step_at=None,
        rollbacks=incident.rollbacks + 1,
        roll_back_before=parent.step,
    )
    return move(
        rolled,
        S.STOPPING,
        situation,
        now,
        f"Continuity is broken: {why}. Rolling back once, to before step {parent.step}.",
        instructions=(broken, *stops),
    )


def loss_lost(incident: Incident, situation: Situation, generation: GenerationView, now: float) -> Outcome:
    """The loss of a generation is not finite any more: roll back once, to what is known to be good, then page."""
    policy = situation.policy
    what = f"the loss of generation {generation.number} is not finite from step {generation.nonfinite_step} on"
    stops = stop_all(situation, except_generation=None)
    again = came_again(generation, situation.generations, sane_steps=policy.sane_steps)
    if again or incident.rollbacks >= policy.max_rollbacks:
        why = (
            f"The loss was lost again: {what}; {again or 'this recovery has rolled back already'}. The job is stopped."
        )
        outcome = escalate(incident, situation, now, why)
        verdict = situation.verdict
        receipt = make_receipt(incident, situation, generation, verdict, now, state=S.ESCALATED) if verdict else None
        issued = () if receipt is None else (IssueReceipt(receipt=receipt),)
        return replace(outcome, instructions=(*stops, *issued, *outcome.instructions))
    rolled = replace(incident, plan=None, run_ordered_at=None, first_step_at=None, rollbacks=incident.rollbacks + 1)
    text = f"Training went wrong: {what}. Rolling back once, to the newest checkpoint that may be trusted."
    return move(rolled, S.STOPPING, situation, now, text, instructions=stops)


def past_deadline(incident: Incident, situation: Situation, now: float) -> Outcome:
    """A state that took too long: relaunch, end by what is proven, or ask a human."""
    generation = live_generation(incident, situation)
    match incident.state:
        case S.LAUNCHING if generation is not None:
            return _launch_overdue(incident, situation, generation, now)
        case S.VERIFYING if generation is not None and situation.verdict and situation.verdict.proven:
            return recovered(incident, situation, generation, situation.verdict, now)
        case S.STOPPING:
            return _stop_overdue(incident, situation, now)
        case S.WAITING_FOR_FENCE:
            return _still_no_fence(incident, situation, now)
        case S.ESCALATED:
            return Outcome(incident=incident)
    waited = now - incident.state_since
    return escalate(incident, situation, now, f"Nothing moved for {waited:.0f} s while {incident.state.value}.")


def _stop_overdue(incident: Incident, situation: Situation, now: float) -> Outcome:
    """No proof in time. A lease that still runs is waited for; else a human has to know that nothing moves."""
    keep = incident.plan.generation if incident.plan else None
    lease_end = next_lease_end(situation, except_generation=keep)
    if lease_end is not None and now < lease_end <= now + LEASE_WAIT_AT_MOST_S:
        return Outcome(incident=replace(incident, deadline_at=lease_end + LEASE_SLACK_S))
    nodes = [n for g in situation.generations if not g.fenced and g.number != keep for n in g.unfenced_nodes]
    why = f"No proof that the old ranks are gone from {join_names(list(dict.fromkeys(nodes)))}."
    return wait_for_fence(incident, situation, now, why)


def _still_no_fence(incident: Incident, situation: Situation, now: float) -> Outcome:
    """Page again: a job that waits for a proof must not be forgotten."""
    waited = now - incident.state_since
    reason = f"Waiting for a fence for {waited / 3600:.1f} h: {incident.escalation}"
    again = replace(incident, deadline_at=situation.policy.deadline(S.WAITING_FOR_FENCE, now=now))
    page = Entry(kind=EntryKind.PAGE, at=now, text=f"Paged the operators again: {reason}")
    return Outcome(incident=again, instructions=(PageOperator(reason=reason),), entries=(page,))


def _launch_overdue(incident: Incident, situation: Situation, generation: GenerationView, now: float) -> Outcome:
    """A launch that cannot be seen has not failed: it gets more time once, and then a human looks.

    One that can be seen has as long as the job's own limits allow its ranks until their first step.
    """
    lost = hold_up_launch(generation, situation)
    if lost:
        avoided = replace(incident, avoided_nodes=(*incident.avoided_nodes, *lost))
        why = f"contact with {join_names(lost)} was lost, and the other ranks did not train in time"
        return replan(avoided, situation, now, why=why, costs_rung=False)
    unseen = unseen_nodes(generation.plan, situation.fleet)
    if not unseen:
        limit = setting_up_until(generation, since=incident.state_since)
        if now <= limit:
            why = f"Its ranks are setting up: the limits of the job give them {limit - now:.0f} s more."
            decision = Entry(kind=EntryKind.DECISION, at=now, text=why)
            return Outcome(incident=replace(incident, deadline_at=limit + 1.0), entries=(decision,))
        return relaunch(incident, situation, generation, now, why="its ranks did not train in time")
    why = f"There is no contact with {join_names(unseen)}: whether generation {generation.number} trains is not known."
    first_deadline = situation.policy.deadline(S.LAUNCHING, now=incident.state_since)
    if first_deadline is None or (incident.deadline_at or now) > first_deadline + 1.0:
        return escalate(incident, situation, now, why)
    waiting = replace(incident, deadline_at=situation.policy.deadline(S.STOPPING, now=now))
    decision = Entry(kind=EntryKind.DECISION, at=now, text=f"{why} Nothing is stopped; waiting for contact.")
    return Outcome(incident=waiting, entries=(decision,))
