"""Builders of the rows that make up a shown fleet: see `shown_fleet`, which sets Django up and imports them."""

from __future__ import annotations

import math
import time
from typing import Any

from recovery.domain.continuity import Verdict, VerdictKind
from recovery.domain.drill_kinds import KINDS, PromiseKind
from recovery.domain.generations import FenceProof, ProofKind
from recovery.domain.incident import Cause, CauseKind, Incident, IncidentState
from recovery.domain.plan import CheckpointRef, LeaseLimits, RecoveryPlan
from recovery.domain.receipt import Receipt
from recovery.models import (
    CheckpointRow,
    Drill,
    GenerationRow,
    IncidentRow,
    Job,
    Node,
    Observer,
    RankRow,
    ShareRow,
    StepRow,
)
from recovery.store import to_json

FRESH_S = 3600.0
"""Contact and samples are dated this far ahead, so that a slow test does not see its fleet grow stale."""
GIB = 1024**3
STEP_TIME_S = 0.42

HEARING, SILENCES = "web-1", "web-2"
"""The observers: see `make_observers`."""

S = IncidentState


def loss_at(step: int) -> float:
    """A plausible curve: a power law with a ripple."""
    return 1.9 + 2.4 * (1 + step / 25) ** -0.55 + 0.05 * math.sin(step * 1.7) + 0.03 * math.sin(step * 0.61)


def make_observers(now: float) -> None:
    """The web process that hears the fleet, and one whose lag is as large as its beat is early.

    Silences that the second one judges stay as long as they were when the fleet was made, however slow a test is.
    """
    for name, lag_s in ((HEARING, 0.0), (SILENCES, FRESH_S)):
        Observer.objects.create(name=name, since=now - 86_400, beat_at=now + FRESH_S, lag_s=lag_s)


def make_node(
    name: str,
    rack: str,
    gpu_count: int,
    now: float,
    *,
    seen: int | None = None,
    silent_s: float | None = None,
    **more: Any,
) -> Node:
    """A node in contact, or one that has been silent for some seconds."""
    number = int(name[-2:])
    heard_at = now + FRESH_S if silent_s is None else now - silent_s
    usual: dict[str, Any] = {
        "agent_version": "0.1.0",
        "facts": {
            "hostname": f"{name}.train.example",
            "rack": rack,
            "cpu_count": 192,
            "memory_bytes": 2048 * GIB,
            "gpu_count": gpu_count,
            "gpu_model": "NVIDIA H200",
            "slots": gpu_count,
        },
        "session": f"ses-{name}",
        "connected_since": now - 5 * 3600,
        "last_heard_at": heard_at,
        "observer": HEARING if silent_s is None else SILENCES,
        "protocol": 2,
        "revision": 41,
        "seen_revision": 41,
        "gpus_at": heard_at,
        "gpus": [_gpu(number, index, heard_at) for index in range(gpu_count if seen is None else seen)],
    }
    return Node.objects.create(
        name=name,
        address=f"10.20.{number // 4}.{10 + number}",
        joined_at=now - 86_400 * 12,
        boot_id=f"boot-{name}",
        **usual | more,
    )


def _gpu(node: int, index: int, at: float) -> dict[str, Any]:
    busy = node in (1, 2, 3, 4)
    return {
        "uuid": f"GPU-{node:02d}{index:02d}5f1e-7c2a-4e0b-9d3a-51c7f0a2b{index:03d}",
        "index": index,
        "at": at,
        "name": "NVIDIA H200",
        "utilization_percent": 91.0 + index if busy else 0.0,
        "memory_used_bytes": int((118 + index) * GIB) if busy else 512 * 1024**2,
        "memory_total_bytes": 141 * GIB,
        "temperature_c": 61.0 + 2 * index if busy else 34.0,
        "power_w": 612.0 + 7 * index if busy else 78.0,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1980.0 if busy else None,
        "problem": "",
    }


def make_job(job_id: str, name: str, state: str, now: float, *, nodes: int | dict[str, int] = 2, **more: Any) -> Job:
    """A job of which no generation was made yet."""
    return Job.objects.create(
        id=job_id,
        name=name,
        owner="operator",
        state=state,
        spec={
            "name": name,
            "argv": ["/opt/train/bin/python", "examples/train_tiny_gpt.py", "--steps", "2000"],
            "working_directory": "/srv/train/tiny-gpt",
            "environment": {},
            "nodes": nodes,
            "ranks_per_node": 1,
            "total_steps": 2000,
            "checkpoint_directory": f"/srv/checkpoints/{name}",
        },
        **{"total_steps": 2000, "submitted_at": now - 3600, "state_since": now - 600} | more,
    )


