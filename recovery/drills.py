"""Drills: break something on purpose and see whether recovery keeps its promise.

A drill's fault takes exactly the path of a real one; the drill only remembers what was promised and compares
(`drill_outcomes`). Called by the pages and the REST API, and by ingest with what agents report of faults.
"""

from __future__ import annotations

import time
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F

from recovery import server_hold
from recovery.domain.drill_guards import DrillScene, DrillWish, why_not
from recovery.domain.drill_kinds import KINDS, DrillKind, PromiseKind, Target
from recovery.domain.drill_promises import DrillOutcome
from recovery.domain.generations import GenerationView, RankView
from recovery.drill_outcomes import bump_node, end_drill, tell
from recovery.errors import DrillRefused, NotFound
from recovery.ids import fresh_id
from recovery.models import Claim, Drill, Job, Node
from recovery.store.drills import load_scene, record_before
from recovery.wakeup import announce_change

DRILL_KINDS = {kind.name: kind.what for kind in KINDS.values()}

FAULT_WITHIN_S = 120.0
"""The agent never applies the fault later than this after the request."""


def trigger_drill(
    *,
    kind: str,
    job_id: str,
    rank: int | None = None,
    node: str | None = None,
    duration_s: float | None = None,
    steps_after_save: int = 0,
    recovered_within_s: float = 120.0,
    allow_waiting: bool = False,
    requested_by: str,
) -> Drill:
    """Have something broken: a rank, or a node by its name or by a rank on it, by default that of the last rank.

    `allow_waiting`: also where the job may then have to wait for a human or for the node's return.
    Raises `NotFound` or `DrillRefused`, whose guard says what forbids it.
    """
    chosen = KINDS.get(kind)
    if chosen is None:
        raise DrillRefused("kind", f"{kind!r} is no drill; known are {', '.join(KINDS)}.")
    job = Job.objects.filter(pk=job_id).first()
    if job is None:
        raise NotFound(f"There is no job {job_id}.")
    try:
        with transaction.atomic():
            _one_at_a_time()
            now = time.time()
            scene = load_scene(job, supervised=server_hold.is_supervised(), now=now)
            target = _target(chosen, scene, rank=rank, node=node)
            row = Node.objects.get(name=target.node) if target is not None else None
            wish = DrillWish(
                kind=chosen,
                node=row.name if row else None,
                protocol=row.protocol if row else 0,
                duration_s=chosen.duration_s if duration_s is None else duration_s,
                allow_waiting=allow_waiting,
            )
            refusal = why_not(wish, scene)
            if refusal is not None:
                raise DrillRefused(refusal.guard, refusal.words)
            assert scene.generation is not None  # a guard has seen to it
            drill = Drill.objects.create(
                id=fresh_id("drl"),
                kind=kind,
                job=job,
                node=row,
                generation_number=scene.generation.number,
                rank=target.rank if target else None,
                duration_s=wish.duration_s,
                steps_after_save=steps_after_save,
                state="requested",
                promise=_promise(chosen, recovered_within_s=recovered_within_s, allow_waiting=allow_waiting),
                before=record_before(job, scene.generation.number),
                requested_by=requested_by,
                requested_at=now,
                not_after=now + FAULT_WITHIN_S,
            )
            if row is not None:
                bump_node(row)
            announce_change(f"drill:{drill.id}")
    except IntegrityError as err:
        raise DrillRefused("overlap", f"Another drill runs on job {job.name}: wait for its end.") from err
    return drill


def _one_at_a_time() -> None:
    """Two drills asked for at once must see each other: whoever comes second waits here for the first's commit."""
    Claim.objects.get_or_create(name="drills", defaults={"holder": "", "until": 0.0})
    Claim.objects.filter(name="drills").update(until=F("until"))


def _promise(kind: DrillKind, *, recovered_within_s: float, allow_waiting: bool) -> dict[str, Any]:
    promise: dict[str, Any] = {"kind": kind.promise.value}
    if kind.promise is PromiseKind.RECOVERED:
        promise |= {"recovered_within_s": recovered_within_s, "continuity": "proven"}
    return promise | ({"allow_waiting": True} if allow_waiting else {})


def _target(kind: DrillKind, scene: DrillScene, *, rank: int | None, node: str | None) -> RankView | None:
    """The rank that is hit, or one on the node that is; None where no node is hit, or none is known yet."""
    if kind.target is Target.SERVER:
        if rank is not None or node is not None:
            raise DrillRefused("target", f"{kind.name} hits the server: it takes neither rank nor node.")
        return None
    generation = scene.generation
    if generation is None or not generation.ranks:
        return None  # the guards say so in their order
    ranks = sorted(generation.ranks, key=lambda one: one.rank)
    if node is not None:
        ranks = [one for one in ranks if one.node == node]
        if not ranks:
            raise DrillRefused("node", f"{node} runs no rank of job {scene.job.name}: {_places(generation)}.")
    if rank is not None:
        ranks = [one for one in ranks if one.rank == rank]
        if not ranks:
            raise DrillRefused("rank", f"There is no rank {rank} there: {_places(generation)}.")
    return ranks[-1]


def _places(generation: GenerationView) -> str:
    return ", ".join(f"rank {one.rank} on {one.node}" for one in sorted(generation.ranks, key=lambda one: one.rank))


def record_fault(drill_id: str, *, state: str, detail: str, at: float) -> None:
    """Take an agent's report on a drill's fault. Must run inside a transaction.

    A report may come late: an agent that is cut off, frozen or killed tells what it did when it is back.
    """
    drill = Drill.objects.select_related("node").filter(pk=drill_id).first()
    if drill is None or drill.ended:
        return
    rows = Drill.objects.filter(pk=drill_id, ended=False)
    match state:
        case "armed":
            rows.filter(state="requested").update(state="armed", detail=detail)
        case "applied":
            if drill.undone_at is None:
                rows.update(state="applied", detail=detail)
            rows.update(applied_at=at)
            if drill.node is not None:
                bump_node(drill.node)
            tell(drill, f"The fault of drill {drill_id} was applied: {_sentence(detail)}", at=at)
        case "undone":
            rows.filter(applied_at__isnull=True).update(applied_at=at)
            rows.update(state="undone", detail=detail, undone_at=at)
            tell(drill, f"The fault of drill {drill_id} was undone: {_sentence(detail)}", at=at)
        case "refused" | "expired":
            reason = detail or f"the agent says: {state}"
            end_drill(drill, DrillOutcome(state=state, reasons=(reason,)))
    announce_change(f"drill:{drill_id}")


def _sentence(detail: str) -> str:
    return f"{(detail or 'its agent says no more').rstrip('. ')}."
