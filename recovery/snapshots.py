"""The ledger of what nodes hold in memory: facts become rows, and rows say which snapshots a node must not remove.

Ingest calls `note_kept`, the orders `memory_of`, and whoever ends a job or finds a promise broken `forget_job`. As with
checkpoints, the truth is on the nodes: ranks that do not find what a row promises end, and the next plan goes on from
disk.
"""

from __future__ import annotations

from django.db.models import F, QuerySet

from agents.protocol.messages import SnapshotKept
from recovery.domain.instructions import JOB_ENDS
from recovery.models import GenerationRow, Node, SnapshotRow
from recovery.wakeup import push_orders

_REMEMBERED = 3
"""Of each rank and node: ranks keep the newest whole snapshot and the one that they are writing."""


def note_kept(generation: GenerationRow, node: Node, fact: SnapshotKept, *, at: float) -> None:
    """A part, and the copy that came along, is in a node's memory. Must run inside a transaction."""
    for rank in {fact.rank} if fact.copy_of is None else {fact.rank, fact.copy_of}:
        SnapshotRow.objects.update_or_create(
            job_id=generation.job_id,
            node=node,
            generation_number=generation.number,
            step=fact.step,
            rank=rank,
            defaults={"world_size": fact.world_size, "boot_id": node.boot_id, "kept_at": at},
        )
        rows = SnapshotRow.objects.filter(job_id=generation.job_id, node=node, rank=rank)
        older = rows.order_by("-generation_number", "-step").values_list("pk", flat=True)[_REMEMBERED:]
        SnapshotRow.objects.filter(pk__in=list(older)).delete()
    _forget_older(generation, fact)


def _forget_older(generation: GenerationRow, fact: SnapshotKept) -> None:
    """Once a generation has a whole snapshot, nobody comes back for those of the ones before it."""
    older = SnapshotRow.objects.filter(job_id=generation.job_id, generation_number__lt=generation.number)
    if not older.exists():
        return
    held = SnapshotRow.objects.filter(
        job_id=generation.job_id, generation_number=generation.number, step=fact.step
    ).values_list("rank", flat=True)
    if len(set(held)) == fact.world_size:
        _forget(older)


def forget_job(job_id: str) -> None:
    """It has ended, or what its ranks came for was not there: nothing that its nodes hold of it is counted on."""
    _forget(SnapshotRow.objects.filter(job_id=job_id))


def _forget(rows: QuerySet[SnapshotRow]) -> None:
    nodes = list(rows.values_list("node_id", flat=True).distinct())
    if nodes:
        rows.delete()
        Node.objects.filter(pk__in=nodes).update(revision=F("revision") + 1)
        push_orders()


def memory_of(node: Node) -> list[str]:
    """Jobs whose snapshots on a node may still be resumed from."""
    rows = SnapshotRow.objects.filter(node=node).exclude(job__state__in=[state.value for state in JOB_ENDS])
    return list(rows.order_by("job_id").values_list("job_id", flat=True).distinct())
