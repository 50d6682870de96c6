"""A fleet in a database, in every state that a page can show. The browser tests run it as a script beside the server.

    python tests/fakes/shown_fleet.py seed            users, nodes, jobs, incidents, drills; prints their ids as JSON
    python tests/fakes/shown_fleet.py tell INC COUNT  adds entries to an incident's timeline and announces each
    python tests/fakes/shown_fleet.py step JOB COUNT  adds steps to a job's newest generation and announces them
    python tests/fakes/shown_fleet.py recover INC     ends an open incident with a receipt

The values are those of a small GPT on simulated GPUs; the loss is a formula of the step, so that a replay is bit-equal.
"""

# ruff: noqa: E402 (Django must be set up before models can be imported)

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

import django

django.setup()

from django.contrib.auth.models import User
from django.db import transaction

from recovery.domain.continuity import Verdict, VerdictKind
from recovery.domain.generations import FenceProof, ProofKind
from recovery.domain.incident import Cause, CauseKind, Incident, IncidentState
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.receipt import Receipt
from recovery.domain.timeline import Entry, EntryKind
from recovery.models import (
    CheckpointRow,
    Claim,
    Drill,
    GenerationRow,
    IncidentRow,
    Job,
    Node,
    RankRow,
    ShareRow,
    StepRow,
)
from recovery.store import to_json
from recovery.store.timelines import append_entries
from recovery.wakeup import announce

PASSWORD = "watch-the-curve"
FRESH_S = 3600.0
"""Contact and samples are dated this far ahead, so that a slow test does not see its fleet grow stale."""
GIB = 1024**3
STEP_TIME_S = 0.42

S = IncidentState


def loss_at(step: int) -> float:
    """A plausible curve: a power law with a ripple."""
    return 1.9 + 2.4 * (1 + step / 25) ** -0.55 + 0.05 * math.sin(step * 1.7) + 0.03 * math.sin(step * 0.61)


def seed() -> dict[str, str]:
    now = time.time()
    User.objects.create_superuser("operator", password=PASSWORD)
    for name in ("sweep", "beat"):
        Claim.objects.create(name=name, holder="web-1:100", until=now + FRESH_S, last_done_at=now + FRESH_S)
    nodes = _nodes(now)
    ids = {
        "steady": _recovered_job(nodes, now),
        "recovering": _recovering_job(nodes, now),
        "escalated": _escalated_job(nodes, now),
    }
    _other_jobs(now)
    return ids | {
        "recovered_incident": "inc_7k2m9x4tq8wd",
        "open_incident": "inc_3v8c5n2hj6rt",
        "escalated_incident": "inc_9p4d7s2kw5zx",
    }


def _nodes(now: float) -> dict[str, Node]:
    def node(
        name: str, rack: str, gpu_count: int, *, seen: int | None = None, age_s: float = -FRESH_S, **more: Any
    ) -> Node:
        number = int(name[-2:])
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
            "last_heard_at": now - age_s,
            "revision": 41,
            "seen_revision": 41,
            "gpus_at": now - age_s,
            "gpus": [_gpu(number, index, now - age_s) for index in range(gpu_count if seen is None else seen)],
        }
        return Node.objects.create(
            name=name,
            address=f"10.20.{number // 4}.{10 + number}",
            joined_at=now - 86_400 * 12,
            boot_id=f"boot-{name}",
            **usual | more,
        )

    return {
        made.name: made
        for made in (
            node("gpu-01", "r1", 4),
            node("gpu-02", "r1", 4),
            node("gpu-03", "r1", 4),
            node("gpu-04", "r2", 4),
            node("gpu-05", "r2", 4, age_s=252.0, session=""),
            node("gpu-06", "r2", 8, seen=7, unhealthy_reason="NVML sees 7 GPUs, expected 8; see runbook missing-gpu."),
            node("gpu-07", "r3", 4, cordoned=True),
            node(
                "gpu-08",
                "r3",
                4,
                last_heard_at=None,
                session="",
                gpus=[],
                gpus_at=None,
                connected_since=None,
                facts={},
                agent_version="",
            ),
            node("gpu-09", "r3", 4),
            node("gpu-10", "r3", 4),
            node("gpu-11", "r1", 4, revision=44, seen_revision=43),
        )
    }


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


