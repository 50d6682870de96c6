"""The life of a job without faults: placed, launched, running, ended. A fault on the way opens an incident instead."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.absences import hold_up_launch
from recovery.domain.fences import lease_proofs, proofs_of
from recovery.domain.generations import AssignmentPhase, GenerationView
from recovery.domain.instructions import (
    JOB_ENDS,
    Instruction,
    JobState,
    MarkContinuityBroken,
    MarkJob,
    PageOperator,
    PreparePlan,
    ReleaseNodes,
    RunPlan,
    StopGeneration,
)
from recovery.domain.lineage import NoCheckpoint
from recovery.domain.placement import NoCapacity, choose_as_many, lost_nodes, possible_sizes, unseen_nodes
from recovery.domain.plan import RecoveryPlan
from recovery.domain.planning import parent_now
from recovery.domain.rollout import endpoint_port, fingerprint_difference
from recovery.domain.situation import Situation
from recovery.domain.timeline import join_names
from recovery.domain.witnesses import setting_up_until


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """What to do for the job; nothing means: wait."""

    instructions: tuple[Instruction, ...] = ()
    failed_launch: bool = False
    """Counts against the job's launch attempts."""


def step_job(situation: Situation, now: float) -> JobOutcome:
    """Return what is next for a job that has no open incident."""
    job = situation.job
    if job.state in JOB_ENDS:
        proofs = lease_proofs(situation, now)
        return JobOutcome(instructions=proofs or (*_stops(situation), *_release_when_gone(situation)))
    if job.stop_wanted or job.state is JobState.STOPPING:
        return _stop(situation, now)
    match job.state:
        case JobState.PENDING:
            return _place(situation, now)
        case JobState.PLACING:
            return _prepare(situation, now)
        case JobState.LAUNCHING | JobState.RUNNING | JobState.RECOVERING:
            return _follow(situation, now)
    return JobOutcome()


def _stop(situation: Situation, now: float) -> JobOutcome:
    job = situation.job
    stops = _stops(situation)
    proofs = lease_proofs(situation, now)
    if proofs:
        return JobOutcome(instructions=proofs)
    unfenced = [node for generation in situation.generations for node in generation.unfenced_nodes]
    if stops or not all(generation.fenced for generation in situation.generations):
        if job.state is not JobState.STOPPING:
            return JobOutcome(instructions=(*stops, MarkJob(job=job.id, state=JobState.STOPPING)))
        if now - job.state_since <= situation.policy.placing_s:
            return JobOutcome(instructions=stops)
        missing = join_names(tuple(dict.fromkeys(unfenced)))
        reason = f"Waiting for proof that its ranks are gone from {missing}."
        return JobOutcome(instructions=(*stops, MarkJob(job=job.id, state=JobState.STOPPING, reason=reason)))
    return JobOutcome(instructions=(MarkJob(job=job.id, state=JobState.STOPPED), ReleaseNodes(job=job.id)))


def _place(situation: Situation, now: float) -> JobOutcome:
    """Plan a launch. A former one that was given up may have trained, unseen: then this one goes on from there."""
    job = situation.job
    placed = choose_as_many(
        fleet=situation.fleet,
        job=job.id,
        sizes=possible_sizes(most=job.node_count, least=job.min_nodes, multiple_of=job.multiple_of),
        ranks_per_node=job.ranks_per_node,
    )
    parent = parent_now(situation, nodes=() if isinstance(placed, NoCapacity) else placed.nodes)
    if isinstance(parent, NoCheckpoint):
        return _wait_for_checkpoint(situation, parent, now)
    if isinstance(placed, NoCapacity):
        return JobOutcome(instructions=(MarkJob(job=job.id, state=JobState.PENDING, reason=placed.reason),))
    master = situation.fleet.node(placed.nodes[0])
    plan = RecoveryPlan(
        job=job.id,
        generation=situation.fresh.generation,
        plan_id=situation.fresh.plan_id,
        run_id=situation.fresh.run_id,
        nodes=placed.nodes,
        ranks_per_node=job.ranks_per_node,
        master_address=master.address if master else "",
        parent=parent.parent,
        parent_reason=parent.reason if situation.generations else "first launch",
        parent_in_memory=parent.in_memory,
        placement_reason=placed.reason,
        lease=job.lease,
        save_every=job.save_every,
    )
    return JobOutcome(instructions=(PreparePlan(plan=plan), MarkJob(job=job.id, state=JobState.PLACING)))


def _wait_for_checkpoint(situation: Situation, missing: NoCheckpoint, now: float) -> JobOutcome:
    job = situation.job
    if now - job.state_since <= situation.policy.placing_s:
        return JobOutcome(instructions=(MarkJob(job=job.id, state=JobState.PENDING, reason=f"{missing.reason}."),))
    return JobOutcome(
        instructions=(
            MarkJob(job=job.id, state=JobState.FAILED, reason=f"Launch failed: {missing.reason}."),
            PageOperator(reason=f"Job {job.name} could not be launched again: {missing.reason}."),
        )
    )