def make_generation(
    job: Job,
    number: int,
    nodes: list[Node],
    now: float,
    *,
    parent: CheckpointRef | None,
    steps: range,
    missing: range = range(0),
    stopped_at: float | None = None,
    started_at: float,
    unproven: tuple[str, ...] = (),
    lease: LeaseLimits | None = None,
) -> RecoveryPlan:
    """A generation with its shares, ranks, steps and checkpoints; stopped, each share is proven but the `unproven`."""
    lease = lease or LeaseLimits()
    plan = RecoveryPlan(
        job=job.id,
        generation=number,
        plan_id=f"plan_{job.id[-4:]}{number}",
        run_id=f"run-{job.id[-4:]}-{number}",
        nodes=tuple(node.name for node in nodes),
        ranks_per_node=1,
        master_address=nodes[0].address,
        parent=parent,
        parent_reason="the newest complete checkpoint on the job's lineage" if parent else "the beginning of the job",
        placement_reason="the same nodes: each is healthy and in contact." if number > 1 else "the first ready nodes.",
        lease=lease,
    )
    row = GenerationRow.objects.create(
        job=job,
        number=number,
        plan_id=plan.plan_id,
        plan=to_json(plan),
        wanted="stop" if stopped_at else "run",
        master_port=20_000 + number,
        created_at=started_at - 1.2,
        run_ordered_at=started_at,
        stop_ordered_at=stopped_at,
        fenced_at=stopped_at + 0.41 if stopped_at and not unproven else None,
        lease=to_json(lease),
    )
    reached = steps[-1] if steps else None
    for rank, node in enumerate(nodes):
        gone_at = None if node.name in unproven else stopped_at
        proof = None if gone_at is None else _emptied(node.name, number, gone_at + 0.4)
        ShareRow.objects.create(
            generation=row,
            node=node,
            node_rank=rank,
            seen="running" if gone_at is None else "stopped",
            proof=None if proof is None else to_json(proof),
            confirmed_at=None if proof is None else proof.at,
            reported_at=proof.at if proof else now,
            boot_id=node.boot_id,
            keeps_lease=True,
        )
        RankRow.objects.create(
            generation=row,
            rank=rank,
            node=node,
            pid=4000 + 10 * number + rank,
            started_at=started_at + 1.1,
            resumed_at=started_at + 3.8 if steps else None,
            resumed_step=steps[0] - 1 if steps else None,
            first_step_at=started_at + 4.3 if steps else None,
            last_step=reached,
            phase="step" if steps else "setup",
            phase_at=started_at + 3.8,
            progress_at=gone_at or now + FRESH_S,
            pace_s=STEP_TIME_S,
            exited_at=gone_at,
            signal=None if gone_at is None else 9,
        )
    StepRow.objects.bulk_create(
        [
            make_step(job, number, rank, step, started_at + 4.3 + (step - steps[0]) * STEP_TIME_S)
            for rank in range(len(nodes))
            for step in steps
            if step not in missing
        ]
    )
    for step in range((steps[0] if steps else 0) // 20 * 20 + 20, (reached or 0) + 1, 20):
        CheckpointRow.objects.create(
            job=job,
            generation_number=number,
            step=step,
            directory=f"/srv/checkpoints/{job.name}/g{number}/step-{step:08d}",
            size_bytes=38_412_288,
            world_size=len(nodes),
            parent_generation=parent.generation if parent else None,
            parent_step=parent.step if parent else None,
            saved_at=started_at + 4.3 + (step - steps[0]) * STEP_TIME_S,
            save_time_s=0.31,
        )
    return plan


def _emptied(node: str, generation: int, at: float) -> FenceProof:
    group = f"/sys/fs/cgroup/everstep/{node}-g{generation}"
    return FenceProof(
        node=node,
        kind=ProofKind.CGROUP_EMPTY,
        at=at,
        evidence=f"{group}/cgroup.events: populated 0, 12 ms after cgroup.kill; no process carries the mark",
        generation=generation,
    )


def make_step(job: Job, generation: int, rank: int, step: int, at: float) -> StepRow:
    warm = min(1.0, step / 100)
    return StepRow(
        job=job,
        generation_number=generation,
        rank=rank,
        step=step,
        at=at,
        loss=loss_at(step),
        learning_rate=3e-4 * warm * (0.55 + 0.45 * math.cos(math.pi * min(step, 2000) / 2000)),
        grad_norm=0.8 + 1.6 / (1 + step / 40) + 0.08 * math.sin(step),
        epoch=step // 400,
        span_start=(step - 1) * 64,
        span_stop=step * 64,
        step_time_s=STEP_TIME_S + 0.02 * math.sin(step / 3) + (0.3 if step % 20 == 0 else 0.0),
        samples=32,
        data_s=0.03,
        forward_backward_s=STEP_TIME_S - 0.08 + 0.02 * math.sin(step / 3) + (0.3 if step % 20 == 0 else 0.0),
        optimizer_s=0.05,
        checkpoint_s=0.31 if step % 20 == 1 else None,
        memory_bytes=2_100_000_000 if step % 5 == 0 else None,
    )


def make_drill(
    drill_id: str, job: Job, node: Node | None, now: float, *, kind: str = "kill-rank", **more: Any
) -> Drill:
    """A drill with the usual promise of its kind."""
    promised = KINDS[kind].promise
    within = {"recovered_within_s": 120.0, "continuity": "proven"} if promised is PromiseKind.RECOVERED else {}
    return Drill.objects.create(
        id=drill_id,
        kind=kind,
        job=job,
        node=node,
        generation_number=1,
        rank=None if node is None else 1,
        duration_s=KINDS[kind].duration_s,
        promise={"kind": promised.value, **within},
        requested_by="operator",
        not_after=now + 120,
        **more,
    )


def killed(rank: int, node: str, reached: int) -> Cause:
    """The cause of most stories here."""
    sentence = f"Rank {rank} on {node} was killed by signal 9 (SIGKILL), after step {reached}."
    return Cause(kind=CauseKind.RANK_KILLED, rank=rank, node=node, sentence=sentence)


def make_incident(
    incident_id: str,
    job: Job,
    state: IncidentState,
    *,
    opened_at: float,
    fault_at: float,
    reached: int,
    cause: Cause,
    drill: Drill | None = None,
    plan: RecoveryPlan | None = None,
    ended_at: float | None = None,
    escalation: str = "",
    attempt: int = 0,
    stop_ordered: bool = True,
) -> IncidentRow:
    incident = Incident(
        id=incident_id,
        job=job.id,
        broken_generation=1,
        state=state,
        opened_at=opened_at,
        fault_at=fault_at,
        state_since=ended_at or opened_at + 6,
        deadline_at=None if ended_at or state in (S.ESCALATED, S.WAITING_FOR_FENCE) else time.time() + 840,
        cause=cause,
        drill=drill.pk if drill else None,
        reached_step=reached,
        plan=plan,
        attempt=attempt,
        escalation=escalation,
        stop_ordered=stop_ordered,
    )
    return IncidentRow.objects.create(
        id=incident.id,
        job=job,
        state=state.value,
        ended=ended_at is not None,
        opened_at=opened_at,
        ended_at=ended_at,
        deadline_at=incident.deadline_at,
        drill=drill,
        body=to_json(incident),
        version=7,
    )


def make_receipt(incident: IncidentRow, plan: RecoveryPlan, fault_at: float) -> Receipt:
    body = incident.body
    parent_step = plan.parent.step if plan.parent else 0
    lost = body["reached_step"] - parent_step
    return Receipt(
        incident=incident.pk,
        job=plan.job,
        state="recovered",
        verdict=Verdict(
            kind=VerdictKind.BIT_EQUAL,
            findings=(
                "The restored model, optimizer, rng, sampler and scheduler are what the checkpoint holds.",
                f"{lost} replayed steps are bit-equal on every rank.",
            ),
            steps_compared=lost,
            steps_lost=lost,
            caught_up=True,
            digest_parts=("model", "optimizer", "rng", "sampler", "scheduler"),
        ),
        cause=killed(1, plan.nodes[-1], body["reached_step"]),
        drill=incident.drill_id,
        broken_generation=plan.generation - 1,
        generation=plan.generation,
        old_nodes=plan.nodes,
        new_nodes=plan.nodes,
        parent=plan.parent,
        reached_step=body["reached_step"],
        detect_s=0.19,
        stop_s=0.44,
        launch_s=2.40,
        first_step_s=6.71,
        caught_up_s=13.9,
        total_s=15.2,
        attempts=1,
        fences=tuple(_emptied(node, plan.generation - 1, fault_at + 0.4) for node in plan.nodes),
        issued_at=fault_at + 15.2,
    )
