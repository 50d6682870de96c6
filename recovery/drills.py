"""Drills: break something on purpose and see whether recovery keeps its promise.

A drill's fault takes exactly the path of a real one; the drill only remembers what was promised and compares.
"""

from __future__ import annotations

import time

from django.db import IntegrityError, transaction
from django.db.models import F

from recovery.domain.instructions import JobState
from recovery.domain.timeline import Entry, EntryKind
from recovery.errors import DrillRefused, NotFound
from recovery.ids import fresh_id
from recovery.models import Drill, GenerationRow, IncidentRow, Job, Node, RankRow
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change, push_orders

DRILL_KINDS = {
    "kill-rank": "Kills one rank of a running job with SIGKILL, as a crash or the kernel's OOM killer would."
}

FAULT_WITHIN_S = 120.0
"""The agent never applies the fault later than this after the request."""

INCIDENT_WITHIN_S = 30.0
"""A fault that was applied must have opened an incident by then."""


def trigger_drill(
    *,
    kind: str,
    job_id: str,
    rank: int | None = None,
    steps_after_save: int = 0,
    recovered_within_s: float = 120.0,
    requested_by: str,
) -> Drill:
    """Ask the agent of a rank to break it. Raises `NotFound` or `DrillRefused`, whose guard says what forbids it."""
    if kind not in DRILL_KINDS:
        raise DrillRefused("kind", f"{kind!r} is no drill; known are {', '.join(DRILL_KINDS)}.")
    job = Job.objects.filter(pk=job_id).first()
    if job is None:
        raise NotFound(f"There is no job {job_id}.")
    generation = _steady_generation(job)
    target = _target_rank(generation, rank)
    now = time.time()
    try:
        with transaction.atomic():
            if Drill.objects.filter(job=job, ended=False).exists():
                raise DrillRefused("overlap", f"Another drill runs on job {job.name}: wait for its end.")
            drill = Drill.objects.create(
                id=fresh_id("drl"),
                kind=kind,
                job=job,
                node=target.node,
                generation_number=generation.number,
                rank=target.rank,
                steps_after_save=steps_after_save,
                state="requested",
                promise={"recovered_within_s": recovered_within_s, "continuity": "proven"},
                requested_by=requested_by,
                requested_at=now,
                not_after=now + FAULT_WITHIN_S,
            )
            _bump_node(target.node)
            announce_change(f"drill:{drill.id}")
    except IntegrityError as err:
        raise DrillRefused("overlap", f"Another drill runs on job {job.name}: wait for its end.") from err
    return drill


def _steady_generation(job: Job) -> GenerationRow:
    if job.state != JobState.RUNNING.value:
        raise DrillRefused(
            "steady_state", f"Job {job.name} is {job.state}, not running: a drill starts from a steady state only."
        )
    if IncidentRow.objects.filter(job=job, ended=False).exists():
        raise DrillRefused("open_incident", f"Job {job.name} has an open incident: let it end first.")
    generation = GenerationRow.objects.filter(job=job, wanted="run").order_by("-number").first()
    if generation is None:
        raise DrillRefused("steady_state", f"Job {job.name} has no running generation.")
    return generation


def _target_rank(generation: GenerationRow, rank: int | None) -> RankRow:
    ranks = list(generation.ranks.select_related("node").order_by("rank"))
    if not ranks:
        raise DrillRefused("steady_state", "No rank has reported yet: wait until the job trains.")
    if rank is None:
        return ranks[-1]
    chosen = next((row for row in ranks if row.rank == rank), None)
    if chosen is None:
        raise DrillRefused("rank", f"There is no rank {rank}: the job has ranks 0 to {ranks[-1].rank}.")
    return chosen


def record_fault(drill_id: str, *, state: str, detail: str, at: float) -> None:
    """Take an agent's report on a drill's fault. Must run inside a transaction."""
    drill = Drill.objects.select_related("node").filter(pk=drill_id).first()
    if drill is None or drill.ended:
        return
    match state:
        case "armed":
            Drill.objects.filter(pk=drill_id, state="requested").update(state="armed", detail=detail)
        case "applied":
            Drill.objects.filter(pk=drill_id, ended=False).update(state="applied", detail=detail, applied_at=at)
            if drill.node is not None:
                _bump_node(drill.node)
        case "refused" | "expired":
            _end(drill, state=state, passed=False, reasons=[detail or f"the agent says: {state}"])
    announce_change(f"drill:{drill_id}")


def settle_drill(drill_id: str) -> None:
    """Compare what happened with what was promised, once that is decided."""
    with transaction.atomic():
        drill = Drill.objects.select_related("node").filter(pk=drill_id, ended=False).first()
        if drill is None:
            return
        now = time.time()
        incident = drill.incidents.order_by("opened_at").first()
        if incident is not None:
            if incident.ended or incident.state == "escalated":
                _judge(drill, incident)
            return
        if drill.applied_at is not None and now > drill.applied_at + INCIDENT_WITHIN_S:
            _end(drill, state="failed", passed=False, reasons=["The fault was applied, but no incident was opened."])
        elif drill.applied_at is None and now > drill.not_after + INCIDENT_WITHIN_S:
            _end(drill, state="expired", passed=False, reasons=["The agent did not apply the fault in time."])


def _judge(drill: Drill, incident: IncidentRow) -> None:
    receipt = incident.receipt or {}
    verdict = (receipt.get("verdict") or {}).get("kind", "")
    limit = float(drill.promise["recovered_within_s"])
    reasons = []
    if incident.state != "recovered":
        reasons.append(f"The incident ended as {incident.state}, not recovered.")
    elif receipt.get("total_s", limit + 1) > limit:
        reasons.append(f"Recovery took {receipt.get('total_s')} s; promised were {limit:.0f} s.")
    if verdict not in ("bit-equal", "state-equal"):
        reasons.append(f"Continuity was not proven ({verdict or 'no verdict'}).")
    broken = drill.job.generations.filter(number__gt=drill.generation_number, broken_continuity=True)
    for number in broken.filter(number__lte=receipt.get("generation", 0)).values_list("number", flat=True):
        reasons.append(f"Generation {number} resumed with broken continuity; recovery had to roll back.")
    passed = not reasons
    _end(drill, state="passed" if passed else "failed", passed=passed, reasons=reasons, incident=incident)


def _end(drill: Drill, *, state: str, passed: bool, reasons: list[str], incident: IncidentRow | None = None) -> None:
    result = {"passed": passed, "reasons": reasons, "incident": incident.pk if incident else None}
    ended = Drill.objects.filter(pk=drill.pk, ended=False).update(
        state=state, ended=True, ended_at=time.time(), result=result
    )
    if not ended:
        return
    if drill.node is not None:
        _bump_node(drill.node)
    if incident is not None:
        text = (
            f"Drill {drill.id} passed: the promise was kept."
            if passed
            else f"Drill {drill.id} failed: {' '.join(reasons)}"
        )
        IncidentRow.objects.filter(pk=incident.pk).update(
            version=F("version")
        )  # takes the row, so that seq has no rival
        entry = Entry(kind=EntryKind.DRILL, at=time.time(), text=text, data=result)
        announce(f"incident:{incident.pk}", append_entries(incident.pk, [entry]))
    announce_change(f"drill:{drill.id}")


def _bump_node(node: Node) -> None:
    Node.objects.filter(pk=node.pk).update(revision=F("revision") + 1)
    push_orders()
