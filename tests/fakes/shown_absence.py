"""What a shown fleet has of silence and fences: see `shown_fleet`, which sets Django up, seeds it and moves it."""

from __future__ import annotations

import time
from dataclasses import replace

from django.db import transaction
from shown_rows import FRESH_S, HEARING, SILENCES, S, make_generation, make_incident, make_job, make_node

from recovery.domain.breaker import BreakerState, ControlPlaneIncident
from recovery.domain.fences import proof_entry
from recovery.domain.generations import FenceProof, ProofKind
from recovery.domain.incident import Cause, CauseKind, IncidentState
from recovery.domain.plan import CheckpointRef, LeaseLimits
from recovery.domain.timeline import Entry, EntryKind
from recovery.models import FenceAction, IncidentRow, Job, Node, Observer, Probe, ShareRow
from recovery.store import from_json, to_json
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change

BREAKER = "inc_8c3r7b5yq2ft"


def seed_absence(now: float) -> dict[str, str]:
    """A suspect node, a quarantined one, an unconfirmed one, and jobs with nodes that cannot be seen."""
    make_node("gpu-12", "r4", 4, now, silent_s=6.0)
    _quarantined_node(now)
    _unconfirmed_node(now)
    _past_breaker(now)
    return {
        "unseen": _training_on(now),
        "waiting": _lost_node(now),
        "waiting_incident": "inc_5f2n8c4wq6xk",
        "silent": _silent_job(now),
        "silent_incident": "inc_2w7t4k9mv3pz",
        "breaker_incident": "inc_6h4q9d2xn7rv",
        "opened_breaker": BREAKER,
    }


def _quarantined_node(now: float) -> None:
    node = make_node("gpu-13", "r4", 4, now)
    reason = "The fence provider said that it is off, but it was heard again in the same boot"
    Node.objects.filter(pk=node.pk).update(quarantined_boot_id=node.boot_id, quarantine_reason=reason)
    FenceAction.objects.create(
        id="fnc_4m8x2v7q9ktd", node=node, kind="provider", state="fenced", boot_id=node.boot_id,
        requested_by="operator", requested_at=now - 4000, attempts=1, started_at=now - 3999, ended_at=now - 3991,
        evidence="ipmi-fence 10.20.3.23 off: exit 0, last line: off", contradicted_at=now - 3600,
    )  # fmt: skip


def _unconfirmed_node(now: float) -> None:
    node = make_node("gpu-17", "r4", 4, now)
    job = make_job("job_3n6k8r2w5tvx", "clip-vit-l", "stopped", now, generation=1, last_step=66, nodes=1,
                   started_at=now - 9000, ended_at=now - 400)  # fmt: skip
    make_generation(job, 1, [node], now, parent=None, steps=range(1, 67), stopped_at=now - 450, started_at=now - 900)
    proof = FenceProof(
        node=node.name, kind=ProofKind.LEASE_EXPIRED, at=now - 420, generation=1,
        evidence="no contact that could renew its lease for 30.4 s (lease-1)",
    )  # fmt: skip
    ShareRow.objects.filter(generation__job=job).update(proof=to_json(proof), confirmed_at=None)


def _training_on(now: float) -> str:
    """A job on two of up to four nodes, one of which cannot be seen; its peer goes on, so that it does too."""
    pair = [make_node("gpu-18", "r5", 4, now), make_node("gpu-19", "r5", 4, now, silent_s=12.0)]
    job = make_job("job_9v4h7c2m6dqs", "moe-8x7b-shard", "running", now, generation=2, last_step=431,
                   nodes={"min": 2, "max": 4, "multiple_of": 2}, started_at=now - 8000)  # fmt: skip
    Node.objects.filter(name__in=[node.name for node in pair]).update(claimed_by=job)
    make_generation(job, 2, pair, now, parent=CheckpointRef(generation=1, step=380), steps=range(381, 432),
                    started_at=now - 30)  # fmt: skip
    return job.id


