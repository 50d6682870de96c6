"""Builds incidents, generations and situations for the tests of the domain: one job on two nodes with a spare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recovery.domain.continuity import Verdict, VerdictKind
from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.generations import (
    AssignmentPhase,
    FenceProof,
    GenerationView,
    LeaseLimits,
    Phase,
    ProofKind,
    RankView,
    SeenPhase,
    ShareView,
)
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.machine import step
from recovery.domain.moves import Outcome
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.policy import Policy
from recovery.domain.silence import Contact
from recovery.domain.situation import FreshIds, JobView, Situation
from recovery.domain.step_records import ResumeRecord, StepRecord
from recovery.domain.trust import UNKNOWN

NOW = 5_000.0
POLICY = Policy()
NODES = ("gpu-01", "gpu-02")


def node(name: str, **changes: Any) -> NodeView:
    base = NodeView(
        name=name,
        address=f"10.0.0.{name[-1]}",
        health=NodeHealth.HEALTHY,
        slots=1,
        rack="r1",
        last_heard_at=NOW - 0.5,
        heard_at_most=NOW - 0.5,
        observed_until=NOW,
    )
    return replace(base, **changes)


def lost(name: str, *, heard_at: float = NOW - 12.0, **changes: Any) -> NodeView:
    """A node that has been silent for too long, as an observer that is there has seen until now."""
    return node(
        name,
        **{
            "health": NodeHealth.UNKNOWN,
            "contact": Contact.LOST,
            "last_heard_at": heard_at,
            "silent_s": NOW - heard_at,
            "heard_at_most": heard_at,
            "observed_until": NOW,
            **changes,
        },
    )


def fleet(*nodes: NodeView) -> FleetSnapshot:
    return FleetSnapshot(nodes=nodes or (node("gpu-01"), node("gpu-02"), node("gpu-03")))


def plan(
    generation: int = 1, *, nodes: tuple[str, ...] = NODES, parent: CheckpointRef | None = None, per_node: int = 1
) -> RecoveryPlan:
    return RecoveryPlan(
        job="job-1",
        generation=generation,
        plan_id=f"plan-{generation}",
        run_id=f"run-{generation}",
        nodes=nodes,
        ranks_per_node=per_node,
        master_address="10.0.0.1",
        parent=parent,
        parent_reason="test",
        placement_reason="test.",
    )


def proof(name: str, at: float = NOW) -> FenceProof:
    return FenceProof(node=name, kind=ProofKind.CGROUP_EMPTY, at=at, evidence="populated 0")


def share(name: str, seen: SeenPhase | None = None, **changes: Any) -> ShareView:
    return ShareView(node=name, seen=seen, **changes)


def rank(number: int, *, of: RecoveryPlan | None = None, **changes: Any) -> RankView:
    return RankView(rank=number, node=(of or plan()).node_of(number), **{"pid": 100 + number, **changes})


def training(number: int, *, of: RecoveryPlan, last_step: int = 50) -> RankView:
    """A rank that trains: it resumed and made steps."""
    start = of.parent.step if of.parent else 0
    return rank(number, of=of, resumed_step=start, resumed_at=NOW - 50, first_step_at=NOW - 40, last_step=last_step)


def killed(view: RankView, *, signal: int = 9, at: float = NOW - 1) -> RankView:
    return replace(view, exited_at=at, signal=signal)


def exited(view: RankView, *, code: int | None, at: float = NOW - 1, detail: str = "") -> RankView:
    return replace(view, exited_at=at, exit_code=code, detail=detail)


def ended_well(view: RankView, *, at: float = NOW - 1, step: int = 100) -> RankView:
    return replace(view, finished_step=step, last_step=step, exited_at=at, exit_code=0)


def generation(number: int = 1, *, of: RecoveryPlan | None = None, **changes: Any) -> GenerationView:
    """A generation that trains on both nodes, unless changes say otherwise."""
    made = of or plan(number)
    base = GenerationView(
        plan=made,
        wanted=AssignmentPhase.RUN,
        shares=tuple(share(name, SeenPhase.RUNNING) for name in made.nodes),
        ranks=tuple(training(index, of=made) for index in range(made.world_size)),
        run_ordered=True,
    )
    return replace(base, **changes)


def stopping(view: GenerationView) -> GenerationView:
    return replace(view, wanted=AssignmentPhase.STOP)


def fenced(view: GenerationView, *, at: float = NOW - 0.5) -> GenerationView:
    """Stopped, with a proof from each node."""
    return replace(
        view,
        wanted=AssignmentPhase.STOP,
        shares=tuple(replace(share, seen=SeenPhase.STOPPED, proof=proof(share.node, at=at)) for share in view.shares),
    )


def at_step(view: RankView, *, ago_s: float, phase: Phase = Phase.STEP, pace_s: float = 0.5) -> RankView:
    """A rank whose last progress was so long ago."""
    return replace(view, phase=phase, progress_at=NOW - ago_s, progress_seen_at=NOW - ago_s, pace_s=pace_s)


TERMS = LeaseLimits()
ECHO = "RuntimeError: Connection closed by peer"


def leased(number: int = 1, *, of: RecoveryPlan | None = None, ago_s: float = 0.4, **changes: Any) -> GenerationView:
    """A generation that trains under a lease; each of its ranks made its last step `ago_s` ago."""
    base = generation(number, of=of)
    return replace(
        base,
        **{
            "lease": TERMS,
            "shares": tuple(replace(part, keeps_lease=True) for part in base.shares),
            "ranks": tuple(at_step(rank, ago_s=ago_s) for rank in base.ranks),
            **changes,
        },
    )


def proven(view: GenerationView, name: str, *, at: float, kind: ProofKind = ProofKind.CGROUP_EMPTY) -> GenerationView:
    """The generation with a proof of stop from one of its nodes."""
    made = FenceProof(node=name, kind=kind, at=at, evidence="seen", generation=view.number, recorded_at=at)
    return replace(view, shares=tuple(replace(part, proof=made) if part.node == name else part for part in view.shares))


def lost_rank_1() -> GenerationView:
    """Generation 1 after rank 1 was killed at step 50; rank 0 hangs in its collective."""
    base = generation(1)
    return replace(base, ranks=(base.ranks[0], killed(base.ranks[1])))


def preparing(made: RecoveryPlan, *seen: SeenPhase | None) -> GenerationView:
    """A generation whose shares have been seen in those phases; prepared ones have what `run` needs."""
    shares = tuple(
        share(name, phase, master_port=20001, fingerprint="same", fingerprint_parts={"script": "same"})
        for name, phase in zip(made.nodes, seen or (None,) * len(made.nodes), strict=True)
    )
    return GenerationView(plan=made, wanted=AssignmentPhase.PREPARE, shares=shares)


def prepared(made: RecoveryPlan) -> GenerationView:
    return preparing(made, *(SeenPhase.PREPARED for _ in made.nodes))


CHECKPOINTS = (
    CheckpointRef(generation=1, step=0),
    CheckpointRef(generation=1, step=20),
    CheckpointRef(generation=1, step=40),
)
PARENT = CheckpointRef(generation=1, step=40)


def job(**changes: Any) -> JobView:
    base = JobView(
        id="job-1", name="llm-7", state=JobState.RECOVERING, node_count=2, ranks_per_node=1, state_since=NOW - 10
    )
    return replace(base, **changes)


def situation(*generations: GenerationView, **changes: Any) -> Situation:
    base = Situation(
        job=job(),
        fleet=fleet(),
        generations=generations or (lost_rank_1(),),
        checkpoints=CHECKPOINTS,
        trust=dict.fromkeys(CHECKPOINTS, UNKNOWN),
        fresh=FreshIds(
            plan_id="plan-new", run_id="run-new", generation=max((g.number for g in generations), default=1) + 1
        ),
        policy=POLICY,
    )
    return replace(base, **changes)


def incident(state: IncidentState = IncidentState.DETECTED, **changes: Any) -> Incident:
    base = Incident(
        id="inc-1",
        job="job-1",
        broken_generation=1,
        state=state,
        opened_at=NOW - 0.5,
        fault_at=NOW - 1,
        state_since=NOW,
        deadline_at=POLICY.deadline(state, now=NOW),
        stop_ordered=state not in (IncidentState.DETECTED, IncidentState.AWAITING_APPROVAL),
    )
    return replace(base, **changes)


def verdict(kind: VerdictKind = VerdictKind.BIT_EQUAL, *, caught_up: bool = True, **changes: Any) -> Verdict:
    base = Verdict(
        kind=kind,
        findings=("It is so.",),
        steps_compared=10,
        steps_lost=10,
        caught_up=caught_up,
        digest_parts=("model", "optimizer"),
    )
    return replace(base, **changes)


def settle(start: Incident, look: Callable[[], Situation], *, now: float = NOW) -> Outcome:
    """Call `step` as the engine does until it waits, or wants something done; the last outcome."""
    outcome = step(start, look(), now)
    while outcome.incident != start and not outcome.instructions:
        start = outcome.incident
        outcome = step(start, look(), now)
    return outcome


def record(rank: int, step: int, loss: float | None, *, generation: int = 1, **changes: Any) -> StepRecord:
    base = StepRecord(
        generation=generation,
        rank=rank,
        step=step,
        at=NOW + step,
        loss=loss,
        learning_rate=1e-3 * 0.99**step,
        span_start=(step - 1) * 8,
        span_stop=step * 8,
    )
    return replace(base, **changes)


def curve(first: int, last: int, *, generation: int = 1, ranks: int = 2) -> dict[tuple[int, int], StepRecord]:
    """The job's sound curve from one step to another, the same in every generation."""
    return {
        (number, step): record(number, step, 4.0 / step + 0.01 * number, generation=generation)
        for number in range(ranks)
        for step in range(first, last + 1)
    }


DIGEST = {"model": "a1", "optimizer": "b2", "scheduler": "c3", "rng": "d4", "sampler": "e5"}


def resume(number: int, step: int = 40, **changes: Any) -> ResumeRecord:
    base = ResumeRecord(rank=number, step=step, saved_digest=DIGEST, live_digest=DIGEST, deterministic=True)
    return replace(base, **changes)
