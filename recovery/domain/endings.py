"""How an incident ends well: recovered, with the receipt that proves it."""

from __future__ import annotations

from dataclasses import replace

from recovery.domain.continuity import Verdict
from recovery.domain.generations import GenerationView
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import (
    IssueReceipt,
    JobState,
    MarkJob,
    ReleaseNodes,
)
from recovery.domain.moves import Outcome, move, stop_all
from recovery.domain.receipt import Receipt
from recovery.domain.situation import Situation
from recovery.domain.timeline import Entry, EntryKind, join_names

S = IncidentState


def recovered(
    incident: Incident, situation: Situation, generation: GenerationView, verdict: Verdict, now: float
) -> Outcome:
    """End the incident: issue the receipt, and give back what the job no longer needs."""
    receipt = make_receipt(incident, situation, generation, verdict, now, state=S.RECOVERED)
    state = JobState.SUCCEEDED if generation.ended_well else JobState.RUNNING
    story = Entry(
        kind=EntryKind.RECEIPT,
        at=now,
        text=f"Recovered as generation {generation.number}: continuity {verdict.kind.value}, "
        f"{verdict.steps_compared} steps compared, {verdict.steps_lost} steps lost and done again.",
        data={"verdict": verdict.kind.value, "findings": list(verdict.findings)},
    )
    moved = move(
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
            *(stop_all(situation, except_generation=None) if generation.ended_well else ()),
            ReleaseNodes(job=incident.job, keep=generation.plan.nodes),
        ),
    )
    return replace(moved, entries=(story, *moved.entries))


def make_receipt(
    incident: Incident,
    situation: Situation,
    generation: GenerationView,
    verdict: Verdict,
    now: float,
    *,
    state: IncidentState,
) -> Receipt:
    """The receipt for a generation that was judged; all its seconds are since the fault."""
    broken = situation.generation(incident.broken_generation)
    generations = [g for g in situation.generations if incident.broken_generation <= g.number < generation.number]

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
        parent_in_memory=generation.plan.parent_in_memory,
        reached_step=incident.reached_step,
        detect_s=round(incident.opened_at - incident.fault_at, 4),
        stop_s=since_fault(incident.fenced_at),
        launch_s=since_fault(incident.run_ordered_at),
        first_step_s=since_fault(incident.first_step_at),
        caught_up_s=since_fault(situation.caught_up_at),
        total_s=round(now - incident.fault_at, 4),
        attempts=incident.attempt + 1,
        fences=tuple(p for g in generations for p in g.proofs),
        issued_at=now,
        samples=situation.samples,
    )