def _lost_node(now: float) -> str:
    """A node is gone by two witnesses; its peer is stopped, and its lease runs on for most of an hour."""
    pair = [make_node("gpu-14", "r4", 4, now), make_node("gpu-15", "r4", 4, now, silent_s=46.0)]
    job = make_job("job_8q3w6e9r2tyu", "llm-13b-sft", "recovering", now, generation=1, last_step=238,
                   started_at=now - 5000)  # fmt: skip
    Node.objects.filter(name__in=[node.name for node in pair]).update(claimed_by=job)
    fault_at = now - 46
    make_generation(job, 1, pair, now, parent=None, steps=range(1, 239), stopped_at=fault_at + 16, unproven=("gpu-15",),
                    started_at=fault_at - 104, lease=LeaseLimits(evaluation_s=3500.0))  # fmt: skip
    heartbeat, failed = "gpu-15 has been silent for 14 s", "rank 0 on gpu-14 died of a broken collective"
    cause = Cause(kind=CauseKind.NODE_LOST, rank=None, node="gpu-15", cascade=(0,),
                  sentence=f"gpu-15 is gone: {heartbeat} and {failed}.",
                  witnesses=(("heartbeat", heartbeat), ("peer_failed", failed)))  # fmt: skip
    why = "Nothing proves that generation 1 is gone from gpu-15."
    row = make_incident(
        "inc_5f2n8c4wq6xk", job, S.WAITING_FOR_FENCE, opened_at=fault_at + 14, fault_at=fault_at, reached=238,
        cause=cause, escalation=why,
    )  # fmt: skip
    for index, outcome in enumerate(("", "unreachable", "unreachable", "failed")):
        Probe.objects.create(
            id=f"prb_{index}", node=pair[1], prober=pair[0], asked_at=now - 4 - 10 * index, not_after=now + FRESH_S,
            outcome=outcome, answered_at=now - 1 - 10 * index if outcome else None,
            detail={"unreachable": "no answer within 3 s", "failed": "the look was cut short: the agent restarted"}
            .get(outcome, ""),
        )  # fmt: skip
    proof = ShareRow.objects.get(generation__job=job, node=pair[0]).proof
    _tell(
        row,
        fault_at,
        (EntryKind.STATE, 14.0, "Opened: generation 1 of job llm-13b-sft lost gpu-15.", S.DETECTED),
        (EntryKind.FAULT, 0.0, cause.sentence, None),
        (EntryKind.STATE, 14.1, "Stopping what is left of generation 1 on gpu-14 and gpu-15.", S.STOPPING),
        (EntryKind.ORDER, 14.1, "Ordered gpu-14 and gpu-15 to stop generation 1 at once.", None),
        (EntryKind.DECISION, 14.2, "Planned generation 2 from step 220 of generation 1 on gpu-14 and gpu-11.", None),
        proof_entry(1, from_json(proof, FenceProof)),
        (EntryKind.STATE, 30.0, f"Waiting for a fence: {why} Nothing is relaunched until it is proven that the old "
         "ranks cannot act.", S.WAITING_FOR_FENCE),
        (EntryKind.PAGE, 30.0, f"Paged the operators: {why} A proof is needed: the node's return, its reboot, a fence "
         "provider or an operator's attestation.", None),
    )  # fmt: skip
    return job.id


def _silent_job(now: float) -> str:
    """The only node of a job is silent: it may train on, and nothing is stopped."""
    node = make_node("gpu-16", "r4", 4, now, silent_s=95.0)
    job = make_job("job_5z8x2c6v9bnm", "reward-model", "recovering", now, generation=1, last_step=640, nodes=1,
                   started_at=now - 5000)  # fmt: skip
    Node.objects.filter(pk=node.pk).update(claimed_by=job)
    make_generation(job, 1, [node], now, parent=None, steps=range(601, 641), started_at=now - 400)
    cause = Cause(
        kind=CauseKind.NODE_SILENT, rank=None, node="gpu-16",
        sentence="There has been no contact with gpu-16 for 30 s, and no other node that could tell whether "
        "generation 1 trains.",
    )  # fmt: skip
    why = cause.sentence
    row = make_incident(
        "inc_2w7t4k9mv3pz", job, S.WAITING_FOR_FENCE, opened_at=now - 65, fault_at=now - 95, reached=640, cause=cause,
        escalation=why, stop_ordered=False,
    )  # fmt: skip
    FenceAction.objects.create(
        id="fnc_7t3b9n5w2hjc", node=node, kind="provider", state="failed", boot_id=node.boot_id,
        requested_by="Everstep", requested_at=now - 60, attempts=3, started_at=now - 59, ended_at=now - 20,
        evidence="ipmi-fence 10.20.4.26 off: exit 1, last line: connection timeout",
    )  # fmt: skip
    _tell(
        row,
        now - 95,
        (EntryKind.STATE, 30.0, "Opened: generation 1 of job reward-model lost gpu-16.", S.DETECTED),
        (EntryKind.FACT, 30.0, cause.sentence, None),
        (EntryKind.STATE, 30.1, f"Waiting for a fence: {why}", S.WAITING_FOR_FENCE),
        (EntryKind.PAGE, 30.1, f"Paged the operators: {why}", None),
    )
    return job.id


def _tell(row: IncidentRow, since: float, *story: Entry | tuple[EntryKind, float, str, IncidentState | None]) -> None:
    entries = []
    for told in story:
        if isinstance(told, Entry):
            entries.append(told)
        else:
            kind, after_s, text, to = told
            entries.append(Entry(kind=kind, at=since + after_s, text=text, data={"to": to.value} if to else {}))
    append_entries(row.pk, entries)


