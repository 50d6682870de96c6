"""One schedule, run: server, web, agents, machines and training under virtual time, judged after every event."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from schedules import CALM_AFTER_S, Event, JobShape, Schedule
from simulated_agent import Fact, Order, SimulatedAgent
from simulated_ingest import SimulatedIngest
from simulated_machines import JobFaults, Machine, SimulatedMachines
from simulated_server import SWEEP_S, JobRow, NodeRow, SimulatedServer
from simulated_strays import CONCLUDES_AFTER_S, SimulatedStrays
from simulated_training import Crash, LostLoss
from simulated_web import BEAT_S, Caller, SimulatedWeb
from truth import Truth
from virtual_time import VirtualTime

from agents.protocol.messages import ProofKind
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.invariants import Violation
from recovery.domain.plan import RecoveryPlan
from recovery.domain.situation import Command

BOUND_S = CALM_AFTER_S + 1500.0
"""By then every job has ended and every incident has ended or is with a human."""

BOTH_SUBMITTED_S = 6.0
REPUSH_S = 1.0
HEARTBEAT_LOSS = 0.01
RECONNECTS_WITHIN_S = 5.0

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
    fences: Counter[str]
    """Kinds of proof that orders to run stood on."""
    breakers: int
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
        self.plant = plant
        self.web = SimulatedWeb(time=self.time, callers=self._callers, record=self._record, grant=self._grant)
        self.machines = SimulatedMachines(
            time=self.time,
            rng=self.rng,
            report=self.violations.append,
            newest_run=lambda job: self.truth.newest_run.get(job, 0),
            shape_of=lambda job: self.server.jobs[job].shape,
        )
        self.server = SimulatedServer(
            time=self.time,
            rng=self.rng,
            noise=schedule.noise,
            plant=plant,
            report=self.violations.append,
            announce=self._entered,
            push=self._push,
            judge_truth=lambda *found: self.truth.judge(*found),
            probe=self._probe,
            observers=self.web.rows,
            strays=lambda: self.strays.by_node(),
        )
        self.strays = SimulatedStrays(server=self.server, time=self.time)
        self.ingest = SimulatedIngest(server=self.server, strays=self.strays, time=self.time)
        self.truth = Truth(time=self.time, machines=self.machines, server=self.server, report=self.violations.append)
        self.agents: dict[str, SimulatedAgent] = {}
        self.retried: set[str] = set()
        self.repushing: set[str] = set()
        self.resending: set[str] = set()
        self.backups: dict[Event, tuple[object, ...]] = {}
        self.sent_orders: dict[str, list[Order]] = {shape.name: [] for shape in schedule.nodes}
        self._set_up()

    def _set_up(self) -> None:
        for shape in self.schedule.nodes:
            self.server.nodes[shape.name] = NodeRow(shape=shape)
            self.machines.nodes[shape.name] = Machine(name=shape.name, drift=self.rng.uniform(-0.01, 0.01))
            agent = SimulatedAgent(
                name=shape.name,
                slots=shape.slots,
                time=self.time,
                rng=self.rng,
                noise=self.schedule.noise,
                node=self,
                forgetful=self.plant == "old-plan-accepted",
            )
            self.agents[shape.name] = self.machines.agents[shape.name] = agent
            self.time.after(0.1, agent.connect)
        for job in self.schedule.jobs:
            self.machines.jobs[job.id] = JobFaults()
            self.server.worker_deaths[job.id] = [0, 0]
            self.time.after(0.5 + job.submitted_at, lambda job=job: self._submit(job))  # type: ignore[misc]
        for event in self.schedule.events:
            self.time.after(event.at, lambda event=event: self._due(event))  # type: ignore[misc]
            if event.kind == "restore_backup":
                before = max(BOTH_SUBMITTED_S, event.at - event.seconds)
                self.time.after(before, lambda event=event: self._take_backup(event))  # type: ignore[misc]
        self.web.start()
        self.time.after(0.5, self._beat)
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
            fences=Counter(
                proof.kind.value
                for job in self.server.jobs.values()
                for row in job.generations.values()
                for proof in row.plan.fences
            ),
            breakers=len(self.server.breakers),
            elapsed_s=self.time.elapsed_s,
        )

    # --- Jobs ---

    def _submit(self, shape: JobShape) -> None:
        self.server.jobs[shape.id] = JobRow(shape=shape, state_since=self.time.now)
        self.server.advance(shape.id)

    def _sweep(self) -> None:
        if self.server.database_up:
            self.strays.settle()
        self.server.sweep()
        self.truth.look()
        if self.calm:
            self._attend()
        self.time.after(SWEEP_S, self._sweep)

    def _attend(self) -> None:
        """After the calm an operator sees to what asks for one: the breaker, and nodes that a fence is missing of."""
        self.server.rearm()
        if not self.schedule.operator_attests:
            return
        for job in self._jobs():
            if job.behind_since is not None and self._is_told(job):
                # Part of a generation is left of which the rows know nothing: it cannot be taken over.
                self.server.stop_job(job.id)
            row = job.open_incident
            if row is None or row.incident.state is not IncidentState.WAITING_FOR_FENCE:
                continue
            if self.time.now - row.incident.state_since > 30.0:
                for node in self._unproven(job):
                    self._switch_off_and_say_so(node, ProofKind.ATTESTATION)

    def _is_told(self, job: JobRow) -> bool:
        """A human was paged for a job that lies behind what its agents know."""
        return self.time.now - (job.behind_since or self.time.now) > 1.5 * CONCLUDES_AFTER_S

    @staticmethod
    def _unproven(job: JobRow) -> list[str]:
        return [
            name
            for row in job.generations.values()
            if row.run_ordered
            for name, share in row.shares.items()
            if share.proof is None
        ]

    def _switch_off_and_say_so(self, node: str, kind: ProofKind) -> None:
        self._power_off(node, seconds=20.0)
        self.server.fence_node(node, kind=kind)

    def _calm_down(self) -> None:
        """Faults cease: what was broken works again, so that from here on everything must come to an end."""
        self.calm = True
        self.armed.clear()
        self.web.database_up = self.server.database_up = True
        for name, machine in self.machines.nodes.items():
            agent = self.agents[name]
            agent.armed.clear()
            agent.stuck = False
            agent.noise = 0.0
            agent.out_of_contact = 0
            if machine.frozen:
                machine.frozen = 1
                self._thaw(name)
            while machine.cut_off:
                self.machines.join_again(name)
            self._power_on(name)
            agent.start_again()
            agent.connect()
            if self.server.nodes[name].quarantined_boot:
                self._power_off(name, seconds=5.0)
        for node in self.server.nodes.values():
            node.healthy, node.cordoned = True, False
        for deaths in self.server.worker_deaths.values():
            deaths[:] = [0, 0]
        self.server.noise = 0.0
        for faults in self.machines.jobs.values():
            faults.breaks.clear()
        if not self.web.up:
            self._web_returns()

    def _settled(self) -> bool:
        if len(self.server.jobs) < len(self.schedule.jobs):
            return False
        return all(self._job_settled(job) for job in self.server.jobs.values())

    def _job_settled(self, job: JobRow) -> bool:
        row = job.open_incident
        if row is not None and row.incident.state is IncidentState.WAITING_FOR_FENCE:
            # With nobody to attest, it stays so, and is told each hour anew.
            return not self.schedule.operator_attests and row.pages > 0
        if row is not None and row.incident.state is IncidentState.ESCALATED:
            if not self.schedule.operator_retries or job.id in self.retried:
                return True
            self.retried.add(job.id)
            self.server.command(job.id, Command.RETRY)
            return False
        if job.behind_since is not None:
            return not self.schedule.operator_attests and self._is_told(job)
        if row is None and job.ended:
            return not any(node.claimed_by == job.id for node in self.server.nodes.values())
        return row is None and job.state is JobState.PENDING and self._lacks_nodes(job)

    def _lacks_nodes(self, job: JobRow) -> bool:
        """Whether other jobs hold so many nodes, for a human to look at, that this one has to queue."""
        others_settled = all(other is job or other.ended or self._waits_for_human(other) for other in self._jobs())
        free = [node for node in self.server.nodes.values() if node.claimed_by in (None, job.id)]
        return others_settled and len(free) < (job.shape.min_nodes or job.shape.node_count)

    def _jobs(self) -> list[JobRow]:
        return list(self.server.jobs.values())

    @staticmethod
    def _waits_for_human(job: JobRow) -> bool:
        row = job.open_incident
        return row is not None and row.incident.state in (IncidentState.ESCALATED, IncidentState.WAITING_FOR_FENCE)

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
            f"{number} {row.wanted.value} "
            + ",".join(f"{s.node}={s.seen} {s.proof.kind if s.proof else None}" for s in row.shares.values())
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
        node = event.node or self._some_node_of(event.job)
        agent = self.agents.get(node)
        match event.kind:
            case "kill_rank":
                self._end_rank(event, signal=event.value)
            case "exit_rank":
                self._end_rank(event, exit_code=event.value)
            case "crash_at_step":
                crash = Crash(rank=event.rank, step=event.value, times=int(event.seconds))
                self.machines.jobs[event.job].crashes.append(crash)
            case "lose_loss":
                lost = LostLoss(step=event.value, times=int(event.seconds))
                self.machines.jobs[event.job].lost_losses.append(lost)
            case "break_continuity":
                self.machines.jobs[event.job].breaks += [event.text] * event.value
            case "exit_last":
                self.machines.jobs[event.job].exit_last[event.rank] = event.value
            case "worker_dies_before_save":
                self.server.worker_deaths[event.job][0] += event.value
            case "worker_dies_after_save":
                self.server.worker_deaths[event.job][1] += event.value
            case "repeat_advance" if event.job in self.server.jobs:
                for _ in range(event.value):
                    self.server.advance(event.job)
            case "command" if event.job in self.server.jobs and self._serves:
                self.server.command(event.job, Command(event.text))
            case "stop_job" if event.job in self.server.jobs and self._serves:
                self.server.stop_job(event.job)
            case "stuck_and_cut":
                self._get_stuck_and_cut(event)
            case "web_restarts":
                self._web_goes()
                self.time.after(event.seconds, self._web_returns)
            case "web_stalls":
                self.web.stall(event.seconds)
            case "database_away":
                self.web.database_up = self.server.database_up = False
                self.time.after(event.seconds, self._database_returns)
            case "rearm":
                self.server.rearm()
            case "restore_backup" if self._serves:
                self._restore_backup(event)
            case "unhealthy":
                self._for_a_while(node, event.seconds, "healthy", False)
            case "cordon":
                self._for_a_while(node, event.seconds, "cordoned", True)
            case _ if agent is not None:
                self._break_node(event, agent)

    def _some_node_of(self, job: str) -> str:
        """A node of the job's newest generation; of a job that has none yet, any node."""
        rows = self.server.jobs[job].generations if job in self.server.jobs else {}
        return self.rng.choice(rows[max(rows)].plan.nodes if rows else tuple(self.agents))

    def _for_a_while(self, name: str, seconds: float, field: str, value: bool) -> None:
        node = self.server.nodes[name]
        setattr(node, field, value)
        self.time.after(seconds, lambda: setattr(node, field, not value))

    def _get_stuck_and_cut(self, event: Event) -> None:
        """A rank dies; a peer's agent cannot stop what is left, and is cut off after its last word."""
        keys = [key for key, run in self.machines.trainings.items() if key[0] == event.job and run.alive]
        training = self.machines.trainings[max(keys)] if keys else None
        if training is None or len(training.plan.nodes) < 2:
            return
        agent = self.agents[training.plan.nodes[-1]]
        agent.stuck = True
        training.end_rank(0, signal=9)
        self.time.after(event.seconds, lambda: self._lose_contact(agent, 90.0))

    def _lose_contact(self, agent: SimulatedAgent, seconds: float) -> None:
        agent.out_of_contact += 1
        agent.disconnect()
        self.time.after(seconds, lambda: self._regain(agent))

    @property
    def _serves(self) -> bool:
        return self.web.up and self.server.database_up

    def _break_node(self, event: Event, agent: SimulatedAgent) -> None:
        name = agent.name
        match event.kind:
            case "lose_contact":
                self._lose_contact(agent, event.seconds)
            case "half_open":
                # The connection is gone, and the server has not noticed.
                agent.out_of_contact += 1
                agent.disconnect(noticed=False)
                self.time.after(event.seconds, lambda: self._regain(agent))
            case "isolate":
                agent.out_of_contact += 1
                agent.disconnect(noticed=False)
                self.machines.cut_off(name)
                self.time.after(event.seconds, lambda: self._join_again(agent))
            case "freeze":
                self.machines.freeze(name)
                self.time.after(event.seconds, lambda: self._thaw(name))
            case "restart_agent":
                agent.die()
                self.time.after(event.seconds, lambda: self._start_agent(name))
            case "kill_agent":
                agent.die()
                self.machines.vanish(name, quietly=False)
                self.time.after(event.seconds, lambda: self._start_agent(name))
            case "power_off" | "reboot":
                self._power_off(name, seconds=event.seconds)
            case "attest" | "provider":
                # Somebody switches the node off and says so; nobody does while it is in contact.
                if not agent.can_be_heard and self.server.database_up:
                    kind = ProofKind.PROVIDER if event.kind == "provider" else ProofKind.ATTESTATION
                    self._switch_off_and_say_so(name, kind)
            case "attest_falsely":
                if not agent.can_be_heard and self.server.database_up:
                    self.machines.nodes[name].lied_about = self.machines.nodes[name].powered
                    self.server.fence_node(name, kind=ProofKind.ATTESTATION)
            case "stuck_stop":
                agent.stuck = True
                self.time.after(event.seconds, lambda: setattr(agent, "stuck", False))
            case "runner_dies":
                for key in list(self.machines.trainings):
                    self.machines.vanish_run(name, key)
                    self.time.after(0.2, lambda key=key: agent.runner_ended(key))  # type: ignore[misc]
            case "busy_port":
                agent.armed[self.rng.choice(("busy_port", "busy_port_while_preparing"))] += event.value
            case kind if kind in NODE_FAULTS:
                agent.armed[kind] += event.value or 1

    def _power_off(self, name: str, *, seconds: float) -> None:
        """The node is gone at once, and boots again later."""
        machine = self.machines.nodes[name]
        if machine.powered:
            machine.powered = False
            machine.frozen = 0
            self.agents[name].disconnect(noticed=self.rng.random() < 0.3)
            self.agents[name].die()
            self.machines.vanish(name)
        self.time.after(seconds, lambda: self._power_on(name))

    def _power_on(self, name: str) -> None:
        machine = self.machines.nodes[name]
        if not machine.powered:
            machine.powered = True
            machine.boots += 1
            machine.contact_at = 0.0
            self.agents[name].start_again()

    def _start_agent(self, name: str) -> None:
        if self.machines.nodes[name].powered:
            self.agents[name].start_again()

    def _thaw(self, name: str) -> None:
        if self.machines.nodes[name].frozen:
            self.machines.thaw(name)
            if not self.machines.nodes[name].frozen:
                self.agents[name].thawed()
                self._connect_later(self.agents[name])

    def _join_again(self, agent: SimulatedAgent) -> None:
        self.machines.join_again(agent.name)
        self._regain(agent)

    @staticmethod
    def _regain(agent: SimulatedAgent) -> None:
        agent.out_of_contact = max(0, agent.out_of_contact - 1)
        agent.connect()

    def _end_rank(self, event: Event, *, exit_code: int | None = None, signal: int | None = None) -> None:
        trainings = self.machines.trainings
        keys = [key for key, training in trainings.items() if key[0] == event.job and training.alive]
        if keys:
            detail = "" if signal else "Error: planted"
            trainings[max(keys)].end_rank(event.rank, exit_code=exit_code, signal=signal, detail=detail)

    # --- Web, database, backup ---

    def _beat(self) -> None:
        self.web.beat()
        # Somebody may look at any moment: what hangs on a silence is looked at as soon as it could have changed.
        for job in self._jobs():
            row = job.open_incident
            if row is not None and row.incident.state in (IncidentState.STOPPING, IncidentState.WAITING_FOR_FENCE):
                self.server.advance(job.id)
        self.time.after(BEAT_S, self._beat)

    def _callers(self) -> Iterator[Caller]:
        """Agents whose newest heartbeat has just come; one of a hundred is lost."""
        for name, agent in self.agents.items():
            if not agent.can_be_heard:
                continue
            lost = self.schedule.noise and not self.calm and self.rng.random() < HEARTBEAT_LOSS
            yield Caller(node=name, sent_at=max(agent.since, self.time.now - (1.5 if lost else 0.3)))

    def _record(self, node: str, heard_at: float, observer: str) -> None:
        row = self.server.nodes[node]
        row.last_heard_at, row.observer = max(heard_at, row.last_heard_at or 0.0), observer

    def _grant(self, node: str, sent_at: float) -> None:
        self.machines.grant(node, sent_at)

    def _web_goes(self) -> None:
        self.web.stop()
        for agent in self.agents.values():
            agent.disconnect(noticed=False)

    def _web_returns(self) -> None:
        if not self.web.up:
            self.web.start()
            for agent in self.agents.values():
                self._connect_later(agent)

    def _connect_later(self, agent: SimulatedAgent) -> None:
        self.time.after(self.rng.uniform(0.1, RECONNECTS_WITHIN_S), agent.connect)

    def _database_returns(self) -> None:
        self.web.database_up = self.server.database_up = True
        for name, agent in self.agents.items():
            if agent.connected:
                agent.send_again(self.server.nodes[name].acknowledged)
            else:
                self._connect_later(agent)

    def _take_backup(self, event: Event) -> None:
        if self._serves:
            self.backups[event] = copy.deepcopy(self._rows())

    def _rows(self) -> tuple[object, ...]:
        server = self.server
        return server.nodes, server.jobs, server.breakers, server.probes, self.web.rows, self.strays.reports

    def _restore_backup(self, event: Event) -> None:
        """The rows go back in time while nobody serves; agents and what they run do not.

        Who restores a backup sees to it that every node is there to tell what it runs: rows that never heard of a
        generation cannot wait for it.
        """
        backup = self.backups.pop(event, None)
        reachable = all(
            machine.powered and not machine.frozen and not machine.cut_off and self.agents[name].connected
            for name, machine in self.machines.nodes.items()
        )
        if backup is None or not reachable:
            return
        self._web_goes()
        self.server.epoch += 1
        for now, then in zip(self._rows(), backup, strict=True):
            now.clear()  # type: ignore[attr-defined]
            now.extend(then) if isinstance(now, list) else now.update(then)  # type: ignore[attr-defined]
        self.time.after(1.0, self._web_returns)

    # --- The node as its agent meets it ---

    def start_ranks(self, node: str, plan: RecoveryPlan) -> None:
        self.machines.start_ranks(node, plan)

    def kill_ranks(self, node: str, key: tuple[str, int]) -> None:
        self.machines.kill_ranks(node, key)

    def has_ranks(self, node: str, key: tuple[str, int]) -> bool:
        return self.machines.has_ranks(node, key)

    def is_frozen(self, node: str) -> bool:
        return self.machines.is_frozen(node)

    def boot_id(self, node: str) -> str:
        return self.machines.nodes[node].boot_id

    def keeps_lease(self, plan: RecoveryPlan) -> bool:
        return plan.lease is not None and self.server.jobs[plan.job].shape.keeps_lease

    # --- Between agents and server ---

    def hello(self, node: str) -> int | None:
        """Begin a session, if somebody listens and can store it; else the agent tries again a little later."""
        if not (self.web.listens and self.server.database_up):
            self._connect_later(self.agents[node])
            return None
        self.machines.nodes[node].contact_at = self.time.now
        highest = {job: high.generation for job, high in self.agents[node].high.items()}
        acknowledged = self.ingest.begin_session(
            node, boot_id=self.boot_id(node), observer=self.web.name, highest=highest
        )
        ran = [order for order in self.sent_orders[node] if order.wants_to_run]
        if self.schedule.noise and not self.calm and ran and self.rng.random() < 0.6:
            # An order of long ago comes first on the new connection: from a proxy, or of a server that was put back.
            self._send_order(self.agents[node], replace(self.rng.choice(ran), revision=0), 0.001)
            self.time.after(self.rng.uniform(0.0, 5.0), lambda: self._push(node))
        else:
            self.time.after(0.0, lambda: self._push(node))
        return acknowledged

    def closed(self, node: str, *, noticed: bool) -> None:
        if noticed and self.server.database_up:
            self.server.nodes[node].session = False

    def _push(self, node: str) -> None:
        """Send a node its orders as they are now; they may be late, twice or lost, and are sent again while it lags."""
        agent, noise = self.agents[node], self.schedule.noise if not self.calm else 0.0
        if not agent.connected:
            return
        if not (self.web.listens and self.server.database_up):
            self._push_again(node)  # it looks each second at what its sockets should have been told
            return
        # Copies are taken when they are sent, so that a late one tells what was wanted then.
        order = self.server.order_for(node)
        order = replace(order, wanted=(*order.wanted, *self.strays.stops_on(node)))
        self.sent_orders[node].append(order)
        del self.sent_orders[node][:-20]
        if not noise or self.rng.random() > 0.3 * noise:
            self._send_order(agent, order, 0.005 + (self.rng.expovariate(3.0) * noise if noise else 0.0))
        if noise and self.rng.random() < 0.1 * noise:
            self._send_order(agent, order, self.rng.uniform(0.5, 15.0))
        self._push_again(node)

    def _push_again(self, node: str) -> None:
        if node not in self.repushing:
            self.repushing.add(node)
            self.time.after(REPUSH_S, lambda: self._repush(node))

    def _send_order(self, agent: SimulatedAgent, order: Order, delay_s: float) -> None:
        self.time.after(delay_s, lambda: agent.receive(order))

    def _repush(self, node: str) -> None:
        self.repushing.discard(node)
        agent = self.agents[node]
        if agent.revision < self.server.nodes[node].revision:
            self._push(node)

    def deliver(self, node: str, seq: int, fact: Fact) -> None:
        """A durable message has arrived: taken if it is new, else a repeat; without a database it comes again later."""
        row = self.server.nodes[node]
        if not (self.web.listens and self.server.database_up):
            if node not in self.resending:
                self.resending.add(node)
                self.time.after(1.0, lambda: self._come_again(node))
            return
        if seq != max(row.acknowledged, self.agents[node].dropped) + 1:
            return
        row.acknowledged = seq
        self.agents[node].acknowledged(seq)
        job = self.ingest.store(node, fact)
        noise = self.server.noise
        if job is not None and (not noise or self.rng.random() > 0.2 * noise):
            self.time.after(0.01 + self.rng.random() * noise, lambda: self.server.advance(job))

    def _come_again(self, node: str) -> None:
        self.resending.discard(node)
        agent = self.agents[node]
        if agent.connected:
            agent.send_again(self.server.nodes[node].acknowledged)

    def _probe(self, looker: str, node: str, answer: Callable[[bool], None]) -> None:
        """The looker's agent knocks at the node's kernel; what a frozen process does is nothing to a kernel."""
        machine = self.machines.nodes[node]
        reachable = machine.powered and not machine.cut_off

        def done() -> None:
            if self.agents[looker].can_be_heard and self.server.database_up:
                answer(reachable)

        self.time.after(0.2 if reachable else 4.0, done)
