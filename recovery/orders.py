"""What each node should run, as one message: built from the rows, pushed by the web process that holds its socket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agents.protocol.messages import (
    Assignment,
    AssignmentPhase,
    FaultKind,
    FaultOrder,
    LaunchSpec,
    LeaseTerms,
    Order,
    ProbeOrder,
)
from recovery.domain.plan import RecoveryPlan
from recovery.models import Drill, Node, Probe, ShareRow
from recovery.snapshots import memory_of
from recovery.store import from_json
from recovery.strays import stop_orders

SAVE_EVERY = "EVERSTEP_SAVE_EVERY"
"""What the training side reads its interval from; it overrides what the script says."""
MEMORY_EVERY, MEMORY_PARTNER = "EVERSTEP_MEMORY_EVERY", "EVERSTEP_MEMORY_PARTNER"
"""The same for snapshots in the nodes' memory, and for copies of them on other nodes."""


def order_for(node_id: int) -> Order:
    """The node's whole desired state at its present revision.

    The revision is read first: a change in between is pushed once more, never missed. A stopped generation stays in
    the order until the node's own agent has proven it gone, whatever else proves it: a node that comes back after a
    silence has to hear that its generation is over.
    """
    node = Node.objects.get(pk=node_id)
    shares = (
        ShareRow.objects.filter(node=node)
        .exclude(generation__wanted=AssignmentPhase.STOP.value, confirmed_at__isnull=False)
        .select_related("generation__job")
        .order_by("generation_id")
    )
    now = time.time()
    drills = Drill.objects.filter(node=node, ended=False, state__in=("requested", "armed"), not_after__gt=now)
    probes = Probe.objects.filter(prober=node, outcome="", not_after__gt=now).select_related("node")
    return Order(
        revision=node.revision,
        assignments=[*(_assignment(share) for share in shares), *stop_orders(node)],
        faults=[
            FaultOrder(
                drill=drill.id,
                kind=FaultKind(drill.kind),
                job=drill.job_id,
                generation=drill.generation_number,
                rank=drill.rank,
                not_after=drill.not_after,
                steps_after_save=drill.steps_after_save,
                duration_s=drill.duration_s,
            )
            for drill in drills
            if drill.rank is not None and (node.protocol >= 2 or drill.kind == FaultKind.KILL_RANK.value)
        ],
        probes=[
            ProbeOrder(
                probe=probe.id,
                node=probe.node.name,
                address=probe.node.address,
                port=int(probe.node.facts.get("probe_port", 22)),
                not_after=probe.not_after,
            )
            for probe in probes
        ],
        memory_of=memory_of(node),
    )


def _wishes_for_saving(spec: Mapping[str, Any], plan: RecoveryPlan) -> dict[str, str]:
    """Jobs of an earlier release say nothing of memory."""
    wanted = {
        SAVE_EVERY: plan.save_every,
        MEMORY_EVERY: str(spec.get("memory_every") or ""),
        MEMORY_PARTNER: "1" if spec.get("memory_partner") else "",
    }
    return {name: value for name, value in wanted.items() if value}


def _assignment(share: ShareRow) -> Assignment:
    row = share.generation
    plan = from_json(row.plan, RecoveryPlan)
    spec = row.job.spec
    return Assignment(
        job=row.job_id,
        generation=row.number,
        plan_id=row.plan_id,
        phase=AssignmentPhase(row.wanted),
        lease=LeaseTerms(**row.lease) if row.lease else None,
        keep=row.job.pinned,
        save_request=row.job.save_request,
        launch=LaunchSpec(
            argv=spec["argv"],
            working_directory=spec["working_directory"],
            environment={**spec["environment"], **_wishes_for_saving(spec, plan)},
            user=spec["user"],
            run_id=plan.run_id,
            node_rank=share.node_rank,
            node_count=len(plan.nodes),
            ranks_per_node=plan.ranks_per_node,
            first_rank=share.node_rank * plan.ranks_per_node,
            world_size=plan.world_size,
            master_address=plan.master_address,
            master_port=row.master_port,
            checkpoint_directory=spec["checkpoint_directory"],
            parent_generation=plan.parent.generation if plan.parent else None,
            parent_step=plan.parent.step if plan.parent else None,
            parent_in_memory=plan.parent_in_memory,
            stop_limit_s=spec["stop_limit_s"],
        ),
    )
