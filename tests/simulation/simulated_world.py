"""One schedule, run: server, agents and training under virtual time, with the invariants checked after every event."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from schedules import CALM_AFTER_S, Event, JobShape, Schedule
from simulated_agent import Fact, Key, SimulatedAgent
from simulated_server import SWEEP_S, GenerationRow, JobRow, NodeRow, SimulatedServer
from simulated_training import Crash, SimulatedTraining
from virtual_time import VirtualTime

from recovery.domain.continuity import ResumeRecord, StepRecord
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.invariants import LivingRank, Violation, violations_among_living
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.situation import Command

BOUND_S = CALM_AFTER_S + 1500.0
"""By then every job has ended and every incident has ended or is with a human."""

REPUSH_S = 1.0

NODE_FAULTS = frozenset({"prepare_fails", "refuse_policy", "busy_port", "silent_runner", "mismatch", "slow_prepare"})


@dataclass(frozen=True, kw_only=True)
class Result:
    violations: tuple[Violation, ...]
    faults: int
    """Faults that really happened, of those that the schedule holds."""
    decisions: int
    ends: Counter[str]
    moves: Counter[str]
    """How often incidents went from one state to another."""
    elapsed_s: float


class SimulatedWorld:
    def __init__(self, schedule: Schedule, *, plant: str = "") -> None:
        self.schedule = schedule
        self.time = VirtualTime()
        self.rng = random.Random(f"{schedule.seed}:{schedule.index}:noise")
        self.violations: list[Violation] = []
        self.faults = 0
        self.armed: list[Event] = []
        self.calm = False
        self.server = SimulatedServer(
            time=self.time,
            rng=self.rng,
            noise=schedule.noise,
            plant=plant,
            report=self.violations.append,
            announce=self._entered,
            push=self._push,
        )
        self.agents: dict[str, SimulatedAgent] = {}
        self.trainings: dict[Key, SimulatedTraining] = {}
        self.starting: Counter[tuple[str, Key]] = Counter()
        self.killed: set[tuple[str, Key]] = set()
        self.complete: dict[str, set[CheckpointRef]] = {}
        self.crashes: dict[str, list[Crash]] = {}
        self.breaks: dict[str, list[str]] = {}
        self.exit_last: dict[str, dict[int, int]] = {}
        self.retried: set[str] = set()
        self.repushing: set[str] = set()
        self._set_up()

    def _set_up(self) -> None:
        for shape in self.schedule.nodes:
            self.server.nodes[shape.name] = NodeRow(shape=shape)
            agent = SimulatedAgent(
                name=shape.name, time=self.time, rng=self.rng, noise=self.schedule.noise, machine=self
            )
            self.agents[shape.name] = agent
            self.time.after(0.1, agent.connect)
        for job in self.schedule.jobs:
            self.complete[job.id] = set()
            self.crashes[job.id] = []
            self.breaks[job.id] = []
            self.exit_last[job.id] = {}
            self.server.worker_deaths[job.id] = [0, 0]
            self.time.after(0.5 + job.submitted_at, lambda job=job: self._submit(job))  # type: ignore[misc]
        for event in self.schedule.events:
            self.time.after(event.at, lambda event=event: self._due(event))  # type: ignore[misc]
        self.time.after(SWEEP_S, self._sweep)
        self.time.after(CALM_AFTER_S, self._calm_down)

    def run(self) -> Result:
        """Run until everything has settled, something is violated, or the bound is passed."""
        while not self.violations and self.time.elapsed_s < BOUND_S:
            if self.calm and self._settled():
                break
            if not self.time.run_next():
                break
        else:
            if not self.violations:
                self._tell_unsettled()
        return self.result()

    def result(self) -> Result:
        """How it stands: at the end, or where a decision raised."""
        return Result(
            violations=tuple(self.violations),
            faults=self.faults,
            decisions=self.server.decisions,
            ends=Counter(self._end_of(job) for job in self.server.jobs.values()),
            moves=Counter(
                f"{before.value} -> {after.value}"
                for job in self.server.jobs.values()
                for row in job.incidents
                for before, after in pairwise(row.states)
            ),
            elapsed_s=self.time.elapsed_s,
        )

    # --- Jobs ---

    def _submit(self, shape: JobShape) -> None:
        self.server.jobs[shape.id] = JobRow(shape=shape, state_since=self.time.now)
        self.server.advance(shape.id)

    def _sweep(self) -> None:
        for job in list(self.server.jobs.values()):
            self.server.advance(job.id)
        self.time.after(SWEEP_S, self._sweep)

    def _calm_down(self) -> None:
        """Faults cease: what was broken works again, so that from here on everything must come to an end."""
        self.calm = True
        self.armed.clear()
        for agent in self.agents.values():
            agent.armed.clear()
            agent.stuck = False
            agent.noise = 0.0
            agent.out_of_contact = 0
            agent.start_again()
            agent.connect()
        for node in self.server.nodes.values():
            node.healthy, node.cordoned = True, False
        for deaths in self.server.worker_deaths.values():
            deaths[:] = [0, 0]
        self.server.noise = 0.0
        for pending in self.breaks.values():
            pending.clear()

    def _settled(self) -> bool:
        if len(self.server.jobs) < len(self.schedule.jobs):
            return False
        return all(self._job_settled(job) for job in self.server.jobs.values())

    def _job_settled(self, job: JobRow) -> bool:
        row = job.open_incident
        if row is not None and row.incident.state is IncidentState.ESCALATED:
            if not self.schedule.operator_retries or job.id in self.retried:
                return True
            self.retried.add(job.id)
            self.server.command(job.id, Command.RETRY)
            return False
        if row is None and job.ended:
            return not any(node.claimed_by == job.id for node in self.server.nodes.values())
        return row is None and job.state is JobState.PENDING and self._lacks_nodes(job)

    def _lacks_nodes(self, job: JobRow) -> bool:
        """Whether other jobs hold so many nodes, for a human to look at, that this one has to queue."""
        others_settled = all(other is job or other.ended or self._waits_for_human(other) for other in self._jobs())
        free = [node for node in self.server.nodes.values() if node.claimed_by in (None, job.id)]
        return others_settled and len(free) < job.shape.node_count

    def _jobs(self) -> list[JobRow]:
        return list(self.server.jobs.values())

    @staticmethod
    def _waits_for_human(job: JobRow) -> bool:
        return job.open_incident is not None and job.open_incident.incident.state is IncidentState.ESCALATED

    def _end_of(self, job: JobRow) -> str:
        row = job.open_incident
        return f"{job.state.value}, incident {row.incident.state.value}" if row else job.state.value

    def _tell_unsettled(self) -> None:
        for job in self._jobs():
            if not self._job_settled(job):
                self.violations.append(
                    Violation(
                        rule="everything-ends",
                        sentence=f"{BOUND_S - CALM_AFTER_S:.0f} s after the last fault {job.id} is still "
                        f"{self._end_of(job)} (generations: {self._generations_of(job)}).",
                    )
                )

    @staticmethod
    def _generations_of(job: JobRow) -> str:
        return "; ".join(
            f"{number} {row.wanted.value} " + ",".join(f"{s.node}={s.seen}" for s in row.shares.values())
            for number, row in job.generations.items()
        )

    # --- Faults ---

    def _due(self, event: Event) -> None:
        if self.calm:
            return
        if event.when:
            self.armed.append(event)
        else:
            self._apply(event)

    def _entered(self, job: str, state: str) -> bool:
        """A job or its incident enters a state: what waits for that happens a moment later. Whether anything did."""
        waiting = [event for event in self.armed if event.job == job and event.when == state]
        delays = (0.0, 0.01) if state.startswith("about to be") else (0.0, 0.01, 0.2, 1.0)
        for event in waiting:
            self.armed.remove(event)
            self.time.after(self.rng.choice(delays), lambda event=event: self._apply(event))  # type: ignore[misc]
        return bool(waiting)

    def _apply(self, event: Event) -> None:
        if self.calm:
            return
        self.faults += 1
        agent = self.agents.get(event.node)
        match event.kind:
            case "kill_rank":
                self._end_rank(event, signal=event.value)
            case "exit_rank":
                self._end_rank(event, exit_code=event.value)
            case "crash_at_step":
                self.crashes[event.job].append(Crash(rank=event.rank, step=event.value, times=int(event.seconds)))
            case "break_continuity":
                self.breaks[event.job] += [event.text] * event.value
            case "exit_last":
                self.exit_last[event.job][event.rank] = event.value
            case "worker_dies_before_save":
                self.server.worker_deaths[event.job][0] += event.value
            case "worker_dies_after_save":
                self.server.worker_deaths[event.job][1] += event.value
            case "repeat_advance" if event.job in self.server.jobs:
                for _ in range(event.value):
                    self.server.advance(event.job)
            case "command" if event.job in self.server.jobs:
                self.server.command(event.job, Command(event.text))
            case "stop_job" if event.job in self.server.jobs:
                self.server.stop_job(event.job)
            case "unhealthy":
                self._for_a_while(event, "healthy", False)
            case "cordon":
                self._for_a_while(event, "cordoned", True)
            case _ if agent is not None:
                self._break_node(event, agent)

    def _for_a_while(self, event: Event, field: str, value: bool) -> None:
        node = self.server.nodes[event.node]
        setattr(node, field, value)
        self.time.after(event.seconds, lambda: setattr(node, field, not value))

    def _break_node(self, event: Event, agent: SimulatedAgent) -> None:
        match event.kind:
            case "lose_contact":
                agent.out_of_contact += 1
                agent.disconnect()
                self.time.after(event.seconds, lambda: self._regain(agent))
            case "restart_agent":
                agent.die()
                self.time.after(event.seconds, agent.start_again)
            case "reboot":
                agent.die()
                for key in list(self.trainings):
                    self._vanish(agent.name, key)
                self.time.after(event.seconds, agent.start_again)
            case "stuck_stop":
                agent.stuck = True
                self.time.after(event.seconds, lambda: setattr(agent, "stuck", False))
            case "runner_dies":
                for key in list(self.trainings):
                    self._vanish(agent.name, key)
                    self.time.after(0.2, lambda key=key: agent.runner_ended(key) if key in agent.ran else None)  # type: ignore[misc]
            case "busy_port":
                agent.armed[self.rng.choice(("busy_port", "busy_port_while_preparing"))] += event.value
            case kind if kind in NODE_FAULTS:
                agent.armed[kind] += event.value or 1

    @staticmethod
    def _regain(agent: SimulatedAgent) -> None:
        agent.out_of_contact = max(0, agent.out_of_contact - 1)
        agent.connect()

    def _end_rank(self, event: Event, *, exit_code: int | None = None, signal: int | None = None) -> None:
        keys = [key for key, training in self.trainings.items() if key[0] == event.job and training.alive]
        if keys:
            training = self.trainings[max(keys)]
            training.end_rank(event.rank, exit_code=exit_code, signal=signal, detail="" if signal else "Error: planted")

    # --- The machines ---

    def start_ranks(self, node: str, plan: RecoveryPlan) -> None:
        key = (plan.job, plan.generation)
        self.starting[node, key] += 1
        self.time.after(self.rng.uniform(0.05, 0.8), lambda: self._started(node, plan))

    def _started(self, node: str, plan: RecoveryPlan) -> None:
        key = (plan.job, plan.generation)
        self.starting[node, key] -= 1
        if (node, key) in self.killed:
            return
        training = self.trainings.get(key) or self._new_training(key, plan)
        first = plan.nodes.index(node) * plan.ranks_per_node
        for rank in range(first, first + plan.ranks_per_node):
            training.start_rank(rank)
        self._check_living()

    def _new_training(self, key: Key, plan: RecoveryPlan) -> SimulatedTraining:
        job = key[0]
        breaks = self.breaks[job]
        training = SimulatedTraining(
            plan=plan,
            shape=self.server.jobs[job].shape,
            time=self.time,
            rng=self.rng,
            tell=lambda rank, fact: self._tell(key, rank, fact),
            gone=lambda rank: self._gone(key, rank),
            saved=self.complete[job].add,
            crashes=self.crashes[job],
            broken_part=breaks.pop(0) if breaks and plan.parent is not None else "",
            exit_last=self.exit_last[job],
        )
        if plan.parent is not None and plan.parent not in self.complete[job]:
            self.violations.append(
                Violation(
                    rule="parent-is-complete", sentence=f"Generation {key} resumes from {plan.parent}, not on disk."
                )
            )
        self.trainings[key] = training
        return training

    def _tell(self, key: Key, rank: int, fact: tuple[object, ...]) -> None:
        node = self.trainings[key].plan.node_of(rank)
        self.agents[node].tell((fact[0], *key, *fact[1:], self.time.now))

    def _gone(self, key: Key, rank: int) -> None:
        node = self.trainings[key].plan.node_of(rank)
        agent = self.agents[node]
        if not self.has_ranks(node, key):
            self.time.after(0.1, lambda: agent.runner_ended(key))

    def kill_ranks(self, node: str, key: Key) -> None:
        self.killed.add((node, key))
        training = self.trainings.get(key)
        for rank in self._ranks_on(node, key):
            if training is not None:
                training.end_rank(rank, signal=9)

    def _vanish(self, node: str, key: Key) -> None:
        if self.starting[node, key]:
            self.killed.add((node, key))
        for rank in self._ranks_on(node, key):
            self.trainings[key].vanish(rank)

    def _ranks_on(self, node: str, key: Key) -> list[int]:
        training = self.trainings.get(key)
        return [] if training is None else [r for r in sorted(training.alive) if training.plan.node_of(r) == node]

    def has_ranks(self, node: str, key: Key) -> bool:
        pending = self.starting[node, key] > 0 and (node, key) not in self.killed
        return pending or bool(self._ranks_on(node, key))

    def _check_living(self) -> None:
        living = [
            LivingRank(job=key[0], generation=key[1], node=training.plan.node_of(rank), rank=rank)
            for key, training in self.trainings.items()
            for rank in training.alive
        ]
        self.violations.extend(violations_among_living(living))

    # --- Between agents and server ---

    def acknowledged(self, node: str) -> int:
        return self.server.nodes[node].acknowledged

    def set_connected(self, node: str, connected: bool) -> None:
        self.server.nodes[node].connected = connected
        if connected:
            self._push(node)

    def _push(self, node: str) -> None:
        """Send a node its orders as they are now; they may be late, twice or lost, and are sent again while it lags."""
        agent, noise = self.agents[node], self.schedule.noise if not self.calm else 0.0
        if not agent.connected:
            return
        # Copies are taken when they are sent, so that a late one tells what was wanted then.
        order = self.server.order_for(node)
        if not noise or self.rng.random() > 0.3 * noise:
            self._send_order(agent, order, 0.005 + (self.rng.expovariate(3.0) * noise if noise else 0.0))
        if noise and self.rng.random() < 0.1 * noise:
            self._send_order(agent, order, self.rng.uniform(0.5, 15.0))
        if node not in self.repushing:
            self.repushing.add(node)
            self.time.after(REPUSH_S, lambda: self._repush(node))

    def _send_order(self, agent: SimulatedAgent, order: tuple[int, tuple[object, ...]], delay_s: float) -> None:
        self.time.after(delay_s, lambda: agent.receive(*order))  # type: ignore[arg-type]

    def _repush(self, node: str) -> None:
        self.repushing.discard(node)
        agent = self.agents[node]
        if agent.connected and agent.revision < self.server.nodes[node].revision:
            self._push(node)

    def deliver(self, node: str, seq: int, fact: Fact) -> None:
        """A durable message has arrived: taken if it is the next one, else a repeat or one too early."""
        row = self.server.nodes[node]
        if seq != row.acknowledged + 1:
            return
        row.acknowledged = seq
        kind, job, number, *rest = fact
        generation = self.server.generation_of(node, job, number)
        if generation is None:
            return
        if kind == "share":
            phase, reason, port, fingerprint, proof = rest
            self.server.store_report(
                node, job, generation, phase=phase, reason=reason, port=port, fingerprint=fingerprint, proof=proof
            )
        else:
            self._store_rank_fact(job, generation, kind, rest)
        row_of_job = self.server.jobs[job]
        if kind not in ("step", "saved"):
            self.server.check(row_of_job)
        elif row_of_job.state is JobState.RUNNING:
            return
        noise = self.server.noise
        if not noise or self.rng.random() > 0.2 * noise:
            self.time.after(0.01 + self.rng.random() * noise, lambda: self.server.advance(job))

    def _store_rank_fact(self, job: str, row: GenerationRow, kind: str, rest: list[Any]) -> None:
        at = rest[-1]
        number = row.plan.generation
        if kind == "saved":
            self.server.jobs[job].checkpoints.append(CheckpointRef(generation=number, step=rest[0]))
            return
        rank = rest[0]
        view = self.server.rank_row(row, rank)
        match kind:
            case "started":
                view = replace(view, pid=1000 + rank)
            case "resumed":
                _, step, saved, live, _ = rest
                view = replace(view, resumed_step=step, resumed_at=at, saved_digest=saved, live_digest=live)
                row.resumes[rank] = ResumeRecord(
                    rank=rank, step=step, saved_digest=saved, live_digest=live, deterministic=True
                )
            case "step":
                _, step, loss, learning_rate, first_sample, _ = rest
                row.steps[rank, step] = StepRecord(
                    generation=number,
                    rank=rank,
                    step=step,
                    at=at,
                    loss=loss,
                    learning_rate=learning_rate,
                    span_start=first_sample,
                    span_stop=first_sample + 8,
                )
                view = replace(view, first_step_at=view.first_step_at or at, last_step=max(view.last_step or 0, step))
            case "finished":
                view = replace(view, finished_step=rest[1])
            case "exited":
                _, code, signal, detail, _ = rest
                if view.exited:
                    return
                view = replace(view, exited_at=at, exit_code=code, signal=signal, detail=detail)
        self.server.store_rank(job, row, view)