def _job(job_id: str, name: str, state: str, now: float, **more: Any) -> Job:
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
            "nodes": 2,
            "ranks_per_node": 1,
            "total_steps": 2000,
            "checkpoint_directory": f"/srv/checkpoints/{name}",
        },
        **{"total_steps": 2000, "submitted_at": now - 3600, "state_since": now - 600} | more,
    )


def _generation(
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
) -> RecoveryPlan:
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
        fenced_at=stopped_at + 0.41 if stopped_at else None,
    )
    reached = steps[-1] if steps else None
    for rank, node in enumerate(nodes):
        ShareRow.objects.create(generation=row, node=node, node_rank=rank, seen="stopped" if stopped_at else "running")
        RankRow.objects.create(
            generation=row,
            rank=rank,
            node=node,
            pid=4000 + 10 * number + rank,
            started_at=started_at + 1.1,
            first_step_at=started_at + 4.3 if steps else None,
            last_step=reached,
            exited_at=stopped_at,
            signal=9 if stopped_at else None,
        )
    StepRow.objects.bulk_create(
        [
            _step(job, number, rank, step, started_at + 4.3 + (step - steps[0]) * STEP_TIME_S)
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


def _step(job: Job, generation: int, rank: int, step: int, at: float) -> StepRow:
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
    )


def _recovered_job(nodes: dict[str, Node], now: float) -> str:
    job = _job("job_2f6h9k3m7pqr", "tiny-gpt", "running", now, generation=2, last_step=312, started_at=now - 3500)
    pair = [nodes["gpu-01"], nodes["gpu-02"]]
    Node.objects.filter(name__in=("gpu-01", "gpu-02")).update(claimed_by=job)
    fault_at = now - 900
    _generation(
        job, 1, pair, now, parent=None, steps=range(1, 138), missing=range(62, 71), stopped_at=fault_at,
        started_at=fault_at - 138 * STEP_TIME_S,
    )  # fmt: skip
    parent = CheckpointRef(generation=1, step=120)
    plan = _generation(job, 2, pair, now, parent=parent, steps=range(121, 313), started_at=fault_at + 2.4)
    drill = _drill("drl_5t8w2x6y9zab", job, nodes["gpu-02"], now, state="passed", ended=True, requested_at=now - 905,
                   applied_at=fault_at, ended_at=now - 880, steps_after_save=10)  # fmt: skip
    incident = _incident(
        "inc_7k2m9x4tq8wd", job, S.RECOVERED, opened_at=fault_at + 0.19, fault_at=fault_at, drill=drill, plan=plan,
        ended_at=fault_at + 15.2, reached=137, node="gpu-02", rank=1,
    )  # fmt: skip
    _tell_recovered(incident, fault_at, plan, drill)
    Drill.objects.filter(pk=drill.pk).update(result={"passed": True, "reasons": [], "incident": incident.pk})
    return job.id


def _tell_recovered(incident: IncidentRow, fault_at: float, plan: RecoveryPlan, drill: Drill) -> None:
    one, two = plan.nodes
    story = [
        (EntryKind.STATE, 0.19, "Opened: generation 1 of job tiny-gpt lost rank 1.", {"to": "detected"}),
        (EntryKind.DRILL, 0.19, f"This is a drill ({drill.id}): kill-rank on rank 1, asked for by operator.", {}),
        (EntryKind.FAULT, 0.0, f"Rank 1 on {two} was killed by signal 9 (SIGKILL), after step 137.", {}),
        (EntryKind.STATE, 0.23, f"Stopping what is left of generation 1 on {one} and {two}.", {"to": "stopping"}),
        (EntryKind.ORDER, 0.24, f"Ordered {one} and {two} to stop generation 1 at once.", {}),
        (EntryKind.DECISION, 0.25, "Planned generation 2 from step 120 of generation 1 (the newest complete "
         f"checkpoint on the job's lineage) on {one} and {two}: the same nodes, each healthy and in contact.", {}),
        (EntryKind.FACT, 0.39, f"Rank 0 on {one} was killed by signal 9 (SIGKILL), after step 137.", {}),
        (EntryKind.PROOF, 0.41, f"Generation 1 is gone from {one}: its cgroup is empty.", {}),
        (EntryKind.PROOF, 0.44, f"Generation 1 is gone from {two}: its cgroup is empty.", {}),
        (EntryKind.STATE, 0.47, "Every old node is fenced; choosing and preparing nodes.", {"to": "placing"}),
        (EntryKind.FACT, 1.91, f"Prepared on {one} and {two}: fingerprints agree, port 20002 is reserved.", {}),
        (EntryKind.STATE, 2.39, "Both nodes are prepared; launching generation 2.", {"to": "launching"}),
        (EntryKind.ORDER, 2.40, f"Ordered {one} and {two} to run generation 2.", {}),
        (EntryKind.FACT, 6.02, "Both ranks resumed at step 120; model, optimizer, scheduler, sampler and rng are equal "
         "to the checkpoint.", {}),
        (EntryKind.STATE, 6.71, "Both ranks have made a step; comparing the replay.", {"to": "verifying"}),
        (EntryKind.FACT, 13.9, "Caught up: step 138 is done on every rank.", {}),
        (EntryKind.RECEIPT, 15.2, "Recovered as generation 2: continuity bit-equal, 17 steps compared, 17 steps lost "
         "and done again.", {}),
        (EntryKind.STATE, 15.2, f"The job trains on {one} and {two}, proven bit-equal.", {"to": "recovered"}),
        (EntryKind.DRILL, 15.3, f"Drill {drill.id} passed: the promise was kept.", {}),
    ]  # fmt: skip
    entries = [Entry(kind=kind, at=fault_at + after_s, text=text, data=data) for kind, after_s, text, data in story]
    append_entries(incident.pk, entries)
    incident.receipt = to_json(_receipt(incident, plan, fault_at))
    incident.save(update_fields=["receipt"])


def _receipt(incident: IncidentRow, plan: RecoveryPlan, fault_at: float) -> Receipt:
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
        cause=Cause(kind=CauseKind.RANK_KILLED, rank=1, node=plan.nodes[-1], sentence=body["cause"]["sentence"]),
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
        attempts=0,
        fences=tuple(
            FenceProof(node=node, kind=ProofKind.CGROUP_EMPTY, at=fault_at + 0.4, evidence="cgroup: populated 0")
            for node in plan.nodes
        ),
        issued_at=fault_at + 15.2,
    )