def _past_breaker(now: float) -> None:
    """A breaker that was open two days ago."""
    opened_at = now - 2 * 86_400
    names = ("gpu-01", "gpu-02", "gpu-03", "gpu-04", "gpu-09", "gpu-10")
    incident = ControlPlaneIncident(
        id="inc_6h4q9d2xn7rv", state=BreakerState.REARMED, opened_at=opened_at, silent_since=opened_at - 11,
        nodes=names, fleet_size=17, rearmed_at=opened_at + 540, rearmed_by="operator",
    )  # fmt: skip
    _store_breaker(incident, [
        Entry(kind=EntryKind.FAULT, at=opened_at - 11, text="6 of 17 nodes fell silent within 20 s: gpu-01, gpu-02, "
              "gpu-03, gpu-04, gpu-09 and gpu-10. That is taken for a fault of the control plane or its network. No "
              "job is stopped for it."),
        Entry(kind=EntryKind.PAGE, at=opened_at, text="Paged the operators: 6 of 17 nodes are silent at once; the "
              "breaker is open."),
        Entry(kind=EntryKind.STATE, at=opened_at + 71, text="All of these nodes are in contact again. The breaker "
              "stays open until an operator re-arms it."),
        Entry(kind=EntryKind.OPERATOR, at=opened_at + 540, text="operator re-armed the breaker: a silent node is "
              "looked at on its own again."),
    ])  # fmt: skip


def open_breaker() -> None:
    """Half of the fleet falls silent at once."""
    now = time.time()
    names = ("gpu-01", "gpu-02", "gpu-03", "gpu-04", "gpu-07", "gpu-09", "gpu-10", "gpu-11")
    with transaction.atomic():
        judge = Observer.objects.get(pk=SILENCES)
        watched_until = judge.beat_at - judge.lag_s
        Node.objects.filter(name__in=names).update(observer=SILENCES, last_heard_at=watched_until - 14)
        Node.objects.filter(name__in=("gpu-10", "gpu-11")).update(last_heard_at=watched_until - 5)
        incident = ControlPlaneIncident(
            id=BREAKER, state=BreakerState.OPEN, opened_at=now - 10, silent_since=now - 14, nodes=names,
            fleet_size=Node.objects.count(),
        )  # fmt: skip
        text = f"{len(names)} of {incident.fleet_size} nodes fell silent within 20 s: gpu-01, gpu-02, gpu-03, gpu-04, "
        text += "gpu-07 and 3 more. That is taken for a fault of the control plane or its network. No job is stopped."
        _store_breaker(incident, [Entry(kind=EntryKind.FAULT, at=now - 14, text=text)])


def restore_contact() -> None:
    """The nodes that fell silent come back; the breaker stays open."""
    now = time.time()
    with transaction.atomic():
        row = IncidentRow.objects.get(pk=BREAKER)
        incident = replace(from_json(row.body, ControlPlaneIncident), state=BreakerState.CONTACT_RESTORED)
        Node.objects.filter(name__in=incident.nodes).update(observer=HEARING, last_heard_at=now + FRESH_S)
        row.state, row.body, row.version = incident.state.value, to_json(incident), row.version + 1
        row.save()
        text = "All of these nodes are in contact again. The breaker stays open until an operator re-arms it."
        announce(f"incident:{BREAKER}", append_entries(BREAKER, [Entry(kind=EntryKind.STATE, at=now, text=text)]))
        announce_change("fleet")


def node_returns(name: str, job_id: str) -> None:
    """A node that could not be seen is heard again, and its agent proves that nothing is left."""
    now = time.time()
    with transaction.atomic():
        Node.objects.filter(name=name).update(observer=HEARING, last_heard_at=now + FRESH_S)
        proof = FenceProof(node=name, kind=ProofKind.CGROUP_EMPTY, at=now, evidence="populated 0", generation=1)
        shares = ShareRow.objects.filter(node__name=name, generation__job_id=job_id)
        shares.update(proof=to_json(proof), confirmed_at=now, seen="stopped")
        Job.objects.filter(pk=job_id).update(state_since=now)
        announce_change("fleet")


def _store_breaker(incident: ControlPlaneIncident, entries: list[Entry]) -> None:
    IncidentRow.objects.create(
        id=incident.id,
        kind="control_plane",
        state=incident.state.value,
        ended=incident.ended,
        opened_at=incident.opened_at,
        ended_at=incident.rearmed_at,
        body=to_json(incident),
    )
    announce(f"incident:{incident.id}", append_entries(incident.id, entries))
    announce_change("fleet")
