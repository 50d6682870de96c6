"""What the server decides, judged by what is physically so: rules that no view of its rows could show to be broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simulated_machines import SimulatedMachines
from simulated_server import IncidentRow, JobRow, SimulatedServer
from virtual_time import VirtualTime

from agents.protocol.messages import AssignmentPhase, ProofKind
from recovery.domain.continuity import VerdictKind
from recovery.domain.generations import GenerationView
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import Instruction, JobState, RecordProof, RunPlan, StopGeneration
from recovery.domain.invariants import Violation
from recovery.domain.situation import Situation

HEALTHY_FOR_S = 15.0
"""A job that was in trouble until just now may be stopped by what was known a moment ago."""
NOTICED_WITHIN_S = 45.0
"""A dead node among living ones is noticed by then: silence, stalled peers, a look of the sweep."""

HELD_UP_S = 3.0


@dataclass
class Truth:
    time: VirtualTime
    machines: SimulatedMachines
    server: SimulatedServer
    report: Callable[[Violation], None]
    newest_run: dict[str, int] = field(default_factory=dict)
    """Per job: the newest generation that was ever ordered to run, whatever a restored backup knows of it."""
    _dead_since: dict[tuple[str, int, str], float] = field(default_factory=dict)

    def judge(self, job: JobRow, row: IncidentRow | None, situation: Situation, instruction: Instruction) -> None:
        """Called with each instruction in the moment before it takes effect."""
        match instruction:
            case RunPlan(generation=number):
                self.newest_run[job.id] = max(self.newest_run.get(job.id, 0), number)
            case RecordProof(generation=number, proof=proof) if proof.kind is ProofKind.LEASE_EXPIRED:
                self._judge_lease(job, number, proof.node)
            case StopGeneration(generation=number):
                self._judge_stop(job, row, situation, number)

    def _judge_lease(self, job: JobRow, number: int, node: str) -> None:
        living = self.machines.acting_ranks(node, (job.id, number))
        if living:
            self.report(
                Violation(
                    rule="lease-proof-is-true",
                    sentence=f"The lease of generation {number} of {job.id} on {node} is called run out, "
                    f"but rank {', '.join(map(str, living))} lives there.",
                )
            )

    def _judge_stop(self, job: JobRow, row: IncidentRow | None, situation: Situation, number: int) -> None:
        generation = situation.generation(number)
        if generation is None or self._is_asked_for(row, situation, generation):
            return
        why = f"generation {number} of {job.id} is stopped though nobody asked for it and none of its ranks died"
        if self.server.breaker is not None:
            self.report(
                Violation(rule="no-stop-while-the-breaker-is-open", sentence=f"While the breaker is open, {why}.")
            )
        training = self.machines.trainings.get((job.id, number))
        if training is None or not training.healthy:
            return
        if self.time.now - training.troubled_at > HEALTHY_FOR_S:
            sentence = f"All ranks are there and nothing keeps them from going on, and {why}."
            self.report(Violation(rule="healthy-jobs-are-left-alone", sentence=sentence))

    def _is_asked_for(self, row: IncidentRow | None, situation: Situation, generation: GenerationView) -> bool:
        """Whether something else than an absence speaks for the stop."""
        job = situation.job
        ended = job.state in (JobState.STOPPING, JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)
        verdict = situation.verdict
        broken = verdict is not None and verdict.kind is VerdictKind.BROKEN
        died = bool(generation.dead_ranks or generation.failed_shares or generation.not_restored)
        never_ran = not generation.run_ordered or generation.wanted is not AssignmentPhase.RUN
        proven = any(share.proof is not None for share in generation.shares) or generation.ended_well
        # A launch has a limit of its own, and a plan that is given up takes its generation with it.
        launch = row is None or row.incident.state in (IncidentState.LAUNCHING, IncidentState.VERIFYING)
        overdue = launch and not generation.stepping and self._is_overdue(row, situation)
        asked = situation.command is not None or (row is not None and IncidentState.PAUSED in row.states)
        lost = generation.loss_lost
        retried = row is not None and IncidentState.ESCALATED in row.states
        return job.stop_wanted or ended or broken or died or never_ran or proven or overdue or asked or retried or lost

    def _is_overdue(self, row: IncidentRow | None, situation: Situation) -> bool:
        if row is None:
            return self.time.now - situation.job.state_since > situation.policy.launching_s
        return row.incident.deadline_at is not None and self.time.now >= row.incident.deadline_at

    # --- Silence that nobody notices ---

    def look(self) -> None:
        """A node that is off while a peer of its job is in contact must not stay unnoticed."""
        now = self.time.now
        seen = {node.name for node in self.server.fleet().nodes if self.machines.agents[node.name].can_be_heard}
        undisturbed = self.server.database_up and self.server.breaker is None
        unnoticed = {
            (job.id, row.plan.generation, name)
            for job in self.server.jobs.values()
            if undisturbed and job.state is JobState.RUNNING and job.open_incident is None and not job.stop_wanted
            for row in list(job.generations.values())[-1:]
            if row.wanted is AssignmentPhase.RUN and not row.view().ended_well and seen & set(row.plan.nodes)
            for name in row.plan.nodes
            if not self.machines.nodes[name].powered and row.view().stepping and self._is_listened_to(name)
        }
        self._dead_since = {key: self._dead_since.get(key, now) for key in unnoticed}
        for (job_id, number, name), since in self._dead_since.items():
            if now - since > NOTICED_WITHIN_S:
                sentence = f"{name} has been off for {now - since:.0f} s under generation {number} of {job_id}."
                self.report(Violation(rule="lost-nodes-are-noticed", sentence=sentence))

    def _is_listened_to(self, node: str) -> bool:
        """Whether the process that heard a node last is there still, and was not held up lately."""
        own = self.server.observers.get(self.server.nodes[node].observer)
        return own is not None and self.time.now - own.beat_at <= HELD_UP_S and own.lag_s <= HELD_UP_S
