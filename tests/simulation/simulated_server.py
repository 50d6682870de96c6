"""The server of the simulation: rows in memory, and what `recovery.engine`, `actuators` and `sweep` do with them.

The decisions are the real ones (`step`, `step_job`, `judge`, `find_fault`, `step_breaker`, `judge_silence`); only the
shell around them is made up, with the same conditional saves, so that a stale decision meets the same conflict.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from planted import NeverFenced, planted
from schedules import JobShape, NodeShape
from simulated_agent import Order, Wanted
from simulated_web import contact_bounds
from virtual_time import VirtualTime

from agents.protocol.messages import AssignmentPhase, ProofKind
from recovery.domain.breaker import ControlPlaneIncident, rearm, step_breaker
from recovery.domain.continuity import Verdict, judge
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
    RecordProof,
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
from recovery.domain.plan import CheckpointRef, LeaseLimits, RecoveryPlan
from recovery.domain.policy import Policy
from recovery.domain.receipt import Receipt
from recovery.domain.silence import Contact, ObserverView, judge_silence
from recovery.domain.situation import Command, FreshIds, JobView, Situation
from recovery.domain.step_records import ResumeRecord, StepRecord
from recovery.domain.trust import UNKNOWN, Health, Trust, appraise, judge_sanity
from recovery.domain.witnesses import ProbeView

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
        IncidentState.WAITING_FOR_FENCE: 60.0,
        IncidentState.PAUSED: 60.0,
    },
    placing_s=20.0,
    launching_s=25.0,
    sane_steps=4,
)
"""Shorter than in production: virtual seconds cost real ones."""

LEASE = LeaseLimits(setup_s=40.0, compile_s=40.0, step_s=12.0, save_s=12.0, evaluation_s=12.0)
AWAY_AFTER_S = 30.0
RECONNECT_S = 40.0
"""As in `recovery.absence`: time in which nobody looked is given back."""
PROBE_AGAIN_AFTER_S = 10.0
PROBES_COUNT_FOR_S = 60.0

MAX_ADVANCE_ATTEMPTS = 5
MAX_TRANSITIONS = 20
SWEEP_S = 2.0
FITTING_COMMANDS = {
    IncidentState.PAUSED: (Command.RESUME, Command.RETRY, Command.CLOSE),
    IncidentState.ESCALATED: (Command.RETRY, Command.CLOSE),
    IncidentState.WAITING_FOR_FENCE: (Command.CLOSE,),
}


class Conflict(Exception):
    """The world changed between look and save; nothing was changed."""


@dataclass
class NodeRow:
    shape: NodeShape
    session: bool = False
    """Somebody is connected, as far as the server has noticed."""
    healthy: bool = True
    cordoned: bool = False
    claimed_by: str | None = None
    revision: int = 0
    acknowledged: int = 0
    last_heard_at: float | None = None
    observer: str = ""
    boot_id: str = ""
    quarantined_boot: str = ""
    said_off_in: str = ""
    """The boot in which somebody said that it is off."""


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
    seen: GenerationView | None = None
    """The view made of this row; None after a change."""

    def resumed(self, rank: int, *, step: int, saved: dict[str, str], live: dict[str, str]) -> None:
        """What a rank says when it enters its training loop."""
        self.resumes[rank] = ResumeRecord(
            rank=rank, step=step, saved_digest=saved, live_digest=live, deterministic=True
        )

    def view(self) -> GenerationView:
        if self.seen is None:
            self.seen = GenerationView(
                plan=self.plan,
                wanted=self.wanted,
                shares=tuple(self.shares[name] for name in self.plan.nodes),
                ranks=tuple(self.ranks[rank] for rank in sorted(self.ranks)),
                broken_continuity=self.broken,
                run_ordered=self.run_ordered,
                lease=self.plan.lease,
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
    pages: int = 0


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
    adopted: set[int] = field(default_factory=set)
    """Generations that were found running."""
    behind_since: float | None = None
    """An agent knows a newer generation than these rows: nothing is concluded before that is cleared up."""
    generations: dict[int, GenerationRow] = field(default_factory=dict)
    checkpoints: list[CheckpointRef] = field(default_factory=list)
    clean: set[CheckpointRef] = field(default_factory=set)
    incidents: list[IncidentRow] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.shape.id

    @property
    def open_incident(self) -> IncidentRow | None:
        return self.incidents[-1] if self.incidents and not self.incidents[-1].incident.ended else None

    @property
    def ended(self) -> bool:
        return self.state in JOB_ENDS

    def ledger(self) -> dict[CheckpointRef, Trust]:
        """What the rows know of each checkpoint; the sweep has seen which ones were followed by sane steps."""
        for ref in self.checkpoints:
            row = self.generations.get(ref.generation)
            if ref in self.clean or row is None:
                continue
            losses = {key: record.loss for key, record in row.steps.items()}
            sanity = judge_sanity(ref.step, losses=losses, world_size=row.plan.world_size, sane_steps=POLICY.sane_steps)
            if sanity.sane:
                self.clean.add(ref)
        return {ref: Trust(health=Health.CLEAN) if ref in self.clean else UNKNOWN for ref in self.checkpoints}


@dataclass
class SimulatedServer:
    """`announce` tells the world of a state that a job or incident enters, and answers whether something waited for it;
    `push` sends a node its orders; `judge_truth` compares an instruction with what is physically so; `probe` asks a
    node's agent whether another node's kernel answers; `strays` are nodes that run what the rows do not know.
    """

    time: VirtualTime
    rng: random.Random
    noise: float
    plant: str
    report: Callable[[Violation], None]
    announce: Callable[[str, str], bool]
    push: Callable[[str], None]
    judge_truth: Callable[[JobRow, IncidentRow | None, Situation, Instruction], None]
    probe: Callable[[str, str, Callable[[bool], None]], None]
    observers: dict[str, ObserverView]
    strays: Callable[[], dict[str, str]]
    nodes: dict[str, NodeRow] = field(default_factory=dict)
    jobs: dict[str, JobRow] = field(default_factory=dict)
    breakers: list[ControlPlaneIncident] = field(default_factory=list)
    probes: dict[str, ProbeView] = field(default_factory=dict)
    probed_at: dict[str, float] = field(default_factory=dict)
    database_up: bool = True
    epoch: int = 0
    """Counts restored backups: what was decided before one is not saved after it."""
    looked_at: float = 0.0
    worker_deaths: dict[str, list[int]] = field(default_factory=dict)
    """Per job: how many of the next steps lose their worker before the save, and after it."""
    decisions: int = 0
    _fleet: FleetSnapshot | None = None
    _fleet_seen: tuple[object, ...] = ()
    _plans: int = 0
    _incidents: int = 0

    # --- Looking ---

    @property
    def breaker(self) -> ControlPlaneIncident | None:
        return self.breakers[-1] if self.breakers and not self.breakers[-1].ended else None

    def fleet(self) -> FleetSnapshot:
        """Every node as it is known now; looked at once per moment and change."""
        now = (
            self.time.now,
            self.breaker,
            *(
                (
                    node.session, node.healthy, node.cordoned, node.claimed_by, node.last_heard_at, node.observer,
                    node.quarantined_boot,
                )
                for node in self.nodes.values()
            ),
        )  # fmt: skip
        if now != self._fleet_seen or self._fleet is None:
            self._fleet_seen = now
            unconfirmed = self._unconfirmed()
            self._fleet = FleetSnapshot(
                nodes=tuple(self._node_view(node, unconfirmed) for node in self.nodes.values()),
                breaker_open=self.breaker is not None,
                rearmed_at=max((b.rearmed_at or 0.0 for b in self.breakers), default=0.0),
            )
        return self._fleet

    def _node_view(self, node: NodeRow, unconfirmed: dict[str, str]) -> NodeView:
        now = self.time.now
        silence = judge_silence(
            last_heard_at=node.last_heard_at,
            observer=node.observer,
            observers=tuple(self.observers.values()),
            now=now,
        )
        heard_at_most, observed_until = contact_bounds(
            self.observers, observer=node.observer, last_heard_at=node.last_heard_at, now=now
        )
        health = NodeHealth.HEALTHY if node.healthy else NodeHealth.UNHEALTHY
        unknown = not node.session or silence.contact in (Contact.LOST, Contact.UNOBSERVED)
        return NodeView(
            name=node.shape.name,
            address=node.shape.name,
            health=NodeHealth.UNKNOWN if unknown else health,
            slots=node.shape.slots,
            claimed_by=node.claimed_by,
            cordoned=node.cordoned,
            rack=node.shape.rack,
            contact=silence.contact,
            last_heard_at=node.last_heard_at,
            silent_s=silence.silent_s,
            heard_at_most=heard_at_most,
            observed_until=observed_until,
            boot_id=node.boot_id,
            quarantined="told off and heard again" if node.quarantined_boot else "",
            unconfirmed=unconfirmed.get(node.shape.name, ""),
        )

    def _unconfirmed(self) -> dict[str, str]:
        return self.strays() | {
            share.node: f"generation {row.plan.generation} of {job.id}"
            for job in self.jobs.values()
            for row in job.generations.values()
            if row.run_ordered
            for share in row.shares.values()
            if share.proof is not None and not share.confirmed
        }

    def situation(self, job: JobRow, row: IncidentRow | None) -> Situation:
        self._plans += 1
        generations = tuple(self._seen(generation, row) for generation in job.generations.values())
        situation = Situation(
            job=JobView(
                id=job.id,
                name=job.id,
                state=job.state,
                node_count=job.shape.node_count,
                min_nodes=job.shape.min_nodes,
                lease=LEASE,
                ranks_per_node=job.shape.ranks_per_node,
                stop_wanted=job.stop_wanted,
                launch_attempts=job.launch_attempts,
                state_since=job.state_since,
            ),
            fleet=self.fleet(),
            generations=generations,
            checkpoints=tuple(job.checkpoints),
            trust=appraise(job.ledger(), generations, sane_steps=POLICY.sane_steps),
            fresh=FreshIds(plan_id=f"plan-{self._plans}", run_id=f"run-{self._plans}", generation=job.generation + 1),
            policy=POLICY,
            command=row.command if row else None,
            probes=tuple(p for p in self.probes.values() if self.time.now - p.asked_at <= PROBES_COUNT_FOR_S),
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
            if views[number].plan.world_size != new.plan.world_size:
                continue
            lost_at = views[number].nonfinite_step
            for key, record in job.generations[number].steps.items():
                if lost_at is None or key[1] < lost_at:
                    reference.setdefault(key, record)
        verdict = judge(
            parent=new.plan.parent,
            world_size=new.plan.world_size,
            same_topology=job.generations[incident.broken_generation].plan.world_size == new.plan.world_size,
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
            if not self.database_up:
                return
            with planted(self.plant):
                decided = self._decide(self.jobs[job_id])
            if decided is None:
                return
            save, late = decided
            if late or (self.noise and self.rng.random() < 0.15 * self.noise):
                self.time.after(self.rng.uniform(0.05, 2.0), partial(self._save_late, job_id, save, self.epoch))
                return
            try:
                if not save():
                    return
            except Conflict:
                continue

    def _save_late(self, job_id: str, save: Callable[[], bool], epoch: int) -> None:
        if not self.database_up or epoch != self.epoch:
            return
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
        if job.behind_since is not None:
            return None
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
        return lambda: self._save_incident(job, row, version, outcome, situation), late

    def _save_incident(
        self, job: JobRow, row: IncidentRow, version: int, outcome: Outcome, situation: Situation
    ) -> bool:
        if self._worker_dies(job.id, before_save=True):
            return False
        if row.version != version or row.incident.ended:
            raise Conflict
        self._perform(job, outcome.instructions, row, situation)
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
        fault = find_fault(situation, self.time.now)
        if fault is not None:
            self.open_incident(job, fault)
            return lambda: True, False
        outcome = step_job(situation, self.time.now)
        if all(
            isinstance(instruction, MarkJob) and (instruction.state, instruction.reason) == (job.state, job.reason)
            for instruction in outcome.instructions
        ):
            return None
        version = job.version
        marks = [instruction.state.value for instruction in outcome.instructions if isinstance(instruction, MarkJob)]
        late = any(self.announce(job.id, f"about to be {state}") for state in marks)
        return lambda: self._save_job(job, version, outcome, situation), late

    def _save_job(self, job: JobRow, version: int, outcome: JobOutcome, situation: Situation) -> bool:
        if self._worker_dies(job.id, before_save=True):
            return False
        if job.version != version:
            raise Conflict
        before = job.state
        self._perform(job, outcome.instructions, None, situation)
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

    def _perform(
        self, job: JobRow, instructions: tuple[Instruction, ...], row: IncidentRow | None, situation: Situation
    ) -> None:
        for instruction in instructions:
            self._refuse_conflict(job, instruction)
            self.judge_truth(job, row, situation, instruction)
        generations = [generation.view() for generation in job.generations.values()]
        for violation in violations_of_step(
            job=job.id,
            generations=generations,
            checkpoints=job.checkpoints,
            fleet=self.fleet(),
            instructions=instructions,
            sane_steps=POLICY.sane_steps,
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
                    free = node.claimed_by in (None, job.id) and not node.cordoned and not node.quarantined_boot
                    if not (free and node.session and node.healthy):
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
            case RecordProof(generation=number, proof=proof):
                self.keep_proof(job, job.generations[number], proof)
            case RunPlan(generation=number, fences=fences):
                generation = job.generations[number]
                generation.wanted, generation.run_ordered = AssignmentPhase.RUN, True
                generation.plan = replace(generation.plan, fences=fences)
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
                if row is not None:
                    row.pages += 1

    def _mark(self, job: JobRow, state: JobState, reason: str) -> None:
        if job.state is not state:
            job.state, job.state_since = state, self.time.now
            self.announce(job.id, state.value)
        job.reason = reason

    def _bump(self, generation: GenerationRow) -> None:
        for name in generation.plan.nodes:
            self.nodes[name].revision += 1
            self.push(name)

    def order_for(self, node: str) -> Order:
        """Everything that the node should run; a stop stays in it until its own agent has proven it."""
        return Order(
            revision=self.nodes[node].revision,
            wanted=tuple(
                Wanted(phase=generation.wanted, plan=generation.plan)
                for job in self.jobs.values()
                for generation in job.generations.values()
                if node in generation.shares
                and (generation.wanted is not AssignmentPhase.STOP or not generation.shares[node].confirmed)
            ),
        )

    # --- Sweeping ---

    def sweep(self) -> None:
        """Every two seconds: first whether absence may be believed, then all that is open."""
        if not self.database_up:
            return
        now = self.time.now
        if self.looked_at and now - self.looked_at >= AWAY_AFTER_S:
            self._move_deadlines(now - self.looked_at + RECONNECT_S)
        self.looked_at = now
        self._advance_breaker()
        self._ask_for_probes()
        for job in list(self.jobs.values()):
            self.advance(job.id)

    def _move_deadlines(self, by_s: float) -> None:
        for job in self.jobs.values():
            row = job.open_incident
            if row is not None and row.incident.deadline_at is not None:
                row.incident = replace(row.incident, deadline_at=row.incident.deadline_at + by_s)
                row.version += 1
            if job.state in (JobState.PENDING, JobState.PLACING, JobState.LAUNCHING):
                job.state_since = min(job.state_since + by_s, self.time.now)
                job.version += 1

    def _advance_breaker(self) -> None:
        self._incidents += 1
        outcome = step_breaker(self.breaker, self.fleet(), fresh_id=f"inc-{self._incidents}", now=self.time.now)
        if outcome.incident is None or outcome.incident == self.breaker:
            return
        if self.breaker is None:
            self.breakers.append(outcome.incident)
        else:
            self.breakers[-1] = outcome.incident

    def rearm(self) -> None:
        """An operator has looked."""
        if self.breaker is not None:
            outcome = rearm(self.breaker, by="operator", now=self.time.now)
            assert outcome.incident is not None
            self.breakers[-1] = outcome.incident

    def _ask_for_probes(self) -> None:
        fleet, now = self.fleet(), self.time.now
        lookers = [node.name for node in fleet.nodes if node.contact is Contact.SEEN and self.nodes[node.name].session]
        for node in fleet.nodes:
            silent = node.contact in (Contact.SUSPECT, Contact.LOST)
            due = now - self.probed_at.get(node.name, -1e9) > PROBE_AGAIN_AFTER_S
            if lookers and silent and due and self._may_hold_ranks(node.name):
                self.probed_at[node.name] = now
                looker = next((name for name in lookers if name != node.name), lookers[0])
                self.probe(looker, node.name, partial(self._probed, node.name, looker, now))

    def _probed(self, node: str, looker: str, asked_at: float, reachable: bool) -> None:
        self.probes[node] = ProbeView(node=node, prober=looker, asked_at=asked_at, reachable=reachable)

    def _may_hold_ranks(self, node: str) -> bool:
        return any(
            row.run_ordered and node in row.shares and row.shares[node].proof is None
            for job in self.jobs.values()
            for row in job.generations.values()
        )

    # --- Asking ---

    def command(self, job_id: str, command: Command) -> None:
        row = self.jobs[job_id].open_incident
        if row is None:
            return
        if command in FITTING_COMMANDS.get(row.incident.state, (Command.PAUSE, Command.CLOSE)):
            row.command, row.version = command, row.version + 1
            self.advance(job_id)

    def stop_job(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if not job.ended:
            job.stop_wanted = True
            for name, node in self.nodes.items():
                node.revision += 1
                self.push(name)
            self.advance(job_id)

    # --- Incidents and proofs ---

    def open_incident(self, job: JobRow, fault: Fault) -> None:
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
        job.version += 1
        if job.state is not JobState.STOPPING:
            self._mark(job, JobState.RECOVERING, "")
        self.check(job)
        self.announce(job.id, IncidentState.DETECTED.value)

    def keep_proof(self, job: JobRow, generation: GenerationRow, proof: FenceProof) -> None:
        """The first proof of a share stays; its silent ranks are gone."""
        share = generation.shares[proof.node]
        if share.proof is not None:
            return
        now = self.time.now
        generation.shares[proof.node] = replace(share, proof=replace(proof, recorded_at=now))
        generation.seen = self._fleet = None
        for rank, view in list(generation.ranks.items()):
            if view.node == proof.node and not view.exited:
                gone = replace(view, exited_at=proof.at, exit_recorded_at=now, detail="gone without a report")
                generation.ranks[rank] = gone
        self.time.after(0.0, lambda: self.advance(job.id))

    def fence_node(self, node: str, *, kind: ProofKind) -> None:
        """Somebody says that a node is off: that fences all that may still run there."""
        self.nodes[node].said_off_in = self.nodes[node].boot_id
        for job in self.jobs.values():
            for number, row in job.generations.items():
                if row.run_ordered and node in row.shares:
                    proof = FenceProof(node=node, kind=kind, at=self.time.now, evidence="said", generation=number)
                    self.keep_proof(job, row, proof)

    # --- Judging ---

    def history(self, job: JobRow) -> JobHistory:
        return JobHistory(
            job=job.id,
            state=job.state,
            generations=tuple(generation.view() for generation in job.generations.values()),
            adopted=frozenset(job.adopted),
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
