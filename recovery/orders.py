"""What each node should run, as one message: built from the rows, pushed by the web process that holds its socket."""

from __future__ import annotations

import time

from agents.protocol.messages import Assignment, AssignmentPhase, FaultKind, FaultOrder, LaunchSpec, Order
from recovery.domain.plan import RecoveryPlan
from recovery.models import Drill, Node, ShareRow
from recovery.store import from_json


def order_for(node_id: int) -> Order:
    """The node's whole desired state at its present revision.

    The revision is read first: a change in between is pushed once more, never missed. A stopped generation stays in
    the order until its proof is stored.
    """
    node = Node.objects.get(pk=node_id)
    shares = (
        ShareRow.objects.filter(node=node)
        .exclude(generation__wanted=AssignmentPhase.STOP.value, proof__isnull=False)
        .select_related("generation__job")
        .order_by("generation_id")
    )
    drills = Drill.objects.filter(node=node, ended=False, state__in=("requested", "armed"), not_after__gt=time.time())
    return Order(
        revision=node.revision,
        assignments=[_assignment(share) for share in shares],
        faults=[
            FaultOrder(
                drill=drill.id,
                kind=FaultKind(drill.kind),
                job=drill.job_id,
                generation=drill.generation_number,
                rank=drill.rank,
                not_after=drill.not_after,
                steps_after_save=drill.steps_after_save,
            )
            for drill in drills
        ],
    )


def _assignment(share: ShareRow) -> Assignment:
    row = share.generation
    plan = from_json(row.plan, RecoveryPlan)
    spec = row.job.spec
    return Assignment(
        job=row.job_id,
        generation=row.number,
        plan_id=row.plan_id,
        phase=AssignmentPhase(row.wanted),
        launch=LaunchSpec(
            argv=spec["argv"],
            working_directory=spec["working_directory"],
            environment=spec["environment"],
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
            stop_limit_s=spec["stop_limit_s"],
        ),
    )
