"""Rows for tests of queries, API and CLI: a job that was broken once and recovered, told in numbers that are easy to
check."""

from __future__ import annotations

import time
from typing import Any

from django.contrib.auth.models import User
from django.test import Client

from recovery.access import create_api_token
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
    TimelineEntry,
)

T0 = 1_900_000_000.0
"""2030-03-17T17:46:40Z"""


def make_user(name: str = "operator", password: str = "correct horse") -> User:
    return User.objects.create_user(name, password=password)


class Caller:
    """A client with a bearer token; JSON both ways."""

    def __init__(self, user: User | None = None) -> None:
        self.user = user or make_user()
        self.token = create_api_token(user=self.user, name="test")
        self.client = Client(headers={"Authorization": f"Bearer {self.token}"}, raise_request_exception=False)

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(path, query)

    def post(self, path: str, body: Any, *, key: str | None = None) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        return self.client.post(path, body, content_type="application/json", headers=headers)


OBSERVER = "web-1"
LEEWAY_S = 600.0
"""Its beat is dated ahead and its lag taken off again: silences stay as they were made, however slow a test is."""


def make_observer(now: float) -> None:
    """The web process that hears every node that is made here; it beat at this moment."""
    Observer.objects.update_or_create(
        name=OBSERVER, defaults={"since": now - 3600, "beat_at": now + LEEWAY_S, "lag_s": LEEWAY_S}
    )


def make_node(name: str, *, now: float | None = None, **fields: Any) -> Node:
    """A node in contact, and the observer that hears it."""
    now = time.time() if now is None else now
    make_observer(now)
    return Node.objects.create(
        **{
            "name": name,
            "joined_at": now - 100,
            "session": f"ses-{name}",
            "connected_since": now - 50,
            "last_heard_at": now - 1,
            "observer": OBSERVER,
            "facts": {"gpu_count": 1, "gpu_model": "Simulated", "slots": 1, "simulated_gpus": True},
            **fields,
        }
    )


def make_job(job_id: str = "job_a", **fields: Any) -> Job:
    return Job.objects.create(
        **{
            "id": job_id,
            "name": f"name of {job_id}",
            "owner": "operator",
            "spec": {
                "argv": ["/usr/bin/python3", "train.py"],
                "working_directory": "/w",
                "checkpoint_directory": "/c",
                "nodes": 2,
                "ranks_per_node": 1,
            },
            "state": "running",
            "submitted_at": T0,
            "state_since": T0,
            **fields,
        }
    )


def make_generation(
    job: Job, number: int, nodes: list[Node], *, parent: tuple[int, int] | None = None, reached: int | None = None
) -> GenerationRow:
    row = GenerationRow.objects.create(
        job=job,
        number=number,
        plan_id=f"plan_{number}",
        plan={
            "job": job.id,
            "generation": number,
            "plan_id": f"plan_{number}",
            "run_id": f"run-{number}",
            "nodes": [node.name for node in nodes],
            "ranks_per_node": 1,
            "master_address": "127.0.0.1",
            "parent": None if parent is None else {"generation": parent[0], "step": parent[1]},
            "parent_reason": "the newest complete checkpoint",
            "placement_reason": "healthy and free",
        },
        wanted="run",
        created_at=T0 + number,
    )
    for rank, node in enumerate(nodes):
        ShareRow.objects.create(generation=row, node=node, node_rank=rank)
        RankRow.objects.create(
            generation=row, rank=rank, node=node, last_step=reached, first_step_at=T0 + number + rank
        )
    return row


def make_steps(job: Job, generation: int, steps: range, *, rank: int = 0) -> None:
    StepRow.objects.bulk_create(
        StepRow(job=job, generation_number=generation, rank=rank, step=step, at=T0 + step, loss=1 / step + generation)
        for step in steps
    )


def make_incident(job: Job, incident_id: str = "inc_a", *, opened_at: float = T0, **fields: Any) -> IncidentRow:
    body = {
        "broken_generation": 1,
        "state_since": opened_at,
        "reached_step": 154,
        "attempt": 0,
        "escalation": "",
        "cause": {
            "kind": "rank_killed",
            "rank": 1,
            "node": "gpu-02",
            "sentence": "Rank 1 on gpu-02 was killed by SIGKILL.",
            "tied_with": [],
            "cascade": [0],
        },
        "plan": {"generation": 2},
    }
    return IncidentRow.objects.create(
        **{"id": incident_id, "job": job, "state": "detected", "opened_at": opened_at, "body": body, **fields}
    )