def _prepare(situation: Situation, now: float) -> JobOutcome:
    generation = _newest(situation)
    if generation is None or generation.wanted is AssignmentPhase.STOP:
        return JobOutcome(instructions=(MarkJob(job=situation.job.id, state=JobState.PENDING),))
    if generation.run_ordered:  # by a database that was lost: this one was restored from an older backup
        return JobOutcome(instructions=(MarkJob(job=situation.job.id, state=JobState.LAUNCHING),))
    if generation.failed_shares:
        share = generation.failed_shares[0]
        return _launch_failed(situation, f"{share.node}: {share.detail or share.reason}")
    blind = [*lost_nodes(generation.plan, situation.fleet), *unseen_nodes(generation.plan, situation.fleet)]
    if blind or not generation.prepared or situation.unfenced_before(generation.number):
        overdue = now - situation.job.state_since > situation.policy.placing_s
        return _launch_failed(situation, "its nodes did not prepare in time") if overdue else JobOutcome()
    best = parent_now(situation, nodes=generation.plan.nodes)
    if isinstance(best, NoCheckpoint) or best.parent != generation.plan.parent:
        why = "A former launch had trained more than was known. Planning again."
        mark = MarkJob(job=situation.job.id, state=JobState.PENDING, reason=why)
        return JobOutcome(instructions=(*_stops(situation), mark))
    difference = fingerprint_difference(generation.shares)
    if difference:
        return _launch_failed(situation, f"the nodes do not agree on the job: {difference}")
    port = endpoint_port(generation)
    if port is None:
        return JobOutcome()
    return JobOutcome(
        instructions=(
            RunPlan(
                job=situation.job.id,
                generation=generation.number,
                master_port=port,
                fences=proofs_of(g for g in situation.generations if g.number < generation.number),
            ),
            MarkJob(job=situation.job.id, state=JobState.LAUNCHING),
        )
    )


def _follow(situation: Situation, now: float) -> JobOutcome:
    job, generation = situation.job, _newest(situation)
    if generation is None:
        return JobOutcome()
    if generation.ended_well:
        return JobOutcome(
            instructions=(
                MarkJob(job=job.id, state=JobState.SUCCEEDED),
                *_stops(situation),
            )
        )
    if job.state is not JobState.LAUNCHING:
        return JobOutcome(instructions=_release_unused(situation, generation))
    if generation.not_restored:
        return _unfaithful(situation, generation)
    if generation.stepping:
        return JobOutcome(instructions=(MarkJob(job=job.id, state=JobState.RUNNING),))
    if generation.failed_shares and not generation.dead_ranks:
        share = generation.failed_shares[0]
        return _launch_failed(situation, f"{share.node}: {share.detail or share.reason or 'its runner is gone'}")
    if now - job.state_since > situation.policy.launching_s:
        lost = hold_up_launch(generation, situation)
        if lost:
            why = f"contact with {join_names(lost)} was lost, and the other ranks did not train in time"
            return _launch_failed(situation, why)
        unseen = unseen_nodes(generation.plan, situation.fleet)
        if unseen:  # a launch that cannot be seen has not failed
            why = f"No contact with {join_names(unseen)}: whether its ranks train is not known."
            return JobOutcome(instructions=(MarkJob(job=job.id, state=JobState.LAUNCHING, reason=why),))
        if now <= setting_up_until(generation, since=job.state_since):
            why = "Its ranks are setting up: they have until the job's own limits for setup and compilation."
            return JobOutcome(instructions=(MarkJob(job=job.id, state=JobState.LAUNCHING, reason=why),))
        return _launch_failed(situation, "its ranks did not train in time")
    return JobOutcome()


def _unfaithful(situation: Situation, generation: GenerationView) -> JobOutcome:
    """A launch that went on from a checkpoint did not restore it: what it trains is not what the job was."""
    job = situation.job
    why = f"continuity is broken: {generation.not_restored}"
    return JobOutcome(
        instructions=(
            MarkContinuityBroken(job=job.id, generation=generation.number),
            *_stops(situation),
            MarkJob(job=job.id, state=JobState.FAILED, reason=f"Launch failed: {why}."),
            PageOperator(reason=f"Job {job.name} is stopped: {why}."),
        )
    )


def _launch_failed(situation: Situation, why: str) -> JobOutcome:
    """Try again with a fresh plan; after the budget the job has failed and a human is told."""
    job = situation.job
    why = why.rstrip(".")
    stops = _stops(situation)
    if job.launch_attempts + 1 < situation.policy.max_attempts:
        mark = MarkJob(job=job.id, state=JobState.PENDING, reason=f"Launch failed: {why}. Trying again.")
        return JobOutcome(instructions=(*stops, mark), failed_launch=True)
    return JobOutcome(
        instructions=(
            *stops,
            MarkJob(job=job.id, state=JobState.FAILED, reason=f"Launch failed: {why}."),
            PageOperator(reason=f"Job {job.name} could not be launched: {why}."),
        ),
        failed_launch=True,
    )


def _newest(situation: Situation) -> GenerationView | None:
    return max(situation.generations, key=lambda generation: generation.number, default=None)


def _release_when_gone(situation: Situation) -> tuple[Instruction, ...]:
    """An ended job keeps its claims until its nodes are proven empty: a process that lingers would share the GPUs."""
    job = situation.job
    if not all(generation.fenced for generation in situation.generations):
        return ()
    holds = any(node.claimed_by == job.id for node in situation.fleet.nodes)
    return (ReleaseNodes(job=job.id),) if holds else ()


def _release_unused(situation: Situation, generation: GenerationView) -> tuple[Instruction, ...]:
    """A launch that failed may have claimed other nodes: a running job gives them back, once proven empty."""
    job = situation.job
    if job.state is not JobState.RUNNING or situation.unfenced_before(generation.number):
        return ()
    kept = generation.plan.nodes
    unused = any(node.claimed_by == job.id and node.name not in kept for node in situation.fleet.nodes)
    return (ReleaseNodes(job=job.id, keep=kept),) if unused else ()


def _stops(situation: Situation) -> tuple[Instruction, ...]:
    return tuple(
        StopGeneration(job=situation.job.id, generation=generation.number)
        for generation in situation.generations
        if generation.wanted is not AssignmentPhase.STOP
    )
