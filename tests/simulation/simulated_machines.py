"""The physical world of the simulation: nodes with power, clocks and networks, the ranks on them, and their leases.

What is true here is what the invariants are judged by; server and agents only know what they were told.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from schedules import JobShape
from simulated_agent import Key, SimulatedAgent
from simulated_lease import KILL_WITHIN_S, LOOK_INTERVAL_S, NodeLease
from simulated_training import Crash, LostLoss, SimulatedTraining
from virtual_time import VirtualTime

from agents.protocol.messages import Phase as WirePhase
from everstep.elastic.lease import Phase
from recovery.domain.invariants import LivingRank, Violation, violations_among_living
from recovery.domain.plan import CheckpointRef, RecoveryPlan

_PHASES = {
    WirePhase.SETUP: Phase.SETUP,
    WirePhase.COMPILE: Phase.COMPILE,
    WirePhase.STEP: Phase.STEP,
    WirePhase.SAVE: Phase.SAVE,
    WirePhase.EVALUATION: Phase.EVALUATION,
}


@dataclass
class Machine:
    """One node as it physically is."""

    name: str
    drift: float
    """By how much its clock runs fast."""
    powered: bool = True
    frozen: int = 0
    """How many things hold its processes in SIGSTOP right now."""
    thawed_at: float = 0.0
    cut_off: int = 0
    """How many things cut its ranks from all others."""
    boots: int = 1
    contact_at: float = 0.0
    """When the newest heartbeat was sent that was answered with a grant."""
    lied_about: bool = False
    """Somebody attested that it is off, and it is not: from here on no guarantee holds for what runs on it."""

    @property
    def boot_id(self) -> str:
        return f"{self.name}/boot-{self.boots}"


@dataclass
class JobFaults:
    """What is planted in one job's script."""

    complete: set[CheckpointRef] = field(default_factory=set)
    """Checkpoints whose manifest is on disk."""
    late: set[CheckpointRef] = field(default_factory=set)
    """Those that were published after a newer generation had been ordered to run."""
    crashes: list[Crash] = field(default_factory=list)
    lost_losses: list[LostLoss] = field(default_factory=list)
    poisoned: set[CheckpointRef] = field(default_factory=set)
    breaks: list[str] = field(default_factory=list)
    exit_last: dict[int, int] = field(default_factory=dict)