def make_control_plane_incident(incident_id: str = "inc_plane", **fields: Any) -> IncidentRow:
    """The breaker was opened: two of three nodes fell silent at once."""
    body = {
        "id": incident_id,
        "state": "breaker_open",
        "opened_at": T0,
        "silent_since": T0 - 10,
        "nodes": ["gpu-01", "gpu-02"],
        "fleet_size": 3,
    }
    return IncidentRow.objects.create(
        **{
            "id": incident_id,
            "kind": "control_plane",
            "job": None,
            "state": "breaker_open",
            "opened_at": T0,
            "body": body,
            **fields,
        }
    )


def add_entries(incident: IncidentRow, *entries: tuple[float, str, str, dict[str, Any]]) -> None:
    """Entries as (seconds after T0, kind, text, data)."""
    first = incident.entries.count() + 1
    for seq, (offset, kind, text, data) in enumerate(entries, start=first):
        TimelineEntry.objects.create(
            incident=incident,
            seq=seq,
            occurred_at=T0 + offset,
            recorded_at=T0 + offset,
            kind=kind,
            text=text,
            data=data,
            hash=f"{seq:064d}",
        )


RECEIPT: dict[str, Any] = {
    "incident": "inc_a",
    "job": "job_a",
    "state": "recovered",
    "verdict": {
        "kind": "bit-equal",
        "findings": ["54 replayed steps are bit-equal on every rank."],
        "steps_compared": 54,
        "steps_lost": 54,
        "caught_up": True,
        "digest_parts": ["model", "optimizer"],
        "max_relative_difference": 0.0,
        "rule": "continuity-1",
    },
    "cause": None,
    "drill": None,
    "broken_generation": 1,
    "generation": 2,
    "old_nodes": ["gpu-01", "gpu-02"],
    "new_nodes": ["gpu-01", "gpu-03"],
    "parent": {"generation": 1, "step": 100},
    "reached_step": 154,
    "detect_s": 0.5,
    "stop_s": 1.0,
    "launch_s": 2.0,
    "first_step_s": 6.0,
    "caught_up_s": 11.0,
    "total_s": 12.0,
    "attempts": 1,
    "fences": [],
    "issued_at": T0 + 12,
    "receipt_version": 1,
}


def make_story() -> tuple[Job, IncidentRow]:
    """Job a on gpu-01 and gpu-02 reached step 154, lost rank 1, and went on from step 100 on gpu-01 and gpu-03."""
    nodes = [make_node(name) for name in ("gpu-01", "gpu-02", "gpu-03")]
    job = make_job(generation=2, last_step=160, total_steps=1000)
    make_generation(job, 1, nodes[:2], reached=154)
    make_generation(job, 2, [nodes[0], nodes[2]], parent=(1, 100), reached=160)
    for rank in (0, 1):
        make_steps(job, 1, range(1, 155), rank=rank)
        make_steps(job, 2, range(101, 161), rank=rank)
    for step in (50, 100):
        CheckpointRow.objects.create(
            job=job,
            generation_number=1,
            step=step,
            directory=f"/c/1/{step}",
            size_bytes=1_200_000,
            world_size=2,
            saved_at=T0 + step,
        )
    incident = make_incident(
        job, state="recovered", ended=True, ended_at=T0 + 12, receipt=RECEIPT, deadline_at=T0 + 900
    )
    add_entries(
        incident,
        (0.5, "state", "Opened.", {"to": "detected"}),
        (0.6, "fault", "Rank 1 on gpu-02 was killed by SIGKILL.", {}),
        (0.6, "state", "Stopping.", {"from": "detected", "to": "stopping"}),
        (1.0, "state", "Placing.", {"from": "stopping", "to": "placing"}),
        (1.2, "state", "Launching.", {"from": "placing", "to": "launching"}),
        (6.0, "state", "Verifying.", {"from": "launching", "to": "verifying"}),
        (12.0, "receipt", "Recovered.", {}),
        (12.0, "state", "The job trains.", {"from": "verifying", "to": "recovered"}),
    )
    Node.objects.filter(name__in=("gpu-01", "gpu-03")).update(claimed_by=job)
    return job, incident


def make_drill(job: Job, node: Node, drill_id: str = "drl_a", **fields: Any) -> Drill:
    return Drill.objects.create(
        **{
            "id": drill_id,
            "kind": "kill-rank",
            "job": job,
            "node": node,
            "generation_number": 1,
            "rank": 1,
            "state": "requested",
            "promise": {"recovered_within_s": 120.0, "continuity": "proven"},
            "requested_by": "operator",
            "requested_at": T0,
            "not_after": T0 + 120,
            **fields,
        }
    )
