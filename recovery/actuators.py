"""Turns the machine's instructions into rows, inside the transaction that saves its new state.

What nodes should run is desired state in the database; web processes push it. So there is no effect outside the
database to lose or to repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from django.db.models import F, Q

from agents.protocol.messages import AssignmentPhase
from recovery.domain.instructions import (
    JOB_ENDS,
    Instruction,
    IssueReceipt,
    JobState,
    MarkContinuityBroken,
    MarkJob,
    PageOperator,
    PreparePlan,
    RecordProof,
    ReleaseNodes,
    RunPlan,
    StopGeneration,
)
from recovery.domain.plan import RecoveryPlan
from recovery.models import GenerationRow, IncidentRow, Job, Node, ShareRow
from recovery.proofs import keep_proof
from recovery.snapshots import forget_job
from recovery.store import to_json
from recovery.wakeup import announce_change, push_orders

log = logging.getLogger(__name__)


class Conflict(Exception):
    """The world changed between look and act; the transaction is rolled back and the decision made anew."""


def perform(instructions: Iterable[Instruction], *, job: Job, now: float, incident_id: str | None = None) -> None:
    """Perform all of them or raise `Conflict`. Must run inside a transaction."""
    for instruction in instructions:
        match instruction:
            case StopGeneration(generation=number):
                _stop(job, number, now)
            case PreparePlan(plan=plan):
                _prepare(job, plan, now)
            case RecordProof(generation=number, proof=proof):
                keep_proof(
                    ShareRow.objects.select_related("generation").get(
                        generation__job=job, generation__number=number, node__name=proof.node
                    ),
                    proof,
                )
            case RunPlan():
                _run(job, instruction, now)
            case MarkJob(state=state, reason=reason):
                mark_job(job, state, reason, now)
            case ReleaseNodes(keep=keep):
                Node.objects.filter(claimed_by=job).exclude(name__in=keep).update(claimed_by=None)
                announce_change("fleet")
            case MarkContinuityBroken(generation=number):
                GenerationRow.objects.filter(job=job, number=number).update(broken_continuity=True)
            case IssueReceipt(receipt=receipt):
                IncidentRow.objects.filter(pk=incident_id).update(receipt=to_json(receipt))
            case PageOperator(reason=reason):
                log.error("page: job=%s incident=%s %s", job.id, incident_id or "-", reason)


def _stop(job: Job, number: int, now: float) -> None:
    row = GenerationRow.objects.get(job=job, number=number)
    changed = (
        GenerationRow.objects.filter(pk=row.pk)
        .exclude(wanted=AssignmentPhase.STOP.value)
        .update(wanted=AssignmentPhase.STOP.value, stop_ordered_at=now)
    )
    if changed:
        _bump(row)


def _prepare(job: Job, plan: RecoveryPlan, now: float) -> None:
    raised = Job.objects.filter(pk=job.pk, generation__lt=plan.generation).update(generation=plan.generation)
    if not raised:
        raise Conflict(f"generation {plan.generation} of {job.id} is taken")
    free = Q(claimed_by=None) | Q(claimed_by=job)
    claimed = (
        Node.objects.filter(
            free, name__in=plan.nodes, cordoned=False, revoked=False, unhealthy_reason="", quarantined_boot_id=""
        )
        .exclude(session="")
        .update(claimed_by=job)
    )
    if claimed != len(plan.nodes):
        raise Conflict(f"a node of {plan.plan_id} is no longer free and healthy")
    row = GenerationRow.objects.create(
        job=job,
        number=plan.generation,
        plan_id=plan.plan_id,
        plan=to_json(plan),
        wanted=AssignmentPhase.PREPARE.value,
        created_at=now,
        lease=None if plan.lease is None else to_json(plan.lease),
    )
    nodes = {node.name: node for node in Node.objects.filter(name__in=plan.nodes)}
    ShareRow.objects.bulk_create(
        ShareRow(generation=row, node=nodes[name], node_rank=index) for index, name in enumerate(plan.nodes)
    )
    _bump(row)
    announce_change("fleet")


def _run(job: Job, order: RunPlan, now: float) -> None:
    number = order.generation
    row = GenerationRow.objects.get(job=job, number=number)
    changed = GenerationRow.objects.filter(pk=row.pk, wanted=AssignmentPhase.PREPARE.value).update(
        wanted=AssignmentPhase.RUN.value,
        run_ordered_at=now,
        master_port=order.master_port,
        plan={**row.plan, "fences": to_json(order.fences)},
    )
    if not changed:
        raise Conflict(f"generation {number} of {job.id} is not being prepared")
    _bump(row)


def mark_job(job: Job, state: JobState, reason: str, now: float) -> None:
    """Set a job's state; `since` changes only with the state."""
    if (job.state, job.reason) == (state.value, reason):
        return
    if job.state != state.value:
        job.state_since = now
        if state is JobState.RUNNING and job.started_at is None:
            job.started_at = now
        if state in JOB_ENDS:
            job.ended_at = now
            forget_job(job.id)
    job.state, job.reason = state.value, reason[:1000]
    job.save(update_fields=["state", "reason", "state_since", "started_at", "ended_at"])
    announce_change(f"job:{job.id}")


def _bump(row: GenerationRow) -> None:
    """Every node of a generation has new orders."""
    Node.objects.filter(shares__generation=row).update(revision=F("revision") + 1)
    push_orders()
    announce_change(f"job:{row.job_id}")
