"""The server of the simulation: rows in memory, and what `recovery.engine`, `actuators` and `ingest` do with them.

The decisions are the real ones (`step`, `step_job`, `judge`, `find_fault`); only the shell around them is made up, with
the same conditional saves, so that a stale decision meets the same conflict.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from schedules import JobShape, NodeShape
from virtual_time import VirtualTime

from agents.protocol.messages import AssignmentPhase, ProofKind, SeenPhase
from recovery.domain.continuity import ResumeRecord, StepRecord, Verdict, judge
from recovery.domain.detection import Fault, find_fault
from recovery.domain.fleet import FleetSnapshot, NodeHealth, NodeView
from recovery.domain.generations import FenceProof, GenerationView, RankView, ShareView
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import (
    JOB_ENDS,
    Instruction,
    IssueReceipt,
    JobState,
    MarkContinuityBroken,
    MarkJob,
    PageOperator,
    PreparePlan,
    ReleaseNodes,
    RunPlan,
    StopGeneration,
)
from recovery.domain.invariants import (
    IncidentHistory,
    JobHistory,
    Violation,
    violations_of_job,
    violations_of_step,
)
from recovery.domain.lifecycle import JobOutcome, step_job
from recovery.domain.lineage import reference_generations
from recovery.domain.machine import step
from recovery.domain.moves import Outcome, escalate_poisoned
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.policy import Policy
from recovery.domain.receipt import Receipt
from recovery.domain.situation import Command, FreshIds, JobView, Situation

POLICY = Policy(
    deadlines_s={
        IncidentState.DETECTED: 10.0,
        IncidentState.STOPPING: 15.0,
        IncidentState.PLACING: 20.0,
        IncidentState.LAUNCHING: 25.0,
        IncidentState.VERIFYING: 60.0,
        IncidentState.AWAITING_APPROVAL: 60.0,
        IncidentState.WAITING_FOR_CAPACITY: 60.0,
        IncidentState.WAITING_FOR_CHECKPOINT: 30.0,
        IncidentState.PAUSED: 60.0,
    },
    placing_s=20.0,
    launching_s=25.0,
)
"""Shorter than in production: virtual seconds cost real ones."""

MAX_ADVANCE_ATTEMPTS = 5
MAX_TRANSITIONS = 20
SWEEP_S = 2.0
FITTING_COMMANDS = {
    IncidentState.PAUSED: (Command.RESUME, Command.RETRY, Command.CLOSE),
    IncidentState.ESCALATED: (Command.RETRY, Command.CLOSE),
}


class Conflict(Exception):
    """The world changed between look and save; nothing was changed."""


class NeverFenced(GenerationView):
    """The planted bug: a generation that looks fenced although no proof of stop has come."""

    @property
    def fenced(self) -> bool:
        return True


@dataclass
class NodeRow:
    shape: NodeShape
    connected: bool = False
    healthy: bool = True
    cordoned: bool = False
    claimed_by: str | None = None
    revision: int = 0
    acknowledged: int = 0


@dataclass
class GenerationRow:
    plan: RecoveryPlan
    wanted: AssignmentPhase
    shares: dict[str, ShareView]
    ranks: dict[int, RankView] = field(default_factory=dict)
    steps: dict[tuple[int, int], StepRecord] = field(default_factory=dict)
    resumes: dict[int, ResumeRecord] = field(default_factory=dict)
    broken: bool = False
    run_ordered: bool = False
    master_port: int | None = None
    seen: GenerationView | None = None
    """The view made of this row; None after a change."""

    def view(self) -> GenerationView:
        if self.seen is None:
            self.seen = GenerationView(
                plan=self.plan,
                wanted=self.wanted,
                shares=tuple(self.shares[name] for name in self.plan.nodes),
                ranks=tuple(self.ranks[rank] for rank in sorted(self.ranks)),
                broken_continuity=self.broken,
                run_ordered=self.run_ordered,
            )
        return self.seen


@dataclass
class IncidentRow:
    incident: Incident
    version: int = 0
    command: Command | None = None
    attempts: int = 0
    states: list[IncidentState] = field(default_factory=list)
    receipt: Receipt | None = None
    opened_after_end: bool = False


@dataclass
class JobRow:
    shape: JobShape
    state: JobState = JobState.PENDING
    reason: str = ""
    stop_wanted: bool = False
    generation: int = 0
    state_since: float = 0.0
    launch_attempts: int = 0
    version: int = 0
    generations: dict[int, GenerationRow] = field(default_factory=dict)
    checkpoints: list[CheckpointRef] = field(default_factory=list)
    incidents: list[IncidentRow] = field(default_factory=list)
    pages: int = 0

    @property
    def id(self) -> str:
        return self.shape.id

    @property
    def open_incident(self) -> IncidentRow | None:
        return self.incidents[-1] if self.incidents and not self.incidents[-1].incident.ended else None

    @property
    def ended(self) -> bool:
        return self.state in JOB_ENDS


@dataclass
class SimulatedServer:
    """`announce` tells the world of a state that a job or incident enters, and answers whether something waited for it;
    `push` sends a node its orders.
    """

    time: VirtualTime
    rng: random.Random
    noise: float
    plant: str
    report: Callable[[Violation], None]
    announce: Callable[[str, str], bool]
    push: Callable[[str], None]
    nodes: dict[str, NodeRow] = field(default_factory=dict)
    jobs: dict[str, JobRow] = field(default_factory=dict)
    worker_deaths: dict[str, list[int]] = field(default_factory=dict)
    """Per job: how many of the next steps lose their worker before the save, and after it."""
    decisions: int = 0
    _fleet: FleetSnapshot | None = None
    _fleet_seen: tuple[object, ...] = ()
    _plans: int = 0
    _incidents: int = 0

    # --- Looking ---

    def fleet(self) -> FleetSnapshot:
        now = tuple((node.connected, node.healthy, node.cordoned, node.claimed_by) for node in self.nodes.values())
        if now != self._fleet_seen or self._fleet is None:
            self._fleet_seen = now
            self._fleet = FleetSnapshot(nodes=tuple(self._node_view(node) for node in self.nodes.values()))
        return self._fleet

    @staticmethod
    def _node_view(node: NodeRow) -> NodeView:
        health = NodeHealth.HEALTHY if node.healthy else NodeHealth.UNHEALTHY
        return NodeView(
            name=node.shape.name,
            address=node.shape.name,
            health=health if node.connected else NodeHealth.UNKNOWN,
            slots=node.shape.slots,
            claimed_by=node.claimed_by,
            cordoned=node.cordoned,
            rack=node.shape.rack,
        )

    def situation(self, job: JobRow, row: IncidentRow | None) -> Situation:
        self._plans += 1
        situation = Situation(
            job=JobView(
                id=job.id,
                name=job.id,
                state=job.state,
                node_count=job.shape.node_count,
                ranks_per_node=job.shape.ranks_per_node,
                stop_wanted=job.stop_wanted,
                launch_attempts=job.launch_attempts,
                state_since=job.state_since,
            ),
            fleet=self.fleet(),
            generations=tuple(self._seen(generation, row) for generation in job.generations.values()),
            checkpoints=tuple(job.checkpoints),
            fresh=FreshIds(plan_id=f"plan-{self._plans}", run_id=f"run-{self._plans}", generation=job.generation + 1),
            policy=POLICY,
            command=row.command if row else None,
        )
        plan = row.incident.plan if row else None
        new = job.generations.get(plan.generation) if plan else None
        if row is None or new is None or not new.run_ordered:
            return situation
        verdict, caught_up_at = self._judge(job, row.incident, new)
        return replace(situation, verdict=verdict, caught_up_at=caught_up_at)

    def _seen(self, generation: GenerationRow, incident: IncidentRow | None) -> GenerationView:
        view = generation.view()
        return NeverFenced(**vars(view)) if self.plant == "no-fence" and incident is not None else view

    def _judge(self, job: JobRow, incident: Incident, new: GenerationRow) -> tuple[Verdict, float | None]:
        parent_step = new.plan.parent.step if new.plan.parent else 0
        reached = max(incident.reached_step or 0, parent_step)
        views = {number: generation.view() for number, generation in job.generations.items()}
        reference: dict[tuple[int, int], StepRecord] = {}
        for number in reference_generations(views, upto=new.plan.generation):
            for key, record in job.generations[number].steps.items():
                reference.setdefault(key, record)
        verdict = judge(
            parent=new.plan.parent,
            world_size=new.plan.world_size,
            same_topology=True,
            reached_step=incident.reached_step,
            resumes=list(new.resumes.values()),
            reference=reference,
            replayed=new.steps,
        )
        beyond = [record.at for (_, number), record in new.steps.items() if number == reached + 1]
        return verdict, max(beyond) if len(beyond) == new.plan.world_size else None

    # --- Advancing ---

    def advance(self, job_id: str) -> None:
        """Decide now and save now, or a little later where the worker is slow; then go on while there is more to do."""
        for _ in range(MAX_TRANSITIONS):
            decided = self._decide(self.jobs[job_id])
            if decided is None:
                return
            save, late = decided
            if late or (self.noise and self.rng.random() < 0.15 * self.noise):
                self.time.after(self.rng.uniform(0.05, 2.0), partial(self._save_late, job_id, save))
                return
            try:
                if not save():
                    return
            except Conflict:
                continue

    def _save_late(self, job_id: str, save: Callable[[], bool]) -> None:
        try:
            more = save()
        except Conflict:
            more = True
        if more:
            self.advance(job_id)

    def _decide(self, job: JobRow) -> tuple[Callable[[], bool], bool] | None:
        """What to save, as a function that saves it and says whether to go on, and whether something comes in between.

        None if there is nothing to do.
        """
        row = job.open_incident
        return self._decide_incident(job, row) if row else self._decide_job(job)

    def _decide_incident(self, job: JobRow, row: IncidentRow) -> tuple[Callable[[], bool], bool] | None:
        self.decisions += 1
        now = self.time.now
        situation = self.situation(job, row)
        if row.attempts >= MAX_ADVANCE_ATTEMPTS and row.incident.state is not IncidentState.ESCALATED:
            outcome = escalate_poisoned(row.incident, situation, now, attempts=row.attempts)
        else:
            outcome = step(row.incident, situation, now)
        if row.command is None and outcome == Outcome(incident=row.incident):
            return None
        version = row.version
        row.attempts += 1
        late = self.announce(job.id, f"about to be {outcome.incident.state.value}")
        return lambda: self._save_incident(job, row, version, outcome), late

    def _save_incident(self, job: JobRow, row: IncidentRow, version: int, outcome: Outcome) -> bool:
        if self._worker_dies(job.id, before_save=True):
            return False
        if row.version != version or row.incident.ended:
            raise Conflict
        self._perform(job, outcome.instructions, row)
        moved = outcome.incident.state is not row.incident.state
        row.incident, row.command, row.attempts, row.version = outcome.incident, None, 0, version + 1
        if moved:
            row.states.append(outcome.incident.state)
        self.check(job)
        if moved:
            self.announce(job.id, outcome.incident.state.value)
        return not self._worker_dies(job.id, before_save=False)

    def _decide_job(self, job: JobRow) -> tuple[Callable[[], bool], bool] | None:
        self.decisions += 1
        situation = self.situation(job, None)
        outcome = step_job(situation, self.time.now)
        if all(
            isinstance(instruction, MarkJob) and (instruction.state, instruction.reason) == (job.state, job.reason)
            for instruction in outcome.instructions
        ):
            fault = find_fault(situation)
            if fault is not None:
                self._open(job, fault)
                return lambda: True, False
            return None
        version = job.version
        marks = [instruction.state.value for instruction in outcome.instructions if isinstance(instruction, MarkJob)]
        late = any(self.announce(job.id, f"about to be {state}") for state in marks)
        return lambda: self._save_job(job, version, outcome), late

    def _save_job(self, job: JobRow, version: int, outcome: JobOutcome) -> bool:
        if self._worker_dies(job.id, before_save=True):
            return False
        if job.version != version:
            raise Conflict
        before = job.state
        self._perform(job, outcome.instructions, None)
        job.version += 1
        job.launch_attempts += outcome.failed_launch
        self.check(job)
        return job.state is not before and not self._worker_dies(job.id, before_save=False)

    def _worker_dies(self, job_id: str, *, before_save: bool) -> bool:
        deaths = self.worker_deaths.get(job_id)
        if deaths is None or deaths[not before_save] <= 0:
            return False
        deaths[not before_save] -= 1
        return True

    # --- Performing: all or nothing, as in one transaction ---

    def _perform(self, job: JobRow, instructions: tuple[Instruction, ...], row: IncidentRow | None) -> None:
        for instruction in instructions:
            self._refuse_conflict(job, instruction)
        generations = [generation.view() for generation in job.generations.values()]
        for violation in violations_of_step(
            job=job.id,
            generations=generations,
            checkpoints=job.checkpoints,
            fleet=self.fleet(),
            instructions=instructions,
        ):
            self.report(violation)
        for instruction in instructions:
            self._apply(job, instruction, row)

    def _refuse_conflict(self, job: JobRow, instruction: Instruction) -> None:
        match instruction:
            case PreparePlan(plan=plan):
                if plan.generation <= job.generation:
                    raise Conflict
                for name in plan.nodes:
                    node = self.nodes[name]
                    if node.claimed_by not in (None, job.id) or node.cordoned or not (node.connected and node.healthy):
                        raise Conflict
            case RunPlan(generation=number):
                if job.generations[number].wanted is not AssignmentPhase.PREPARE:
                    raise Conflict

    def _apply(self, job: JobRow, instruction: Instruction, row: IncidentRow | None) -> None:
        match instruction:
            case StopGeneration(generation=number):
                generation = job.generations[number]
                if generation.wanted is not AssignmentPhase.STOP:
                    generation.wanted, generation.seen = AssignmentPhase.STOP, None
                    self._bump(generation)
            case PreparePlan(plan=plan):
                job.generation = plan.generation
                for name in plan.nodes:
                    self.nodes[name].claimed_by = job.id
                shares = {name: ShareView(node=name) for name in plan.nodes}
                made = GenerationRow(plan=plan, wanted=AssignmentPhase.PREPARE, shares=shares)
                job.generations[plan.generation] = made
                self._bump(made)
            case RunPlan(generation=number, master_port=port):
                generation = job.generations[number]
                generation.wanted, generation.run_ordered, generation.master_port = AssignmentPhase.RUN, True, port
                generation.seen = None
                self._bump(generation)
            case MarkJob(state=state, reason=reason):
                self._mark(job, state, reason)
            case ReleaseNodes(keep=keep):
                for node in self.nodes.values():
                    if node.claimed_by == job.id and node.shape.name not in keep:
                        node.claimed_by = None
            case MarkContinuityBroken(generation=number):
                job.generations[number].broken = True
                job.generations[number].seen = None
            case IssueReceipt(receipt=receipt):
                if row is not None:
                    row.receipt = receipt
            case PageOperator():
                job.pages += 1

    def _mark(self, job: JobRow, state: JobState, reason: str) -> None:
        if job.state is not state:
            job.state, job.state_since = state, self.time.now
            self.announce(job.id, state.value)
        job.reason = reason

    def _bump(self, generation: GenerationRow) -> None:
        for name in generation.plan.nodes:
            self.nodes[name].revision += 1
            self.push(name)

    def order_for(self, node: str) -> tuple[int, tuple[tuple[AssignmentPhase, RecoveryPlan, int | None], ...]]:
        """The node's revision and everything that it should run: phase, plan, port."""
        return self.nodes[node].revision, tuple(
            (generation.wanted, generation.plan, generation.master_port)
            for job in self.jobs.values()
            for generation in job.generations.values()
            if node in generation.shares
            and (generation.wanted is not AssignmentPhase.STOP or generation.shares[node].proof is None)
        )

    # --- Asking ---

    def command(self, job_id: str, command: Command) -> None:
        row = self.jobs[job_id].open_incident
        if row is None:
            return
        if command in FITTING_COMMANDS.get(row.incident.state, (Command.PAUSE, Command.CLOSE)):
            row.command = command
            self.advance(job_id)

    def stop_job(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if not job.ended:
            job.stop_wanted = True
            self.advance(job_id)

    # --- Facts ---

    def generation_of(self, node: str, job_id: str, number: int) -> GenerationRow | None:
        generation = self.jobs[job_id].generations.get(number)
        return generation if generation is not None and node in generation.shares else None

    def rank_row(self, generation: GenerationRow, rank: int) -> RankView:
        return generation.ranks.get(rank) or RankView(rank=rank, node=generation.plan.node_of(rank))

    def store_rank(self, job_id: str, generation: GenerationRow, view: RankView) -> None:
        generation.ranks[view.rank] = view
        generation.seen = None
        if view.died:
            self._judge_exit(self.jobs[job_id], generation, view)

    def _judge_exit(self, job: JobRow, generation: GenerationRow, view: RankView) -> None:
        if generation.wanted is not AssignmentPhase.RUN or job.stop_wanted or job.ended:
            return
        if job.open_incident is not None:
            return
        fault = Fault(generation=generation.plan.generation, rank=view.rank, at=view.exited_at, sentence="a rank died")
        self._open(job, fault)

    def _open(self, job: JobRow, fault: Fault) -> None:
        now = self.time.now
        self._incidents += 1
        incident = Incident(
            id=f"inc-{self._incidents}",
            job=job.id,
            broken_generation=fault.generation,
            state=IncidentState.DETECTED,
            opened_at=now,
            fault_at=min(fault.at if fault.at is not None else now, now),
            state_since=now,
            deadline_at=POLICY.deadline(IncidentState.DETECTED, now=now),
        )
        job.incidents.append(
            IncidentRow(
                incident=incident,
                states=[IncidentState.DETECTED],
                opened_after_end=job.generations[fault.generation].view().ended_well,
            )
        )
        self._mark(job, JobState.RECOVERING, "")
        self.check(job)
        self.announce(job.id, IncidentState.DETECTED.value)

    def store_report(
        self,
        node: str,
        job_id: str,
        generation: GenerationRow,
        *,
        phase: SeenPhase,
        reason: str,
        port: int | None,
        fingerprint: str,
        proof: ProofKind | None,
    ) -> None:
        share = generation.shares[node]
        if share.proof is not None and phase is not SeenPhase.STOPPED:
            return
        share = replace(
            share,
            seen=phase,
            reason=reason,
            master_port=port if port is not None else share.master_port,
            fingerprint=fingerprint or share.fingerprint,
            fingerprint_parts={"script": fingerprint} if fingerprint else share.fingerprint_parts,
        )
        if proof is not None and share.proof is None:
            share = replace(share, proof=FenceProof(node=node, kind=proof, at=self.time.now, evidence="simulated"))
        generation.shares[node] = share
        generation.seen = None
        if phase is SeenPhase.STOPPED:
            for view in [view for view in generation.ranks.values() if view.node == node and not view.exited]:
                gone = replace(view, exited_at=self.time.now, detail="gone without a report")
                self.store_rank(job_id, generation, gone)

    # --- Judging ---

    def history(self, job: JobRow) -> JobHistory:
        return JobHistory(
            job=job.id,
            state=job.state,
            generations=tuple(generation.view() for generation in job.generations.values()),
            incidents=tuple(
                IncidentHistory(
                    incident=row.incident,
                    states=tuple(row.states),
                    receipt=row.receipt,
                    opened_after_end=row.opened_after_end,
                )
                for row in job.incidents
            ),
        )

    def check(self, job: JobRow) -> None:
        for violation in violations_of_job(self.history(job), fleet=self.fleet(), policy=POLICY):
            self.report(violation)
