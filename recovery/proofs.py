"""Proofs of stop as rows: kept once, and told on the timeline. Ingest, sessions and actuators call it.

Every function must run inside a transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from django.db.models import F

from agents.protocol.messages import ProofKind
from recovery.domain.fences import boot_proof
from recovery.domain.generations import FenceProof
from recovery.domain.timeline import Entry, EntryKind
from recovery.models import FenceAction, GenerationRow, IncidentRow, Job, Node, RankRow, ShareRow, Stray
from recovery.store import to_json
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change, ask_to_advance

log = logging.getLogger(__name__)


def keep_proof(share: ShareRow, proof: FenceProof) -> bool:
    """Store the first proof of a share and call its silent ranks gone. False if it has one already."""
    kept = ShareRow.objects.filter(pk=share.pk, proof__isnull=True).update(proof=to_json(proof))
    if not kept:
        return False
    share.proof = to_json(proof)
    generation = share.generation
    RankRow.objects.filter(generation=generation, node_id=share.node_id, exited_at__isnull=True).update(
        exited_at=proof.at, exit_recorded_at=time.time(), detail="gone without a report"
    )
    # Taken before the others' proofs are looked for: two nodes may prove at once, and the later one sees both.
    GenerationRow.objects.filter(pk=generation.pk).update(number=F("number"))
    if not ShareRow.objects.filter(generation=generation, proof__isnull=True).exists():
        GenerationRow.objects.filter(pk=generation.pk, fenced_at__isnull=True).update(fenced_at=proof.at)
    announce_change("fleet")
    incident = IncidentRow.objects.filter(job_id=generation.job_id, ended=False).first()
    if incident is None:
        ask_to_advance(job=generation.job_id)
    else:
        ask_to_advance(incident=incident.pk)
    return True


def fence_node(node: Node, *, kind: ProofKind, at: float, evidence: str) -> None:
    """Keep a proof for all that may still run on a node that is off."""
    for share in open_shares(node):
        number = share.generation.number
        proof = FenceProof(node=node.name, kind=kind, at=at, evidence=evidence, generation=number, recorded_at=at)
        keep_proof(share, proof)
    Stray.objects.filter(node=node).delete()  # if it runs after all, it says so again and is told to stop


def node_returned(node: Node, *, boot_id: str) -> None:
    """A node says hello: what its boot proves, and what it contradicts."""
    now = time.time()
    for share in open_shares(node):
        proof = boot_proof(
            node=node.name, generation=share.generation.number, ran_in=share.boot_id, boot_id=boot_id, at=now
        )
        if proof is not None:
            keep_proof(share, proof)
    if node.quarantined_boot_id and node.quarantined_boot_id != boot_id:
        Node.objects.filter(pk=node.pk).update(quarantined_boot_id="", quarantine_reason="")
    contradict(node, boot_id=boot_id)


def contradict(node: Node, *, boot_id: str) -> None:
    """The node was heard in this boot: whoever said that it was off in it was wrong."""
    now = time.time()
    said_off = FenceAction.objects.filter(node=node, state="fenced", boot_id=boot_id, contradicted_at__isnull=True)
    for action in said_off.exclude(boot_id=""):
        FenceAction.objects.filter(pk=action.pk).update(contradicted_at=now)
        who = f"{action.requested_by} attested" if action.kind == "attestation" else "The fence provider said"
        reason = f"{who} that it is off, but it was heard again in the same boot"
        quarantine(node, boot_id=boot_id, reason=reason)
        for job_id in {share.generation.job_id for share in node.shares.filter(confirmed_at__isnull=True)}:
            tell(job_id, f"{node.name}: {reason}. It is told to stop what it runs and is not used before it reboots.")
        log.error("page: node=%s %s", node.name, reason)


def quarantine(node: Node, *, boot_id: str, reason: str) -> None:
    """Place nothing on a node until it has rebooted."""
    Node.objects.filter(pk=node.pk).update(quarantined_boot_id=boot_id, quarantine_reason=reason[:400])
    announce_change("fleet")


def tell(
    job_id: str,
    text: str,
    *,
    at: float | None = None,
    kind: EntryKind = EntryKind.FACT,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write a sentence into the job's open incident, or into its newest one."""
    row = IncidentRow.objects.filter(job_id=job_id).order_by("ended", "-opened_at").first()
    if row is None:
        return
    IncidentRow.objects.filter(pk=row.pk).update(version=F("version"))  # takes the row, so that seq has no rival
    entry = Entry(kind=kind, at=time.time() if at is None else at, text=text, data=data or {})
    announce(f"incident:{row.pk}", append_entries(row.pk, [entry]))


def open_shares(node: Node) -> list[ShareRow]:
    """What was ordered to run on the node and is not proven gone."""
    rows = ShareRow.objects.filter(node=node, proof__isnull=True, generation__run_ordered_at__isnull=False)
    return list(rows.select_related("generation__job"))


def unproven_on(node: Node) -> tuple[str, ...]:
    """All that may run on the node, in words: also what a restored database knows of by hearsay only."""
    shares = ShareRow.objects.filter(node=node, proof__isnull=True, generation__run_ordered_at__isnull=False)
    known = shares.values_list("generation__number", "generation__job__name")
    strays = Stray.objects.filter(node=node).values_list("number", "job__name")
    behind = Job.objects.filter(behind_since__isnull=False).values_list("name", flat=True)
    return (
        *(f"generation {number} of {name}" for number, name in (*known, *strays)),
        *(f"a generation of {name} that this database does not know" for name in behind),
    )
