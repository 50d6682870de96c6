"""A fleet in a database, in every state that a page can show. The browser tests run it as a script beside the server.

    python tests/fakes/shown_fleet.py seed            users, nodes, jobs, incidents, drills; prints their ids as JSON
    python tests/fakes/shown_fleet.py tell INC COUNT  adds entries to an incident's timeline and announces each
    python tests/fakes/shown_fleet.py step JOB COUNT  adds steps to a job's newest generation and announces them
    python tests/fakes/shown_fleet.py recover INC     ends an open incident with a receipt
    python tests/fakes/shown_fleet.py breaker         half of the fleet falls silent at once
    python tests/fakes/shown_fleet.py contact         and comes back
    python tests/fakes/shown_fleet.py return NODE JOB a silent node comes back and proves that the job is gone from it

The values are those of a small GPT on simulated GPUs; the loss is a formula of the step, so that a replay is bit-equal.
"""

# ruff: noqa: E402 (Django must be set up before models can be imported)

from __future__ import annotations

import json
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
from shown_absence import node_returns, open_breaker, restore_contact, seed_absence
from shown_rows import (
    FRESH_S,
    STEP_TIME_S,
    S,
    killed,
    make_drill,
    make_generation,
    make_incident,
    make_job,
    make_node,
    make_observers,
    make_receipt,
    make_step,
)

from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.timeline import Entry, EntryKind
from recovery.models import Claim, Drill, GenerationRow, IncidentRow, Job, Node, StepRow
from recovery.store import to_json
from recovery.store.timelines import append_entries
from recovery.wakeup import announce

PASSWORD = "watch-the-curve"


def seed() -> dict[str, str]:
    now = time.time()
    User.objects.create_superuser("operator", password=PASSWORD)
    for name in ("sweep", "beat"):
        Claim.objects.create(name=name, holder="web-1:100", until=now + FRESH_S, last_done_at=now + FRESH_S)
    make_observers(now)
    nodes = _nodes(now)
    ids = {
        "steady": _recovered_job(nodes, now),
        "recovering": _recovering_job(nodes, now),
        "escalated": _escalated_job(nodes, now),
    }
    _other_jobs(now)
    ids |= seed_absence(now)
    _node_drills(nodes, now)
    return ids | {
        "recovered_incident": "inc_7k2m9x4tq8wd",
        "open_incident": "inc_3v8c5n2hj6rt",
        "escalated_incident": "inc_9p4d7s2kw5zx",
    }


def _nodes(now: float) -> dict[str, Node]:
    unseen: dict[str, Any] = {
        "last_heard_at": None, "session": "", "gpus": [], "gpus_at": None, "connected_since": None, "facts": {},
        "agent_version": "", "observer": "",
    }  # fmt: skip
    missing = "NVML sees 7 GPUs, expected 8; see runbook missing-gpu."
    made = (
        make_node("gpu-01", "r1", 4, now),
        make_node("gpu-02", "r1", 4, now),
        make_node("gpu-03", "r1", 4, now),
        make_node("gpu-04", "r2", 4, now),
        make_node("gpu-05", "r2", 4, now, silent_s=252.0, session=""),
        make_node("gpu-06", "r2", 8, now, seen=7, unhealthy_reason=missing),
        make_node("gpu-07", "r3", 4, now, cordoned=True),
        make_node("gpu-08", "r3", 4, now, **unseen),
        make_node("gpu-09", "r3", 4, now),
        make_node("gpu-10", "r3", 4, now),
        make_node("gpu-11", "r1", 4, now, revision=44, seen_revision=43),
    )
    return {node.name: node for node in made}


