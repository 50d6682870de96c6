"""One node's agent in the simulation: the real reconciliation of orders, and what it keeps on disk when it dies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from virtual_time import VirtualTime

from agents.protocol.messages import Assignment, AssignmentPhase, LaunchSpec, ProofKind, SeenPhase
from agents.supervisor.highest import HighWater
from agents.supervisor.orders import Act, Known, reconcile
from recovery.domain.plan import RecoveryPlan

Key = tuple[str, int]
"""(job, generation)"""

Fact = tuple[Any, ...]
"""("share", job, generation, `Report`), or a fact about a rank: (kind, job, generation, ..., at)."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One generation in an order."""

    phase: AssignmentPhase
    plan: RecoveryPlan


@dataclass(frozen=True, kw_only=True)
class Order:
    revision: int
    wanted: tuple[Wanted, ...]

    @property
    def wants_to_run(self) -> bool:
        return any(one.phase is AssignmentPhase.RUN for one in self.wanted)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a generation does on this node."""

    plan: RecoveryPlan
    phase: SeenPhase
    boot_id: str
    reason: str = ""
    port: int | None = None
    fingerprint: str = ""
    proof: ProofKind | None = None
    keeps_lease: bool = False


ENDED = (SeenPhase.STOPPED, SeenPhase.PREPARE_FAILED, SeenPhase.REFUSED)


class Node(Protocol):
    """What the agent meets of its machine and of the server."""

    def start_ranks(self, node: str, plan: RecoveryPlan) -> None: ...
    def kill_ranks(self, node: str, key: Key) -> None: ...
    def has_ranks(self, node: str, key: Key) -> bool: ...
    def is_frozen(self, node: str) -> bool: ...
    def boot_id(self, node: str) -> str: ...
    def keeps_lease(self, plan: RecoveryPlan) -> bool: ...
    def deliver(self, node: str, seq: int, fact: Fact) -> None: ...
    def hello(self, node: str) -> int | None:
        """Begin a session; how far the server holds this outbox, None if no server answers."""

    def closed(self, node: str, *, noticed: bool) -> None:
        """The connection is gone; the server notices, or goes on believing in it."""


@dataclass
class SimulatedAgent:
    name: str
    slots: int
    time: VirtualTime
    rng: random.Random
    noise: float
    node: Node
    forgetful: bool = False
    """The planted bug: it keeps no record of what it has heard of, and takes whatever it is told."""

    # On disk: survives the agent.
    high: dict[str, HighWater] = field(default_factory=dict)
    ran: dict[Key, RecoveryPlan] = field(default_factory=dict)
    """Runs that were started, with the boot they were started in."""
    ran_in: dict[Key, str] = field(default_factory=dict)
    outbox: list[Fact] = field(default_factory=list)
    dropped: int = 0
    """Messages up to this one were acknowledged, and are on no disk any more."""
    run_log: list[Fact] = field(default_factory=list)
    """Facts that runners and ranks wrote down while the agent was dead."""

    # In memory.
    alive: bool = True
    connected: bool = False
    since: float = 0.0
    """When the connection was made."""
    out_of_contact: int = 0
    """How many reasons there are for having no contact right now."""
    connection: int = 0
    sent: int = 0
    revision: int = 0
    life: int = 0
    """Counts the agent's lives: what one life has begun, the next does not finish."""
    wanted: tuple[Wanted, ...] = ()
    known: dict[Key, Known] = field(default_factory=dict)
    plans: dict[Key, RecoveryPlan] = field(default_factory=dict)
    ports: dict[Key, int] = field(default_factory=dict)
    reported: dict[Key, Report] = field(default_factory=dict)
    waiting: list[Order] = field(default_factory=list)
    """What came over the socket while the agent was frozen."""
    last_arrival: float = 0.0

    # Faults that wait for their moment: counts of what will go wrong next, by kind.
    armed: Counter[str] = field(default_factory=Counter)
    stuck: bool = False

    # --- Link ---

    @property
    def can_be_heard(self) -> bool:
        return self.alive and self.connected and not self.node.is_frozen(self.name)

    def connect(self) -> None:
        if not self.alive or self.out_of_contact or self.connected or self.node.is_frozen(self.name):
            return
        acknowledged = self.node.hello(self.name)
        if acknowledged is None:
            return
        self.connected = True
        self.since = self.time.now
        self.connection += 1
        self.sent = max(acknowledged, self.dropped)
        self.revision = 0
        for key, report in self.reported.items():
            self.outbox.append(("share", *key, report))
        self._send()

    def disconnect(self, *, noticed: bool = True) -> None:
        if self.connected:
            self.connected = False
            self.connection += 1
            self.waiting.clear()
            self.node.closed(self.name, noticed=noticed)

    def thawed(self) -> None:
        """Read what the socket holds, in order."""
        orders, self.waiting = self.waiting, []
        for order in orders:
            self.receive(order)
        self.connect()
        self._send()

    def tell(self, fact: Fact) -> None:
        """Put a durable fact into the outbox; of a dead agent, into its run's log, where it reads it later."""
        if not self.alive:
            self.run_log.append(fact)
            return
        self.outbox.append(fact)
        self._send()

    def send_again(self, acknowledged: int) -> None:
        """The server could not store for a while."""
        if self.connected:
            self.sent = max(acknowledged, self.dropped)
            self._send()

    def acknowledged(self, through: int) -> None:
        self.dropped = max(self.dropped, through)

    def _send(self) -> None:
        """Send what was not sent on this connection: in order, each a little later."""
        if not self.can_be_heard:
            return
        connection = self.connection
        while self.sent < len(self.outbox):
            seq = self.sent + 1
            self.sent = seq
            latency = 0.005 + (self.rng.expovariate(4.0) * self.noise if self.noise else 0.0)
            self.last_arrival = max(self.last_arrival, self.time.now + latency)
            delay = self.last_arrival - self.time.now
            self.time.after(delay, lambda seq=seq: self._arrive(connection, seq))  # type: ignore[misc]
            if self.noise and self.rng.random() < 0.02 * self.noise:
                # Sent twice, or late on a connection that is gone: the server tells by the number.
                self.time.after(delay + self.rng.uniform(0.1, 8.0), lambda seq=seq: self._arrive(0, seq))  # type: ignore[misc]

    def _arrive(self, connection: int, seq: int) -> None:
        if connection in (0, self.connection):
            self.node.deliver(self.name, seq, self.outbox[seq - 1])

    # --- Orders ---

    def receive(self, order: Order) -> None:
        if not self.alive or not self.connected:
            return
        if self.node.is_frozen(self.name):
            self.waiting.append(order)
        elif order.revision >= self.revision:
            self.revision = order.revision
            self.wanted = order.wanted
            self._forget_ended()
            self.reconcile()

    def _forget_ended(self) -> None:
        """What has ended and is not asked after any more is forgotten; the record of generations is not."""
        named = {(one.plan.job, one.plan.generation) for one in self.wanted}
        for key in [key for key, run in self.known.items() if key not in named and run.phase in ENDED]:
            del self.known[key], self.reported[key]

    def reconcile(self) -> None:
        """Do what the latest order still asks for; also asked when a run has changed."""
        plans = {(one.plan.job, one.plan.generation, one.plan.plan_id): one.plan for one in self.wanted}
        assignments = [
            Assignment(
                job=one.plan.job,
                generation=one.plan.generation,
                plan_id=one.plan.plan_id,
                phase=one.phase,
                launch=None if one.phase is AssignmentPhase.STOP else _launch(one.plan.ranks_per_node),
            )
            for one in self.wanted
        ]
        high = {} if self.forgetful else self.high
        result = reconcile(assignments, known=self.known, high=high, slots=self.slots)
        self.high = {**self.high, **result.high}
        for action in result.actions:
            assignment = action.assignment
            plan = plans[assignment.job, assignment.generation, assignment.plan_id]
            self._act(action.act, (plan.job, plan.generation), plan, action.reason)

    def _act(self, act: Act, key: Key, plan: RecoveryPlan, reason: str) -> None:
        match act:
            case Act.PREPARE:
                self._prepare(key, plan)
            case Act.START:
                self._run(key, plan)
            case Act.STOP:
                self._stop(key, plan)
            case Act.REFUSE:
                self._report_once(key, plan, SeenPhase.REFUSED, reason)
            case Act.FAIL:
                self._report_once(key, plan, SeenPhase.PREPARE_FAILED, reason)

    def _report_once(self, key: Key, plan: RecoveryPlan, phase: SeenPhase, reason: str) -> None:
        told = self.reported.get(key)
        if told is None or (told.plan.plan_id, told.phase) != (plan.plan_id, phase):
            self._report(key, plan, phase, reason=reason, becomes=False)

    def _prepare(self, key: Key, plan: RecoveryPlan) -> None:
        self._report(key, plan, SeenPhase.PREPARING)
        slow = self._take("slow_prepare")
        life = self.life
        delay = self.rng.uniform(20.0, 40.0) if slow else self.rng.uniform(0.05, 0.6)

        def done() -> None:
            if self.life != life or key not in self.known or self.known[key].phase is not SeenPhase.PREPARING:
                return
            if self.node.is_frozen(self.name):
                self.time.after(1.0, done)
            elif self._take("prepare_fails"):
                self._report(key, plan, SeenPhase.PREPARE_FAILED, reason="checkpoint")
            elif self._take("refuse_policy"):
                self._report(key, plan, SeenPhase.REFUSED, reason="policy")
            elif self._take("busy_port_while_preparing"):
                self._report(key, plan, SeenPhase.PREPARE_FAILED, reason="port_busy")
            else:
                self.ports[key] = self.rng.randrange(20000, 21000)
                fingerprint = "other" if self._take("mismatch") else "same"
                self._report(key, plan, SeenPhase.PREPARED, port=self.ports[key], fingerprint=fingerprint)
                self.reconcile()

        self.time.after(delay, done)

    def _run(self, key: Key, plan: RecoveryPlan) -> None:
        self.ran[key] = plan
        self.ran_in[key] = self.node.boot_id(self.name)
        if self._take("silent_runner"):
            self._report(key, plan, SeenPhase.RUNNING)
        elif self._take("busy_port"):
            self._stopped(key, plan, ProofKind.PROC_SCAN_EMPTY, reason="port_busy")
        else:
            self._report(key, plan, SeenPhase.RUNNING)
            self.node.start_ranks(self.name, plan)

    def _stop(self, key: Key, plan: RecoveryPlan) -> None:
        self._report(key, plan, SeenPhase.STOPPING)
        life = self.life

        def kill() -> None:
            if self.life != life:
                return
            if self.stuck or self.node.is_frozen(self.name):
                self.time.after(1.0, kill)
                return
            self.node.kill_ranks(self.name, key)
            self.time.after(0.05, prove)

        def prove() -> None:
            if self.life != life:
                return
            if self.node.has_ranks(self.name, key) or self.node.is_frozen(self.name):
                self.time.after(0.2, kill)
                return
            self._stopped(key, plan, self._proof(key))

        self.time.after(self.rng.uniform(0.02, 0.5 + 2.0 * self.noise), kill)

    def _proof(self, key: Key) -> ProofKind:
        if key not in self.ran:
            return ProofKind.NEVER_STARTED
        other_boot = self.ran_in[key] != self.node.boot_id(self.name)
        return ProofKind.BOOT_CHANGED if other_boot else ProofKind.PROC_SCAN_EMPTY

    def _stopped(self, key: Key, plan: RecoveryPlan, proof: ProofKind, *, reason: str = "") -> None:
        """What has ended does not run again here; then whatever waited for the room may go on."""
        high = self.high.get(key[0])
        if high is not None and high.stopped < key[1]:
            self.high[key[0]] = HighWater(generation=high.generation, plan_id=high.plan_id, stopped=key[1])
        self._report(key, plan, SeenPhase.STOPPED, reason=reason, proof=proof)
        self.reconcile()

    def runner_ended(self, key: Key) -> None:
        """All ranks of a run are gone by themselves: say so, with proof."""
        run = self.known.get(key)
        if not self.alive or run is None or run.phase is not SeenPhase.RUNNING:
            return
        if self.node.is_frozen(self.name):
            self.time.after(1.0, lambda: self.runner_ended(key))
        elif not self.node.has_ranks(self.name, key):
            self._stopped(key, self.plans[key], ProofKind.PROC_SCAN_EMPTY, reason="runner")

    def _report(
        self,
        key: Key,
        plan: RecoveryPlan,
        phase: SeenPhase,
        *,
        reason: str = "",
        port: int | None = None,
        fingerprint: str = "",
        proof: ProofKind | None = None,
        becomes: bool = True,
    ) -> None:
        """becomes: whether this is how the run now stands, not only what is said of an order that was refused."""
        report = Report(
            plan=plan,
            phase=phase,
            boot_id=self.node.boot_id(self.name),
            reason=reason,
            port=port,
            fingerprint=fingerprint,
            proof=proof,
            keeps_lease=self.node.keeps_lease(plan),
        )
        if becomes or key not in self.known:
            ranks = plan.ranks_per_node
            self.known[key] = Known(plan_id=plan.plan_id, phase=phase, ranks=ranks)
            self.plans[key] = plan
        self.reported[key] = report
        self.tell(("share", *key, report))

    def _take(self, fault: str) -> bool:
        if self.armed[fault] <= 0:
            return False
        self.armed[fault] -= 1
        return True

    # --- Lives ---

    def die(self) -> None:
        """The agent's process is gone; its ranks are not."""
        self.disconnect()
        self.alive = False
        self.life += 1
        self.known.clear()
        self.plans.clear()
        self.ports.clear()
        self.reported.clear()
        self.wanted = ()

    def start_again(self) -> None:
        """A new life: read the runs' logs, take up what runs, and say what was found."""
        if self.alive:
            return
        self.alive = True
        facts, self.run_log = self.run_log, []
        self.outbox.extend(facts)
        for key, plan in self.ran.items():
            if self.node.has_ranks(self.name, key):
                self._report(key, plan, SeenPhase.RUNNING)
            else:
                self._stopped(key, plan, self._proof(key), reason="runner")
        self.connect()


@cache
def _launch(ranks: int) -> LaunchSpec:
    return LaunchSpec(
        argv=["python3"],
        working_directory="/job",
        environment={},
        run_id="run",
        node_rank=0,
        node_count=1,
        ranks_per_node=ranks,
        first_rank=0,
        world_size=ranks,
        master_address="10.0.0.1",
        checkpoint_directory="/checkpoints",
    )