@dataclass
class SimulatedMachines:
    """`newest_run` tells the newest generation of a job that was ever ordered to run."""

    time: VirtualTime
    rng: random.Random
    report: Callable[[Violation], None]
    newest_run: Callable[[str], int]
    shape_of: Callable[[str], JobShape]
    nodes: dict[str, Machine] = field(default_factory=dict)
    agents: dict[str, SimulatedAgent] = field(default_factory=dict)
    jobs: dict[str, JobFaults] = field(default_factory=dict)
    trainings: dict[Key, SimulatedTraining] = field(default_factory=dict)
    leases: dict[tuple[str, Key], NodeLease] = field(default_factory=dict)
    looks_at: dict[tuple[str, Key], float] = field(default_factory=dict)
    """When the runner's next look is due that could find its lease run out."""
    starting: Counter[tuple[str, Key]] = field(default_factory=Counter)
    killed: set[tuple[str, Key]] = field(default_factory=set)

    # --- What agents do ---

    def start_ranks(self, node: str, plan: RecoveryPlan) -> None:
        """Start a runner, which starts the ranks a moment later."""
        key = (plan.job, plan.generation)
        machine = self.nodes[node]
        if plan.lease is not None and self.shape_of(plan.job).keeps_lease:
            self.leases[node, key] = NodeLease(
                now=self.time.now, drift=machine.drift, limits=plan.lease, contact_at=machine.contact_at
            )
            self._look(node, key)
            if self.leases[node, key].expired:
                self.killed.add((node, key))
        self.starting[node, key] += 1
        self.time.after(self.rng.uniform(0.05, 0.8), lambda: self._started(node, plan))

    def _started(self, node: str, plan: RecoveryPlan) -> None:
        key = (plan.job, plan.generation)
        if self.nodes[node].frozen and (node, key) not in self.killed:
            self.time.after(0.5, lambda: self._started(node, plan))
            return
        self.starting[node, key] -= 1
        if (node, key) in self.killed:
            self.agents[node].runner_ended(key)
            return
        training = self.trainings.get(key) or self._new_training(key, plan)
        first = plan.nodes.index(node) * plan.ranks_per_node
        for rank in range(first, first + plan.ranks_per_node):
            training.start_rank(rank)
        self.check_living()

    def _new_training(self, key: Key, plan: RecoveryPlan) -> SimulatedTraining:
        faults = self.jobs[plan.job]
        training = SimulatedTraining(
            plan=plan,
            shape=self.shape_of(plan.job),
            time=self.time,
            rng=self.rng,
            around=self,
            crashes=faults.crashes,
            lost_losses=faults.lost_losses,
            poisoned=faults.poisoned,
            broken_part=faults.breaks.pop(0) if faults.breaks and plan.parent is not None else "",
            exit_last=faults.exit_last,
        )
        if plan.parent is not None and plan.parent not in faults.complete:
            sentence = f"Generation {key} resumes from {plan.parent}, which is not on disk."
            self.report(Violation(rule="parent-is-complete", sentence=sentence))
        if plan.parent in faults.late:
            sentence = f"Generation {key} resumes from {plan.parent}, written after a newer generation was to run."
            self.report(Violation(rule="late-checkpoint-is-never-chosen", sentence=sentence))
        if plan.parent in faults.poisoned:
            sentence = f"Generation {key} resumes from {plan.parent}, which holds what is no number."
            self.report(Violation(rule="poisoned-is-never-loaded", sentence=sentence))
        self.trainings[key] = training
        return training

    def kill_ranks(self, node: str, key: Key) -> None:
        """The agent kills what is left; what dies of that is no news."""
        self.killed.add((node, key))
        for rank in self._ranks_on(node, key):
            self.trainings[key].end_rank(rank, signal=9, told=False)

    def has_ranks(self, node: str, key: Key) -> bool:
        pending = self.starting[node, key] > 0 and (node, key) not in self.killed
        return pending or bool(self._ranks_on(node, key))

    # --- What happens to nodes ---

    def vanish(self, node: str, *, quietly: bool = True) -> None:
        """Every rank on a node is gone, and nobody there has seen how."""
        for key in list(self.trainings):
            self.vanish_run(node, key, quietly=quietly)
        self.killed.update(where for where, count in self.starting.items() if where[0] == node and count > 0)

    def vanish_run(self, node: str, key: Key, *, quietly: bool = False) -> None:
        """The ranks of one run are gone with their runner."""
        if self.starting[node, key]:
            self.killed.add((node, key))
        for rank in self._ranks_on(node, key):
            self.trainings[key].end_rank(rank, signal=9, told=False, quietly=quietly)

    def freeze(self, node: str) -> None:
        machine = self.nodes[node]
        machine.frozen += 1
        if machine.frozen == 1:
            for training in self._trainings_on(node):
                training.freeze(node)

    def thaw(self, node: str) -> None:
        """Whoever wakes first looks first: the runner at once, or a rank that still has a step in hand."""
        machine = self.nodes[node]
        machine.frozen = max(0, machine.frozen - 1)
        if machine.frozen:
            return
        machine.thawed_at = self.time.now
        for training in self._trainings_on(node):
            training.thaw(node)
        for where, lease in self.leases.items():
            if where[0] == node and not lease.expired:
                self._look_at(*where, self.time.now + self.rng.uniform(0.0, LOOK_INTERVAL_S))

    def cut_off(self, node: str) -> None:
        self.nodes[node].cut_off += 1
        for training in self._trainings_on(node):
            training.troubled_at = self.time.now

    def join_again(self, node: str) -> None:
        machine = self.nodes[node]
        machine.cut_off = max(0, machine.cut_off - 1)
        for training in self._trainings_on(node):
            training.go_on()

    def grant(self, node: str, sent_at: float) -> None:
        """A heartbeat was answered: the agent tells its runners."""
        machine = self.nodes[node]
        machine.contact_at = max(machine.contact_at, sent_at)
        for where, lease in self.leases.items():
            if where[0] == node and not lease.expired and self.has_ranks(*where):
                lease.contact(sent_at)
                if not machine.frozen:
                    self._look(*where)

    # --- What ranks meet ---

    def tell(self, key: Key, rank: int, fact: tuple[object, ...]) -> None:
        node = self.trainings[key].plan.node_of(rank)
        if self.nodes[node].powered:
            self.agents[node].tell((fact[0], *key, *fact[1:], self.time.now))

    def gone(self, key: Key, rank: int) -> None:
        node = self.trainings[key].plan.node_of(rank)
        if not self.has_ranks(node, key):
            self.time.after(0.1, lambda: self.agents[node].runner_ended(key))

    def held_up(self, nodes: tuple[str, ...]) -> bool:
        machines = [self.nodes[name] for name in nodes]
        return any(machine.frozen for machine in machines) or (
            len(machines) > 1 and any(machine.cut_off for machine in machines)
        )

    def is_frozen(self, node: str) -> bool:
        return self.nodes[node].frozen > 0

    def progressed(self, key: Key, node: str, phase: WirePhase, steps: int) -> None:
        lease = self.leases.get((node, key))
        if lease is not None and not lease.expired:
            lease.progress(self.time.now, phase=_PHASES[phase], steps=steps)
            if not self.nodes[node].frozen:
                self._look(node, key)

    def may_act(self, key: Key, node: str) -> bool:
        lease = self.leases.get((node, key))
        return lease is None or lease.holds(self.time.now)

    def published(self, ref: CheckpointRef, job: str) -> None:
        faults = self.jobs[job]
        faults.complete.add(ref)
        if self.newest_run(job) > ref.generation:
            faults.late.add(ref)

    def acted(self, key: Key, node: str, what: str) -> None:
        newest = self.newest_run(key[0])
        if newest > key[1] and not self._lied_about(key):
            sentence = f"Generation {key[1]} of {key[0]} {what} on {node} after generation {newest} was ordered to run."
            self.report(Violation(rule="one-generation-acts", sentence=sentence))

    # --- Leases ---

    def _look(self, node: str, key: Key) -> None:
        """A sign has come, or the limit has passed: if the lease is over, the ranks are killed."""
        lease = self.leases[node, key]
        if not lease.holds(self.time.now):
            self.time.after(self.rng.uniform(0.05, KILL_WITHIN_S), lambda: self._kill_expired(node, key))
            return
        due_at = self.time.now + lease.looks_again_in_s(self.time.now)
        # A look that is due earlier anyway finds out how long there is still to wait.
        if due_at < self.looks_at.get((node, key), 0.0) or self.looks_at.get((node, key), 0.0) <= self.time.now:
            self._look_at(node, key, due_at + self.rng.uniform(0.001, LOOK_INTERVAL_S))

    def _look_at(self, node: str, key: Key, at: float) -> None:
        self.looks_at[node, key] = at
        self.time.after(at - self.time.now, lambda: self._due_look(node, key, at))

    def _due_look(self, node: str, key: Key, at: float) -> None:
        """A runner that is frozen looks as soon as it thaws."""
        over = self.leases[node, key].expired or not self.has_ranks(node, key)
        if self.looks_at[node, key] == at and not self.nodes[node].frozen and not over:
            self.looks_at[node, key] = 0.0
            self._look(node, key)

    def _kill_expired(self, node: str, key: Key) -> None:
        """The runner kills its ranks, and is gone with them."""
        self.killed.add((node, key))
        for rank in self._ranks_on(node, key):
            self.trainings[key].end_rank(rank, signal=9, detail="The lease has run out.")

    # --- Judging ---

    def acting_ranks(self, node: str, key: Key) -> list[int]:
        """Ranks that are there and could do something: those a fence must be true of.

        A node that has just thawed kills those whose lease ran out meanwhile; until then their own look holds them.
        """
        machine = self.nodes[node]
        thawing = self.time.now - machine.thawed_at <= LOOK_INTERVAL_S + KILL_WITHIN_S and not self.may_act(key, node)
        return [] if machine.frozen or thawing else self._ranks_on(node, key)

    def check_living(self) -> None:
        living = [
            LivingRank(job=key[0], generation=key[1], node=training.plan.node_of(rank), rank=rank)
            for key, training in self.trainings.items()
            for rank in training.alive
            if rank in self.acting_ranks(training.plan.node_of(rank), key) and not self._lied_about(key)
        ]
        for violation in violations_among_living(living):
            self.report(violation)

    def _lied_about(self, key: Key) -> bool:
        """Somebody vouched wrongly for a node of this generation, or of another one of the job."""
        return any(
            self.nodes[name].lied_about
            for other, training in self.trainings.items()
            if other[0] == key[0]
            for name in training.plan.nodes
        )

    def _trainings_on(self, node: str) -> Iterator[SimulatedTraining]:
        return (training for training in list(self.trainings.values()) if node in training.plan.nodes)

    def _ranks_on(self, node: str, key: Key) -> list[int]:
        training = self.trainings.get(key)
        return [] if training is None else training.ranks_on(node)
