"""One node of the simulation: an agent that reconciles orders, and what it keeps on disk when it dies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from virtual_time import VirtualTime

from agents.protocol.messages import AssignmentPhase, ProofKind, SeenPhase
from recovery.domain.plan import RecoveryPlan

Key = tuple[str, int]
"""(job, generation)"""

Fact = tuple[Any, ...]
"""("share", job, generation, phase, reason, port, fingerprint, proof) or a fact about a rank, see `simulated_world`."""

RESEND_S = 1.0


class Machine(Protocol):
    """What the agent can do to the real world of its node."""

    def start_ranks(self, node: str, plan: RecoveryPlan) -> None: ...
    def kill_ranks(self, node: str, key: Key) -> None: ...
    def has_ranks(self, node: str, key: Key) -> bool: ...
    def deliver(self, node: str, seq: int, fact: Fact) -> None: ...
    def acknowledged(self, node: str) -> int: ...
    def set_connected(self, node: str, connected: bool) -> None: ...


@dataclass
class SimulatedAgent:
    name: str
    time: VirtualTime
    rng: random.Random
    noise: float
    machine: Machine

    # On disk: survives the agent.
    highest: dict[str, tuple[int, str]] = field(default_factory=dict)
    stopped: set[Key] = field(default_factory=set)
    ran: set[Key] = field(default_factory=set)
    plans: dict[Key, RecoveryPlan] = field(default_factory=dict)
    outbox: list[Fact] = field(default_factory=list)
    run_log: list[Fact] = field(default_factory=list)
    """Facts that runners wrote down while the agent was dead."""

    # In memory.
    alive: bool = True
    connected: bool = False
    out_of_contact: int = 0
    """How many reasons there are for having no contact right now."""
    connection: int = 0
    sent: int = 0
    revision: int = 0
    prepared: dict[Key, int] = field(default_factory=dict)
    preparing: set[Key] = field(default_factory=set)
    reported: dict[Key, Fact] = field(default_factory=dict)
    last_arrival: float = 0.0

    # Faults that wait for their moment: counts of what will go wrong next, by kind.
    armed: Counter[str] = field(default_factory=Counter)
    stuck: bool = False

    # --- Link ---

    def connect(self) -> None:
        if not self.alive or self.out_of_contact or self.connected:
            return
        self.connected = True
        self.connection += 1
        self.sent = self.machine.acknowledged(self.name)
        self.machine.set_connected(self.name, True)
        for fact in list(self.reported.values()):
            self.outbox.append(fact)
        self._send()

    def disconnect(self) -> None:
        if self.connected:
            self.connected = False
            self.connection += 1
            self.machine.set_connected(self.name, False)

    def tell(self, fact: Fact) -> None:
        """Put a durable fact into the outbox; of a dead agent, into its runner's log, where it reads it later."""
        if not self.alive:
            if fact[0] in ("started", "exited", "finished"):
                self.run_log.append(fact)
            return
        self.outbox.append(fact)
        self._send()

    def _send(self) -> None:
        """Send what was not sent on this connection: in order, each a little later."""
        if not self.connected:
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
            self.machine.deliver(self.name, seq, self.outbox[seq - 1])

    # --- Orders ---

    def receive(self, revision: int, assignments: tuple[tuple[AssignmentPhase, RecoveryPlan, int | None], ...]) -> None:
        if not self.alive or not self.connected or revision < self.revision:
            return
        self.revision = revision
        for phase, plan, _port in assignments:
            self._reconcile(phase, plan)

    def _reconcile(self, phase: AssignmentPhase, plan: RecoveryPlan) -> None:
        key = (plan.job, plan.generation)
        if phase is AssignmentPhase.STOP:
            self._stop(key, plan)
            return
        if key in self.stopped:
            return
        if (plan.generation, plan.plan_id) != self._highest(plan):
            self._report(key, SeenPhase.REFUSED, reason="older_generation")
            return
        self.plans[key] = plan
        if phase is AssignmentPhase.RUN:
            self._run(key, plan)
        else:
            self._prepare(key, plan)

    def _highest(self, plan: RecoveryPlan) -> tuple[int, str]:
        """Keep the newest plan of a job; another plan of the same generation does not replace it."""
        known = self.highest.get(plan.job, (0, ""))
        if plan.generation > known[0]:
            known = self.highest[plan.job] = (plan.generation, plan.plan_id)
        return known

    def _prepare(self, key: Key, plan: RecoveryPlan, *, then: Callable[[], None] | None = None) -> None:
        if key in self.preparing or key in self.ran or (key in self.prepared and then is None):
            return
        self.preparing.add(key)
        self._report(key, SeenPhase.PREPARING)
        slow = self._take("slow_prepare")
        connection_of_life = self.alive_since
        delay = self.rng.uniform(20.0, 40.0) if slow else self.rng.uniform(0.05, 0.6)

        def done() -> None:
            if self.alive_since != connection_of_life:
                return
            self.preparing.discard(key)
            if key in self.stopped:
                return
            if self._take("prepare_fails"):
                self._report(key, SeenPhase.PREPARE_FAILED, reason="checkpoint")
                return
            if self._take("refuse_policy"):
                self._report(key, SeenPhase.REFUSED, reason="policy")
                return
            if self._take("busy_port_while_preparing"):
                self._report(key, SeenPhase.PREPARE_FAILED, reason="port_busy")
                return
            self.prepared[key] = self.rng.randrange(20000, 21000)
            fingerprint = "other" if self._take("mismatch") else "same"
            if then is None:
                self._report(key, SeenPhase.PREPARED, port=self.prepared[key], fingerprint=fingerprint)
            else:
                then()

        self.time.after(delay, done)

    alive_since: int = 0
    """Counts the agent's lives: what one life has begun, the next does not finish."""

    def _run(self, key: Key, plan: RecoveryPlan) -> None:
        if key in self.ran:
            return
        if key not in self.prepared:
            self._prepare(key, plan, then=lambda: self._run(key, plan))
            return
        self.ran.add(key)
        if self._take("silent_runner"):
            self._report(key, SeenPhase.RUNNING)
            return
        if self._take("busy_port"):
            self._report(key, SeenPhase.STOPPED, reason="port_busy", proof=ProofKind.PROC_SCAN_EMPTY)
            return
        self._report(key, SeenPhase.RUNNING)
        self.machine.start_ranks(self.name, plan)

    def _stop(self, key: Key, plan: RecoveryPlan) -> None:
        self.stopped.add(key)
        self.plans[key] = plan
        self._highest(plan)
        last = self.reported.get(key)
        if last is not None and last[3] is SeenPhase.STOPPED and last[7] is not None:
            self.tell(last)
            return
        if last is not None and last[3] is SeenPhase.STOPPING:
            return
        self._report(key, SeenPhase.STOPPING)
        self._finish_stop(key)

    def _finish_stop(self, key: Key) -> None:
        life = self.alive_since

        def kill() -> None:
            if self.alive_since != life:
                return
            if self.stuck:
                self.time.after(1.0, kill)
                return
            self.machine.kill_ranks(self.name, key)
            self.time.after(0.05, prove)

        def prove() -> None:
            if self.alive_since != life:
                return
            if self.machine.has_ranks(self.name, key):
                self.time.after(0.2, kill)
                return
            proof = ProofKind.PROC_SCAN_EMPTY if key in self.ran else ProofKind.NEVER_STARTED
            self._report(key, SeenPhase.STOPPED, proof=proof)

        self.time.after(self.rng.uniform(0.02, 0.5 + 2.0 * self.noise), kill)

    def runner_ended(self, key: Key) -> None:
        """All ranks of a run are gone by themselves: say so, with proof."""
        if self.alive and key not in self.stopped and not self.machine.has_ranks(self.name, key):
            self._report(key, SeenPhase.STOPPED, reason="runner", proof=ProofKind.PROC_SCAN_EMPTY)

    def _report(
        self,
        key: Key,
        phase: SeenPhase,
        *,
        reason: str = "",
        port: int | None = None,
        fingerprint: str = "",
        proof: ProofKind | None = None,
    ) -> None:
        fact = ("share", *key, phase, reason, port, fingerprint, proof)
        self.reported[key] = fact
        self.tell(fact)

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
        self.alive_since += 1
        self.prepared.clear()
        self.preparing.clear()
        self.reported.clear()
        self.revision = 0

    def start_again(self) -> None:
        """A new life: read the runners' logs, take up what runs, and say what was found."""
        if self.alive:
            return
        self.alive = True
        facts, self.run_log = self.run_log, []
        for fact in facts:
            self.outbox.append(fact)
        for key in self.ran:
            if self.machine.has_ranks(self.name, key):
                self._report(key, SeenPhase.RUNNING)
            else:
                self._report(key, SeenPhase.STOPPED, reason="runner", proof=ProofKind.PROC_SCAN_EMPTY)
        self.connect()
