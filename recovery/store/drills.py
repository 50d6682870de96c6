"""Reads the rows that a drill's guards and judges need, and freezes them into domain values."""

from __future__ import annotations

import itertools
from typing import Any

from recovery.domain.drill_guards import DrillScene, OtherDrill
from recovery.domain.drill_kinds import KINDS
from recovery.domain.drill_promises import FaultProgress, JobRecord, RankRecord, RecoveryEnd
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.domain.plan import LeaseLimits
from recovery.models import Drill, GenerationRow, IncidentRow, Job, Node, Observer, StepRow
from recovery.store.serialize import from_json
from recovery.store.situations import CONTROL_PLANE, load_situation


def load_scene(job: Job, *, supervised: bool, now: float) -> DrillScene:
    """What is so at the moment that a drill on a job is asked for."""
    own = IncidentRow.objects.filter(job=job, ended=False).first()
    plane = IncidentRow.objects.filter(kind=CONTROL_PLANE, ended=False).first()
    incident = ""
    if own is not None:
        incident = f"Incident {own.pk} of job {job.name}"
    elif plane is not None:
        incident = f"Incident {plane.pk} of the control plane"
    others = Drill.objects.filter(ended=False).order_by("requested_at")
    return DrillScene(
        situation=load_situation(job, now=now),
        open_incident=incident,
        others=tuple(
            OtherDrill(id=row.pk, kind=KINDS[row.kind], job=row.job_id) for row in others if row.kind in KINDS
        ),
        supervised=supervised,
    )


def record_before(job: Job, generation: int) -> dict[str, Any]:
    """What an unharmed job is held to later: how far its ranks are, and what its agents have told of losses."""
    ranks = GenerationRow.objects.get(job=job, number=generation).ranks.order_by("rank")
    nodes = Node.objects.filter(shares__generation__job=job, shares__generation__number=generation).distinct()
    return {
        "generation": generation,
        "last_steps": {str(row.rank): row.last_step for row in ranks},
        "gaps": {node.name: node.gaps for node in nodes},
        "outboxes": {node.name: [node.outbox_id, node.acknowledged_seq] for node in nodes},
        "observers": list(Observer.objects.values_list("name", flat=True)),
    }


def fault_progress(drill: Drill) -> FaultProgress:
    """How far the fault has come."""
    return FaultProgress(
        not_after=drill.not_after,
        duration_s=drill.duration_s,
        is_undone=KINDS[drill.kind].is_undone,
        applied_at=drill.applied_at,
        undone_at=drill.undone_at,
        away_s=drill.away_s,
    )


def recovery_end(drill: Drill, incident: IncidentRow) -> RecoveryEnd:
    """The drill's incident, as far as it has come."""
    receipt = incident.receipt or {}
    verdict = receipt.get("verdict") or {}
    broken = drill.job.generations.filter(
        number__gt=drill.generation_number,
        number__lte=receipt.get("generation", drill.job.generation),
        broken_continuity=True,
    )
    return RecoveryEnd(
        state=incident.state,
        ended=incident.ended,
        within_s=float(drill.promise["recovered_within_s"]),
        total_s=receipt.get("total_s"),
        continuity=verdict.get("kind", ""),
        steps_lost=verdict.get("steps_lost"),
        fences={
            proof["node"]: proof["kind"]
            for proof in receipt.get("fences", ())
            if proof.get("generation", drill.generation_number) == drill.generation_number
        },
        fence_s=receipt.get("stop_s"),
        lasted_s=None if incident.ended_at is None else incident.ended_at - incident.body["fault_at"],
        escalation=incident.body["escalation"],
        rolled_back=tuple(broken.order_by("number").values_list("number", flat=True)),
    )


def job_record(drill: Drill) -> JobRecord:
    """What became of the drill's job since the drill was asked for."""
    job, before = drill.job, drill.before
    number = drill.generation_number
    generation = GenerationRow.objects.get(job=job, number=number)
    incidents = list(IncidentRow.objects.filter(job=job, opened_at__gte=drill.requested_at))
    nodes = list(Node.objects.filter(name__in=before["gaps"]))
    hit = nodes if drill.node is None else [node for node in nodes if node.pk == drill.node_id]
    applied_at = drill.applied_at or drill.requested_at
    return JobRecord(
        generation_before=number,
        generation=job.generation,
        ended=job.state in {state.value for state in JOB_ENDS} or job.state == JobState.STOPPING.value,
        ranks=tuple(
            _rank_record(drill, rank.rank, first=before["last_steps"].get(str(rank.rank)), finished=rank.finished_step)
            for rank in generation.ranks.order_by("rank")
        ),
        incidents=tuple(row.state for row in incidents),
        open_incident=any(not row.ended for row in incidents),
        steps_lost=sum(((row.receipt or {}).get("verdict") or {}).get("steps_lost") or 0 for row in incidents),
        gaps={node.name: node.gaps - before["gaps"][node.name] for node in nodes},
        renewed_outboxes=tuple(node.name for node in nodes if node.outbox_id != before["outboxes"][node.name][0]),
        stall_limit_s=(from_json(generation.lease, LeaseLimits) if generation.lease else LeaseLimits()).step_s,
        silent_s=max((max(0.0, (node.connected_since or 0.0) - applied_at) for node in hit), default=0.0),
        may_wait=bool(drill.promise.get("allow_waiting")),
    )


def _rank_record(drill: Drill, rank: int, *, first: int | None, finished: int | None) -> RankRecord:
    """One rank's steps from the last one before the drill on."""
    rows = StepRow.objects.filter(
        job_id=drill.job_id, generation_number=drill.generation_number, rank=rank, step__gte=first or 0
    )
    told = list(rows.order_by("step").values_list("step", "at"))
    last_step, last_at = told[-1] if told else (None, None)
    expected = 0 if last_step is None else last_step - (first or told[0][0]) + 1
    return RankRecord(
        rank=rank,
        last_step=last_step,
        last_at=last_at,
        steps=max(0, len(told) - 1),
        missing=expected - len(told),
        longest_gap_s=max((later - earlier for (_, earlier), (_, later) in itertools.pairwise(told)), default=0.0),
        finished=finished is not None,
    )
