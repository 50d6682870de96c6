"""Generations that run though this database does not know them: it was restored from a backup that is older.

What all its nodes report as running, and what is newer than everything known, is taken over as it is: training does
not notice. What is older, or of a job that has ended, or has the number of another plan, is ordered to stop. Ingest
notes strays, the sweep settles them. A generation that is known, and only its order to run is not, just goes on.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import replace

import msgspec
from django.db import transaction
from django.db.models import F, Max, Q

from agents.protocol.messages import Assignment, AssignmentPhase, AssignmentReport, LaunchSpec, SeenPhase
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.silence import Contact
from recovery.domain.timeline import Entry, EntryKind, join_names
from recovery.models import FenceAction, GenerationRow, IncidentRow, Job, Node, ShareRow, Stray
from recovery.proofs import tell
from recovery.store import from_json, to_json
from recovery.store.situations import load_fleet
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change, push_orders

log = logging.getLogger(__name__)

_ALIVE = (SeenPhase.RUNNING, SeenPhase.STOPPING)
PAGE_AFTER_S = 60.0


def note_stray(node: Node, report: AssignmentReport, *, at: float) -> None:
    """Remember, or forget, what a node says of a generation that is not known here."""
    known = Stray.objects.filter(node=node, job_id=report.job, number=report.generation)
    if report.phase not in _ALIVE:
        known.filter(plan_id=report.plan_id).delete()
        return
    if not Job.objects.filter(pk=report.job).exists():
        return
    said = {
        "plan_id": report.plan_id,
        "phase": report.phase.value,
        "launch": None if report.launch is None else msgspec.to_builtins(report.launch),
        "boot_id": report.boot_id,
        "keeps_lease": report.keeps_lease,
        "reported_at": at,
    }
    Stray.objects.update_or_create(
        node=node,
        job_id=report.job,
        number=report.generation,
        defaults=said,
        create_defaults={**said, "first_reported_at": at},
    )
    _hold_if_number_is_taken(report)
    _hold_if_newer(report)
    Node.objects.filter(pk=node.pk).update(revision=F("revision") + 1)
    push_orders()


def forget_stray(node: Node, report: AssignmentReport) -> None:
    """A node runs what is known by this number, so that it runs no other plan of it."""
    Stray.objects.filter(node=node, job_id=report.job, number=report.generation).delete()
    Node.objects.filter(pk=node.pk).update(revision=F("revision") + 1)
    push_orders()


def _hold_if_number_is_taken(report: AssignmentReport) -> None:
    """This database has given a number out once more: launch nothing before the plan that had it first is gone."""
    known = GenerationRow.objects.filter(job_id=report.job)
    rivals = known.filter(number=report.generation).exclude(plan_id=report.plan_id)
    superseded = known.filter(number__gt=report.generation, run_ordered_at__isnull=False)
    if rivals.exists() and not superseded.exists():
        _conclude_nothing(report.job)


def _hold_if_newer(report: AssignmentReport) -> None:
    """What runs is newer than all that is known, also where that was believed to be settled before this node told."""
    newest = GenerationRow.objects.filter(job_id=report.job).aggregate(most=Max("number"))["most"] or 0
    if report.generation > newest:
        _conclude_nothing(report.job)


def take_up(generation: GenerationRow, node: Node, launch: LaunchSpec | None) -> None:
    """A node tells of ranks of a generation that this database never ordered to run: it is older than that order.

    From here on it counts as ordered, so that a proof of stop is demanded from each of its nodes. Its lease proves
    nothing, since the lost database may have raised the terms. `launch` is what the node says that it runs by; None
    if it has not said.
    """
    now = time.time()
    unordered = GenerationRow.objects.filter(pk=generation.pk, run_ordered_at__isnull=True)
    if unordered.update(run_ordered_at=now, adopted=True, lease=None):
        _void_decisions(generation.job_id)
        text = (
            f"Generation {generation.number} runs on {node.name}, though this database never ordered it to run: it was "
            "restored from a backup that is older. It goes on, and needs a proof of stop from each of its nodes before "
            "anything replaces it."
        )
        tell(generation.job_id, text)
        log.warning("job=%s generation=%d runs without an order known here", generation.job_id, generation.number)
    if launch is not None and launch.master_port is not None and _is_newest(generation):
        prepared = GenerationRow.objects.filter(
            pk=generation.pk, adopted=True, wanted=AssignmentPhase.PREPARE.value, plan_id=generation.plan_id
        )
        if prepared.update(wanted=AssignmentPhase.RUN.value, master_port=launch.master_port):
            _void_decisions(generation.job_id)
            Node.objects.filter(shares__generation=generation).update(revision=F("revision") + 1)
            push_orders()
    generation.refresh_from_db()
    announce_change(f"job:{generation.job_id}")


def _is_newest(generation: GenerationRow) -> bool:
    """Whether no agent knows of a newer one either."""
    return Job.objects.filter(pk=generation.job_id, generation=generation.number, behind_since__isnull=True).exists()


def _void_decisions(job_id: str) -> None:
    """What was decided while the generation looked as if it had never run must not be saved any more."""
    Job.objects.filter(pk=job_id).update(version=F("version") + 1)
    IncidentRow.objects.filter(job_id=job_id, ended=False).update(version=F("version") + 1)


def fall_behind(job_id: str, generation: int) -> None:
    """An agent knows a newer generation than this database: take no number below it, and conclude nothing yet."""
    # Once per number: a node that only comes back after that was settled brings no news.
    if Job.objects.filter(pk=job_id, generation__lt=generation).update(generation=generation):
        _conclude_nothing(job_id)


def _conclude_nothing(job_id: str) -> None:
    """Until it is known what runs, and from now on: what is being decided is void. An ended job concludes nothing."""
    ended = [state.value for state in JOB_ENDS]
    caught_up = Job.objects.filter(pk=job_id, behind_since__isnull=True).exclude(state__in=ended)
    if caught_up.update(behind_since=time.time()):
        _void_decisions(job_id)


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
    plans = dict(GenerationRow.objects.filter(job_id=stray.job_id).values_list("number", "plan_id"))
    if plans.get(stray.number) == stray.plan_id:
        return False  # taken over since the stray was read: its own order says what it is to do
    newest = max(plans, default=0)
    ended = stray.job.state in {state.value for state in JOB_ENDS}
    return stray.number <= newest or ended or stray.job.stop_wanted


def settle_strays(job_id: str) -> None:
    """Take over what runs, if all of it is known; else wait, and page. Called by the sweep for jobs that are behind."""
    with transaction.atomic():
        Job.objects.filter(pk=job_id).update(version=F("version"))  # taken before it is read
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
        newest = max(strays)
        shares = strays[newest]
        found = _plan_of(job, *newest, shares)
        if isinstance(found, RecoveryPlan):
            _adopt(job, found, shares)
        else:
            names = join_names(sorted(share.node.name for share in shares))
            _page_late(job, f"Generation {newest[0]} runs on {names}; {found} Until then nothing is done for this job.")


def _catch_up_without(job: Job) -> None:
    """Nobody reports a newer generation that may go on: once nobody can run one either, what is known counts.

    Agents have a minute to come back and tell. A node that cannot be seen after it may run what is not known here, so
    that nothing is launched before it is seen, or said to be off.
    """
    if job.stop_wanted:
        _stop_known(job)
    going = [stray.node.name for stray in Stray.objects.filter(job=job).select_related("node")]
    if going:
        names = join_names(sorted(set(going)))
        _page_late(job, f"Waiting for {names} to stop a generation that this database does not know.")
        return
    if time.time() - (job.behind_since or 0.0) <= PAGE_AFTER_S:
        return
    unseen = _unseen_since(job)
    if unseen:
        _page_late(
            job,
            f"A generation newer than this database may run on {join_names(unseen)}, which cannot be seen. Bring them "
            "back, or attest that they are powered off. Until then nothing is done for this job.",
        )
        return
    Job.objects.filter(pk=job.pk).update(behind_since=None, reason="", version=F("version") + 1)
    announce_change(f"job:{job.pk}")


def _stop_known(job: Job) -> None:
    known = GenerationRow.objects.filter(job=job).exclude(wanted=AssignmentPhase.STOP.value)
    if known.update(wanted=AssignmentPhase.STOP.value, stop_ordered_at=time.time()):
        Node.objects.filter(shares__generation__job=job).update(revision=F("revision") + 1)
        push_orders()


def _unseen_since(job: Job) -> list[str]:
    """Nodes that are not in contact, and that nobody has called off since the job is behind."""
    called_off = set(
        FenceAction.objects.filter(
            state="fenced", contradicted_at__isnull=True, requested_at__gte=job.behind_since, boot_id=F("node__boot_id")
        ).values_list("node__name", flat=True)
    )
    return [
        node.name
        for node in load_fleet(time.time()).nodes
        if node.contact is not Contact.SEEN and node.last_heard_at is not None and node.name not in called_off
    ]


def _page_late(job: Job, reason: str) -> None:
    """Say what is in the way, and page once it has been for a while."""
    if job.reason == reason or time.time() - (job.behind_since or 0.0) <= PAGE_AFTER_S:
        return
    Job.objects.filter(pk=job.pk).update(reason=reason[:1000])
    announce_change(f"job:{job.pk}")
    log.error("page: job=%s %s", job.pk, reason)


def _plan_of(job: Job, number: int, plan_id: str, shares: list[Stray]) -> RecoveryPlan | str:
    """The plan that these nodes run by, if every node of it is there; else a sentence for what is in the way.

    No lease: its runners may hold longer terms than this database knows, and a proof must not come before they act.
    """
    launches: dict[int, tuple[Stray, LaunchSpec]] = {}
    for share in shares:
        if share.launch is None or share.phase != SeenPhase.RUNNING.value:
            return f"{share.node.name} says that it is {share.phase}."
        if share.node.claimed_by_id not in (None, job.pk):
            return f"{share.node.name} is held by job {share.node.claimed_by_id} here. Stop one of the two."
        launch = msgspec.convert(share.launch, LaunchSpec)
        launches[launch.node_rank] = (share, launch)
    first = next(iter(launches.values()))[1]
    same = {
        (one.run_id, one.node_count, one.ranks_per_node, one.parent_generation, one.parent_step, one.master_port)
        for _, one in launches.values()
    }
    if len(same) != 1:
        return "they do not run the same launch. Stop the job."
    missing = first.node_count - len(launches)
    if sorted(launches) != list(range(first.node_count)):
        return f"{missing} of its {first.node_count} nodes are unseen. Bring them back, or stop the job."
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
        parent_in_memory=first.parent_in_memory,
        parent_reason="found running; this database is older than its plan",
        placement_reason="found running there",
        lease=None,
    )


def _adopt(job: Job, plan: RecoveryPlan, shares: list[Stray]) -> None:
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
    # Nodes that it held before are given back by the job's own look, once they are proven empty.
    Node.objects.filter(name__in=plan.nodes).update(claimed_by=job)
    told = Q(shares__generation__job=job) | Q(strays__job=job)
    Node.objects.filter(told).update(revision=F("revision") + 1)
    Stray.objects.filter(job=job, number=plan.generation).delete()
    _end_incident(job, plan, now)
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


def _end_incident(job: Job, plan: RecoveryPlan, now: float) -> None:
    """What an open incident wanted to do was done before the backup was restored, or is no longer to be done."""
    row = IncidentRow.objects.filter(job=job, ended=False).first()
    if row is None:
        return
    state = IncidentState.CANCELLED
    ended = replace(from_json(row.body, Incident), state=state, state_since=now, deadline_at=None)
    IncidentRow.objects.filter(pk=row.pk).update(
        state=state.value,
        ended=True,
        ended_at=now,
        deadline_at=None,
        command="",
        body=to_json(ended),
        version=F("version") + 1,
    )
    text = (
        f"Generation {plan.generation} was found running on {join_names(plan.nodes)} and taken over: this incident was "
        "restored from a backup that is older. Nothing more is done for it."
    )
    entry = Entry(kind=EntryKind.STATE, at=now, text=text, data={"from": row.state, "to": state.value})
    announce(f"incident:{row.pk}", append_entries(row.pk, [entry]))
