"""Generations that run though this database does not know them: it was restored from a backup that is older.

What all its nodes report as running, and what is newer than everything known, is taken over as it is: training does
not notice. What is older, or of a job that has ended, is ordered to stop. Ingest notes strays, the sweep settles them.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict

import msgspec
from django.db import transaction
from django.db.models import F, Max

from agents.protocol.messages import Assignment, AssignmentPhase, AssignmentReport, LaunchSpec, SeenPhase
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.domain.plan import CheckpointRef, LeaseLimits, RecoveryPlan
from recovery.models import GenerationRow, Job, Node, ShareRow, Stray
from recovery.store import to_json
from recovery.wakeup import announce_change, push_orders

log = logging.getLogger(__name__)

_ALIVE = (SeenPhase.RUNNING, SeenPhase.STOPPING)
PAGE_AFTER_S = 60.0


def note_stray(node: Node, report: AssignmentReport, *, at: float) -> None:
    """Remember, or forget, what a node says of a generation that is not known here."""
    known = Stray.objects.filter(node=node, job_id=report.job, number=report.generation)
    if report.phase not in _ALIVE:
        known.delete()
        return
    if not Job.objects.filter(pk=report.job).exists():
        return
    Stray.objects.update_or_create(
        node=node,
        job_id=report.job,
        number=report.generation,
        defaults={
            "plan_id": report.plan_id,
            "phase": report.phase.value,
            "launch": None if report.launch is None else msgspec.to_builtins(report.launch),
            "boot_id": report.boot_id,
            "keeps_lease": report.keeps_lease,
            "reported_at": at,
        },
        create_defaults={
            "plan_id": report.plan_id,
            "phase": report.phase.value,
            "launch": None if report.launch is None else msgspec.to_builtins(report.launch),
            "boot_id": report.boot_id,
            "keeps_lease": report.keeps_lease,
            "first_reported_at": at,
            "reported_at": at,
        },
    )
    Node.objects.filter(pk=node.pk).update(revision=F("revision") + 1)
    push_orders()


def fall_behind(job_id: str, generation: int) -> None:
    """An agent knows a newer generation than this database: take no number below it, and conclude nothing yet."""
    # Once per number: a node that only comes back after that was settled brings no news.
    if Job.objects.filter(pk=job_id, generation__lt=generation).update(generation=generation):
        Job.objects.filter(pk=job_id, behind_since__isnull=True).exclude(
            state__in=[state.value for state in JOB_ENDS]
        ).update(behind_since=time.time())


def stop_orders(node: Node) -> list[Assignment]:
    """Strays on a node that have to go: older than what is known, or of a job that should not run."""
    orders = []
    for stray in Stray.objects.filter(node=node).select_related("job"):
        if not _should_go(stray):
            continue
        orders.append(
            Assignment(
                job=stray.job_id,
                generation=stray.number,
                plan_id=stray.plan_id,
                phase=AssignmentPhase.STOP,
                launch=None,
            )
        )
    return orders


def _should_go(stray: Stray) -> bool:
    newest = GenerationRow.objects.filter(job_id=stray.job_id).aggregate(most=Max("number"))["most"] or 0
    ended = stray.job.state in {state.value for state in JOB_ENDS}
    return stray.number <= newest or ended or stray.job.stop_wanted


def settle_strays(job_id: str) -> None:
    """Take over what runs, if all of it is known; else wait, and page. Called by the sweep for jobs that are behind."""
    with transaction.atomic():
        job = Job.objects.filter(pk=job_id, behind_since__isnull=False).first()
        if job is None:
            return
        strays: dict[tuple[int, str], list[Stray]] = defaultdict(list)
        for stray in Stray.objects.filter(job=job).select_related("node", "job"):
            if not _should_go(stray):
                strays[stray.number, stray.plan_id].append(stray)
        if not strays:
            _catch_up_without(job)
            return
        (number, plan_id), shares = max(strays.items())
        plan = _plan_of(job, number, plan_id, shares)
        if plan is not None:
            _adopt(job, plan, shares)
        elif job.behind_since is not None and time.time() - job.behind_since > PAGE_AFTER_S:
            reason = (
                f"Generation {number} runs on {', '.join(s.node.name for s in shares)}; its other nodes are unseen."
            )
            if job.reason != reason:
                Job.objects.filter(pk=job.pk).update(reason=reason)
                log.error("page: job=%s %s", job.pk, reason)


def _catch_up_without(job: Job) -> None:
    """Nobody reports the newer generation as running: once agents had time to come back, what is known counts."""
    if job.behind_since is not None and time.time() - job.behind_since > PAGE_AFTER_S:
        Job.objects.filter(pk=job.pk).update(behind_since=None, version=F("version") + 1)


def _plan_of(job: Job, number: int, plan_id: str, shares: list[Stray]) -> RecoveryPlan | None:
    """The plan that these nodes run by, if every node of it is there; None if one is missing or they disagree."""
    launches: dict[int, tuple[Stray, LaunchSpec]] = {}
    for share in shares:
        if share.launch is None or share.phase != SeenPhase.RUNNING.value:
            return None
        launch = msgspec.convert(share.launch, LaunchSpec)
        launches[launch.node_rank] = (share, launch)
    first = next(iter(launches.values()))[1]
    same = {
        (one.run_id, one.node_count, one.ranks_per_node, one.parent_generation, one.parent_step, one.master_port)
        for _, one in launches.values()
    }
    if len(same) != 1 or sorted(launches) != list(range(first.node_count)):
        return None
    parent = (
        None
        if first.parent_generation is None or first.parent_step is None
        else CheckpointRef(generation=first.parent_generation, step=first.parent_step)
    )
    return RecoveryPlan(
        job=job.pk,
        generation=number,
        plan_id=plan_id,
        run_id=first.run_id,
        nodes=tuple(launches[rank][0].node.name for rank in sorted(launches)),
        ranks_per_node=first.ranks_per_node,
        master_address=first.master_address,
        parent=parent,
        parent_reason="found running; this database is older than its plan",
        placement_reason="found running there",
        lease=LeaseLimits() if all(share.keeps_lease for share in shares) else None,
    )


def _adopt(job: Job, plan: RecoveryPlan, shares: list[Stray]) -> None:
    nodes = [share.node for share in shares]
    if any(node.claimed_by_id not in (None, job.pk) for node in nodes):
        return  # another job holds a node of it: a person has to look, and is paged
    now = time.time()
    launch = msgspec.convert(shares[0].launch, LaunchSpec)
    row = GenerationRow.objects.create(
        job=job,
        number=plan.generation,
        plan_id=plan.plan_id,
        plan=to_json(plan),
        wanted=AssignmentPhase.RUN.value,
        master_port=launch.master_port,
        created_at=now,
        run_ordered_at=now,
        lease=None if plan.lease is None else to_json(plan.lease),
        adopted=True,
    )
    by_name = {share.node.name: share for share in shares}
    ShareRow.objects.bulk_create(
        ShareRow(
            generation=row,
            node=by_name[name].node,
            node_rank=index,
            seen=SeenPhase.RUNNING.value,
            boot_id=by_name[name].boot_id,
            keeps_lease=by_name[name].keeps_lease,
            reported_at=now,
        )
        for index, name in enumerate(plan.nodes)
    )
    older = GenerationRow.objects.filter(job=job, number__lt=plan.generation)
    older.exclude(wanted=AssignmentPhase.STOP.value).update(wanted=AssignmentPhase.STOP.value, stop_ordered_at=now)
    Node.objects.filter(claimed_by=job).exclude(name__in=plan.nodes).update(claimed_by=None)
    Node.objects.filter(name__in=plan.nodes).update(claimed_by=job)
    Node.objects.filter(shares__generation__job=job).update(revision=F("revision") + 1)
    Stray.objects.filter(job=job, number=plan.generation).delete()
    Job.objects.filter(pk=job.pk).update(
        generation=plan.generation,
        behind_since=None,
        state=JobState.RUNNING.value,
        state_since=now,
        reason=f"Generation {plan.generation} was found running and taken over; the database is older than it.",
        version=F("version") + 1,
    )
    log.warning("job=%s generation=%d was found running and taken over", job.pk, plan.generation)
    push_orders()
    announce_change(f"job:{job.pk}")
    announce_change("fleet")