def _incident(
    incident_id: str,
    job: Job,
    state: IncidentState,
    *,
    opened_at: float,
    fault_at: float,
    reached: int,
    node: str,
    rank: int,
    drill: Drill | None = None,
    plan: RecoveryPlan | None = None,
    ended_at: float | None = None,
    escalation: str = "",
    attempt: int = 0,
) -> IncidentRow:
    incident = Incident(
        id=incident_id,
        job=job.id,
        broken_generation=1,
        state=state,
        opened_at=opened_at,
        fault_at=fault_at,
        state_since=ended_at or opened_at + 6,
        deadline_at=None if ended_at or state is S.ESCALATED else time.time() + 840,
        cause=Cause(
            kind=CauseKind.RANK_KILLED,
            rank=rank,
            node=node,
            sentence=f"Rank {rank} on {node} was killed by signal 9 (SIGKILL), after step {reached}.",
        ),
        drill=drill.pk if drill else None,
        reached_step=reached,
        plan=plan,
        attempt=attempt,
        escalation=escalation,
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


def _recovering_job(nodes: dict[str, Node], now: float) -> str:
    job = _job("job_8s4t7v2w6xyz", "llm-7b-pretrain", "recovering", now, generation=2, last_step=84,
               started_at=now - 900)  # fmt: skip
    pair = [nodes["gpu-03"], nodes["gpu-04"]]
    Node.objects.filter(name__in=("gpu-03", "gpu-04")).update(claimed_by=job)
    fault_at = now - 9
    _generation(job, 1, pair, now, parent=None, steps=range(1, 85), stopped_at=fault_at, started_at=fault_at - 60)
    parent = CheckpointRef(generation=1, step=80)
    plan = _generation(job, 2, pair, now, parent=parent, steps=range(81, 83), started_at=fault_at + 2.2)
    drill = _drill("drl_3g7h9j2k4mnp", job, nodes["gpu-04"], now, state="applied", requested_at=now - 12,
                   applied_at=fault_at)  # fmt: skip
    row = _incident("inc_3v8c5n2hj6rt", job, S.VERIFYING, opened_at=fault_at + 0.2, fault_at=fault_at, drill=drill,
                    plan=plan, reached=84, node="gpu-04", rank=1)  # fmt: skip
    story = [
        (EntryKind.STATE, 0.2, "Opened: generation 1 of job llm-7b-pretrain lost rank 1.", "detected"),
        (EntryKind.DRILL, 0.2, f"This is a drill ({drill.id}): kill-rank on rank 1, asked for by operator.", ""),
        (EntryKind.FAULT, 0.0, "Rank 1 on gpu-04 was killed by signal 9 (SIGKILL), after step 84.", ""),
        (EntryKind.STATE, 0.3, "Stopping what is left of generation 1 on gpu-03 and gpu-04.", "stopping"),
        (EntryKind.PROOF, 0.5, "Generation 1 is gone from gpu-03: its cgroup is empty.", ""),
        (EntryKind.PROOF, 0.6, "Generation 1 is gone from gpu-04: its cgroup is empty.", ""),
        (EntryKind.STATE, 0.7, "Every old node is fenced; choosing and preparing nodes.", "placing"),
        (EntryKind.STATE, 2.1, "Both nodes are prepared; launching generation 2.", "launching"),
        (EntryKind.STATE, 6.4, "Both ranks have made a step; comparing the replay.", "verifying"),
    ]
    append_entries(
        row.pk,
        [
            Entry(kind=kind, at=fault_at + after_s, text=text, data={"to": to} if to else {})
            for kind, after_s, text, to in story
        ],
    )
    return job.id


def _escalated_job(nodes: dict[str, Node], now: float) -> str:
    job = _job("job_5b9c3d7f2ghk", "bert-large-finetune", "recovering", now, generation=3, last_step=402,
               started_at=now - 7000)  # fmt: skip
    pair = [nodes["gpu-09"], nodes["gpu-10"]]
    Node.objects.filter(name__in=("gpu-09", "gpu-10")).update(claimed_by=job)
    fault_at = now - 1900
    _generation(job, 1, pair, now, parent=None, steps=range(1, 412), stopped_at=fault_at, started_at=fault_at - 200)
    parent = CheckpointRef(generation=1, step=400)
    _generation(job, 2, pair, now, parent=parent, steps=range(401, 409), stopped_at=fault_at + 40,
                started_at=fault_at + 3)  # fmt: skip
    GenerationRow.objects.filter(job=job, number=2).update(broken_continuity=True)
    plan = _generation(job, 3, pair, now, parent=CheckpointRef(generation=1, step=380), steps=range(381, 392),
                       stopped_at=fault_at + 90, started_at=fault_at + 45)  # fmt: skip
    row = _incident(
        "inc_9p4d7s2kw5zx", job, S.ESCALATED, opened_at=fault_at + 0.2, fault_at=fault_at, plan=plan, reached=411,
        node="gpu-10", rank=1, attempt=2,
        escalation="Continuity broke twice: after the load the optimizer is not what the checkpoint holds. "
        "Check that the script restores its optimizer, then try again.",
    )  # fmt: skip
    story = [
        (EntryKind.STATE, 0.2, "Opened: generation 1 of job bert-large-finetune lost rank 1.", "detected"),
        (EntryKind.FAULT, 0.0, "Rank 1 on gpu-10 was killed by signal 9 (SIGKILL), after step 411.", ""),
        (EntryKind.STATE, 0.3, "Stopping what is left of generation 1 on gpu-09 and gpu-10.", "stopping"),
        (EntryKind.STATE, 0.9, "Every old node is fenced; choosing and preparing nodes.", "placing"),
        (EntryKind.STATE, 3.0, "Both nodes are prepared; launching generation 2.", "launching"),
        (EntryKind.STATE, 8.1, "Both ranks have made a step; comparing the replay.", "verifying"),
        (
            EntryKind.FAULT,
            9.0,
            "Rank 0: the optimizer was not restored to what the checkpoint holds.",
            "",
        ),
        (EntryKind.STATE, 9.2, "Rolling back further, to step 380 of generation 1.", "stopping"),
        (EntryKind.STATE, 42.0, "Every old node is fenced; choosing and preparing nodes.", "placing"),
        (EntryKind.STATE, 45.0, "Both nodes are prepared; launching generation 3.", "launching"),
        (EntryKind.STATE, 51.0, "Both ranks have made a step; comparing the replay.", "verifying"),
        (EntryKind.STATE, 90.0, "Needs a human: continuity broke twice.", "escalated"),
        (EntryKind.PAGE, 90.0, "Paged the operators: continuity broke twice.", ""),
    ]
    append_entries(
        row.pk,
        [
            Entry(kind=kind, at=fault_at + after_s, text=text, data={"to": to} if to else {})
            for kind, after_s, text, to in story
        ],
    )
    return job.id


def _other_jobs(now: float) -> None:
    _job("job_4k8m2n6p9qrs", "vit-b16-imagenet", "succeeded", now, generation=1, last_step=2000,
         submitted_at=now - 90_000, started_at=now - 89_000, ended_at=now - 70_000)  # fmt: skip
    job = _job("job_6w2x9y4z7abc", "resnet-sweep-14", "failed", now, generation=3, last_step=51,
               submitted_at=now - 200_000, started_at=now - 199_000, ended_at=now - 198_000,
               reason="All ranks failed at step 52 in three generations: RuntimeError: shape mismatch.")  # fmt: skip
    _job("job_7d3f8g2h5jkm", "tiny-gpt-ablation", "pending", now, submitted_at=now - 40, last_step=None,
         reason="Waiting for nodes: 1 of 2 ready nodes is free.")  # fmt: skip
    node = Node.objects.get(name="gpu-03")
    for index, (state, reasons) in enumerate(
        (
            ("failed", ["Recovery took 148.2 s; promised were 120 s."]),
            ("refused", ["The agent's policy does not allow faults on this node."]),
            ("expired", ["The agent did not apply the fault in time."]),
        )
    ):
        _drill(f"drl_{index}p{index}q{index}r{index}s2t4v", job, node, now, state=state, ended=True,
               requested_at=now - 200_000 - 7000 * index, ended_at=now - 199_000 - 7000 * index,
               result={"passed": False, "reasons": reasons, "incident": None})  # fmt: skip


def _drill(drill_id: str, job: Job, node: Node, now: float, **more: Any) -> Drill:
    return Drill.objects.create(
        id=drill_id,
        kind="kill-rank",
        job=job,
        node=node,
        generation_number=1,
        rank=1,
        promise={"recovered_within_s": 120.0, "continuity": "proven"},
        requested_by="operator",
        not_after=now + 120,
        **more,
    )


def tell(incident_id: str, count: int) -> None:
    """A burst: all entries at once, each with an announcement of its own."""
    with transaction.atomic():
        for index in range(count):
            entry = Entry(kind=EntryKind.FACT, at=time.time(), text=f"Told entry {index + 1} of {count}.")
            announce(f"incident:{incident_id}", append_entries(incident_id, [entry]))


def step(job_id: str, count: int) -> None:
    job = Job.objects.get(pk=job_id)
    last = job.last_step or 0
    for number in range(last + 1, last + count + 1):
        StepRow.objects.bulk_create([_step(job, job.generation, rank, number, time.time()) for rank in (0, 1)])
        Job.objects.filter(pk=job_id).update(last_step=number)
        announce(f"job:{job_id}", number)


def recover(incident_id: str) -> None:
    with transaction.atomic():
        row = IncidentRow.objects.select_related("job").get(pk=incident_id)
        now = time.time()
        plan = RecoveryPlan(
            **row.body["plan"] | {"parent": CheckpointRef(**row.body["plan"]["parent"]), "nodes": ("gpu-03", "gpu-04")}
        )
        row.state, row.ended, row.ended_at, row.version = S.RECOVERED.value, True, now, row.version + 1
        row.receipt = to_json(_receipt(row, plan, row.body["fault_at"]))
        row.save()
        Job.objects.filter(pk=row.job_id).update(state="running", version=row.job.version + 1)
        entry = Entry(kind=EntryKind.STATE, at=now, text="The job trains again, proven bit-equal.",
                      data={"to": S.RECOVERED.value})  # fmt: skip
        announce(f"incident:{incident_id}", append_entries(incident_id, [entry]))


def main(arguments: list[str]) -> None:
    match arguments:
        case ["seed"]:
            print(json.dumps(seed()))
        case ["tell", incident, count]:
            tell(incident, int(count))
        case ["step", job, count]:
            step(job, int(count))
        case ["recover", incident]:
            recover(incident)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