def _recovered_job(nodes: dict[str, Node], now: float) -> str:
    job = make_job("job_2f6h9k3m7pqr", "tiny-gpt", "running", now, generation=2, last_step=312, started_at=now - 3500)
    pair = [nodes["gpu-01"], nodes["gpu-02"]]
    Node.objects.filter(name__in=("gpu-01", "gpu-02")).update(claimed_by=job)
    fault_at = now - 900
    make_generation(
        job, 1, pair, now, parent=None, steps=range(1, 138), missing=range(62, 71), stopped_at=fault_at,
        started_at=fault_at - 138 * STEP_TIME_S,
    )  # fmt: skip
    parent = CheckpointRef(generation=1, step=120)
    plan = make_generation(job, 2, pair, now, parent=parent, steps=range(121, 313), started_at=fault_at + 2.4)
    drill = make_drill("drl_5t8w2x6y9zab", job, nodes["gpu-02"], now, state="passed", ended=True,
                       requested_at=now - 905, applied_at=fault_at, ended_at=now - 880,
                       steps_after_save=10)  # fmt: skip
    incident = make_incident(
        "inc_7k2m9x4tq8wd", job, S.RECOVERED, opened_at=fault_at + 0.19, fault_at=fault_at, drill=drill, plan=plan,
        ended_at=fault_at + 15.2, reached=137, cause=killed(1, "gpu-02", 137),
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
        (EntryKind.PROOF, 0.41, f"Generation 1 is gone from {one}: its control group is empty.", _proof(one)),
        (EntryKind.PROOF, 0.44, f"Generation 1 is gone from {two}: its control group is empty.", _proof(two)),
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
    incident.receipt = to_json(make_receipt(incident, plan, fault_at))
    incident.save(update_fields=["receipt"])


def _proof(node: str) -> dict[str, str]:
    return {"node": node, "proof": "cgroup_empty", "evidence": f"/sys/fs/cgroup/everstep/{node}-g1: populated 0"}


def _recovering_job(nodes: dict[str, Node], now: float) -> str:
    job = make_job("job_8s4t7v2w6xyz", "llm-7b-pretrain", "recovering", now, generation=2, last_step=84,
               started_at=now - 900)  # fmt: skip
    pair = [nodes["gpu-03"], nodes["gpu-04"]]
    Node.objects.filter(name__in=("gpu-03", "gpu-04")).update(claimed_by=job)
    fault_at = now - 9
    make_generation(job, 1, pair, now, parent=None, steps=range(1, 85), stopped_at=fault_at, started_at=fault_at - 60)
    parent = CheckpointRef(generation=1, step=80)
    plan = make_generation(job, 2, pair, now, parent=parent, steps=range(81, 83), started_at=fault_at + 2.2)
    drill = make_drill("drl_3g7h9j2k4mnp", job, nodes["gpu-04"], now, state="applied", requested_at=now - 12,
                   applied_at=fault_at)  # fmt: skip
    row = make_incident("inc_3v8c5n2hj6rt", job, S.VERIFYING, opened_at=fault_at + 0.2, fault_at=fault_at, drill=drill,
                    plan=plan, reached=84, cause=killed(1, "gpu-04", 84))  # fmt: skip
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
    job = make_job("job_5b9c3d7f2ghk", "bert-large-finetune", "recovering", now, generation=3, last_step=402,
               started_at=now - 7000)  # fmt: skip
    pair = [nodes["gpu-09"], nodes["gpu-10"]]
    Node.objects.filter(name__in=("gpu-09", "gpu-10")).update(claimed_by=job)
    fault_at = now - 1900
    make_generation(job, 1, pair, now, parent=None, steps=range(1, 412), stopped_at=fault_at, started_at=fault_at - 200)
    parent = CheckpointRef(generation=1, step=400)
    make_generation(job, 2, pair, now, parent=parent, steps=range(401, 409), stopped_at=fault_at + 40,
                started_at=fault_at + 3)  # fmt: skip
    GenerationRow.objects.filter(job=job, number=2).update(broken_continuity=True)
    plan = make_generation(job, 3, pair, now, parent=CheckpointRef(generation=1, step=380), steps=range(381, 392),
                       stopped_at=fault_at + 90, started_at=fault_at + 45)  # fmt: skip
    row = make_incident(
        "inc_9p4d7s2kw5zx", job, S.ESCALATED, opened_at=fault_at + 0.2, fault_at=fault_at, plan=plan, reached=411,
        cause=killed(1, "gpu-10", 411), attempt=2,
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
    make_job("job_4k8m2n6p9qrs", "vit-b16-imagenet", "succeeded", now, generation=1, last_step=2000,
         submitted_at=now - 90_000, started_at=now - 89_000, ended_at=now - 70_000)  # fmt: skip
    job = make_job("job_6w2x9y4z7abc", "resnet-sweep-14", "failed", now, generation=3, last_step=51,
               submitted_at=now - 200_000, started_at=now - 199_000, ended_at=now - 198_000,
               reason="All ranks failed at step 52 in three generations: RuntimeError: shape mismatch.")  # fmt: skip
    make_job("job_7d3f8g2h5jkm", "tiny-gpt-ablation", "pending", now, submitted_at=now - 40, last_step=None,
         reason="Waiting for nodes: 1 of 2 ready nodes is free.")  # fmt: skip
    node = Node.objects.get(name="gpu-03")
    for index, (state, reasons, numbers) in enumerate(
        (
            ("failed", ["Recovery took 148.2 s; promised were 120 s."], {}),
            ("refused", ["The agent's policy does not allow faults on this node."], {}),
            ("expired", ["The agent did not apply the fault in time."], {}),
            ("failed", ["Its incident was cancelled before it had recovered."], {}),
        )
    ):
        make_drill(f"drl_{index}p{index}q{index}r{index}s2t4v", job, node, now, state=state, ended=True,
               requested_at=now - 200_000 - 7000 * index, ended_at=now - 199_000 - 7000 * index,
               result={"passed": False, "reasons": reasons, "incident": None, **numbers})  # fmt: skip


def _node_drills(nodes: dict[str, Node], now: float) -> None:
    """Drills of whole nodes and of the server: one that is frozen still, and two that kept their promise."""
    frozen = Job.objects.get(pk="job_9v4h7c2m6dqs")
    make_drill("drl_8f4z2k6m3wxc", frozen, Node.objects.get(name="gpu-18"), now, kind="freeze-node", state="applied",
               requested_at=now - 20, applied_at=now - 18,
               detail="SIGSTOP for agent, runner and 1 rank")  # fmt: skip
    job = Job.objects.get(pk="job_2f6h9k3m7pqr")
    unharmed = {"passed": True, "reasons": [], "incident": None, "steps_lost": 0, "events_lost": 0, "incidents": 0,
                "largest_step_gap_s": 0.72}  # fmt: skip
    make_drill("drl_2d9s5v7n4hqk", job, None, now, kind="server-down", state="passed", ended=True,
               requested_at=now - 7200, applied_at=now - 7199, undone_at=now - 7168, ended_at=now - 7150,
               result=unharmed)  # fmt: skip
    recovered = {"passed": True, "reasons": [], "incident": None, "steps_lost": 17, "recovered_s": 41.6,
                 "fence_s": 27.4}  # fmt: skip
    make_drill("drl_6k3j8r2t9bvm", job, nodes["gpu-02"], now, kind="kill-agent", state="passed", ended=True,
               requested_at=now - 9000, applied_at=now - 8999, undone_at=now - 8909, ended_at=now - 8900,
               result=recovered)  # fmt: skip


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
        StepRow.objects.bulk_create([make_step(job, job.generation, rank, number, time.time()) for rank in (0, 1)])
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
        row.receipt = to_json(make_receipt(row, plan, row.body["fault_at"]))
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
        case ["breaker"]:
            open_breaker()
        case ["contact"]:
            restore_contact()
        case ["return", node, job]:
            node_returns(node, job)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
