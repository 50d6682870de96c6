"""Facts from agents become rows in the simulation, as `recovery.ingest`, `sessions` and `proofs` make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulated_agent import Fact, Report
from simulated_server import GenerationRow, JobRow, SimulatedServer
from simulated_strays import SimulatedStrays
from virtual_time import VirtualTime

from agents.protocol.messages import AGENT_PROOFS, AssignmentPhase, Phase, ProofKind, SeenPhase
from recovery.domain.detection import Fault
from recovery.domain.fences import boot_proof
from recovery.domain.generations import NONFINITE_STEPS, FenceProof, RankView
from recovery.domain.instructions import JobState
from recovery.domain.plan import CheckpointRef
from recovery.domain.step_records import StepRecord
from recovery.domain.trust import Nonfinite, fold_loss

PACE_MEMORY = 0.98


@dataclass
class SimulatedIngest:
    server: SimulatedServer
    strays: SimulatedStrays
    time: VirtualTime

    def begin_session(self, node: str, *, boot_id: str, observer: str, highest: Mapping[str, int]) -> int:
        """A node says hello: what its boot proves, and what it contradicts. Returns how far its outbox is stored."""
        row = self.server.nodes[node]
        row.session, row.observer, row.last_heard_at = True, observer, self.time.now
        for job in self.server.jobs.values():
            for number, generation in job.generations.items():
                share = generation.shares.get(node)
                if share is None or share.proof is not None or not generation.run_ordered:
                    continue
                proof = boot_proof(
                    node=node, generation=number, ran_in=share.boot_id, boot_id=boot_id, at=self.time.now
                )
                if proof is not None:
                    self.server.keep_proof(job, generation, proof)
        if row.quarantined_boot and row.quarantined_boot != boot_id:
            row.quarantined_boot = ""
        if row.said_off_in and row.said_off_in == boot_id:
            row.quarantined_boot = boot_id
        row.said_off_in = ""
        row.boot_id = boot_id
        self.strays.hello(highest)
        return row.acknowledged

    def store(self, node: str, fact: Fact) -> str | None:
        """Store one fact; returns the job that should be looked at, if there is one."""
        kind, job_id, number, *rest = fact
        job = self.server.jobs[job_id]
        generation = job.generations.get(number)
        known = generation is not None and node in generation.shares
        if kind == "share" and known and generation is not None:
            known = rest[0].plan.plan_id == generation.plan.plan_id
        elif known:
            known = (node, job_id, number) not in self.strays.reports
        if generation is None or not known:
            if kind == "share":
                self.strays.note(node, job_id, number, rest[0])
            return None
        self._take_up(node, job, generation, kind, rest)
        if kind == "share":
            self._store_report(node, job, generation, rest[0])
        else:
            self._store_rank_fact(node, job, generation, kind, rest)
        if kind not in ("step", "saved", "phase"):
            self.server.check(job)
        elif job.state is JobState.RUNNING:
            return None
        return str(job_id)

    def _take_up(self, node: str, job: JobRow, generation: GenerationRow, kind: str, rest: list[Any]) -> None:
        """Ranks of a generation that these rows never ordered to run: a backup was restored that is older."""
        report = rest[0] if kind == "share" else None
        runs = report is not None and report.phase is SeenPhase.RUNNING
        number = generation.plan.generation
        if runs:
            self.strays.forget(node, job.id, number)
        tells = report is None or runs or report.proof not in (None, ProofKind.NEVER_STARTED)
        waits = runs and generation.wanted is AssignmentPhase.PREPARE
        if not tells or (generation.run_ordered and not waits):
            return
        if not generation.run_ordered:
            generation.run_ordered = True
            generation.plan = replace(generation.plan, lease=None)
            job.adopted.add(number)
        job.version += 1
        if job.open_incident is not None:
            job.open_incident.version += 1
        newest = job.generation == number and job.behind_since is None
        if waits and newest:
            generation.wanted = AssignmentPhase.RUN
            for name in generation.plan.nodes:
                self.server.nodes[name].revision += 1
                self.server.push(name)
        generation.seen = self.server._fleet = None

    # --- Shares ---

    def _store_report(self, node: str, job: JobRow, generation: GenerationRow, report: Report) -> None:
        share = generation.shares[node]
        stopped = report.phase is SeenPhase.STOPPED
        if share.proof is not None and share.confirmed and not stopped:
            return
        generation.shares[node] = share = replace(
            share,
            seen=report.phase,
            reason=report.reason,
            boot_id=report.boot_id,
            keeps_lease=share.keeps_lease or (report.phase is SeenPhase.RUNNING and report.keeps_lease),
            master_port=share.master_port if report.port is None else report.port,
            fingerprint=report.fingerprint or share.fingerprint,
            fingerprint_parts={"script": report.fingerprint} if report.fingerprint else share.fingerprint_parts,
            confirmed=share.confirmed or (stopped and report.proof is not None),
        )
        generation.seen = self.server._fleet = None
        if stopped and report.proof is not None:
            proof = FenceProof(
                node=node, kind=report.proof, at=self.time.now, evidence="told", generation=generation.plan.generation
            )
            self.server.keep_proof(job, generation, proof)
        if stopped:
            for rank, view in list(generation.ranks.items()):
                if view.node == node and not view.exited:
                    generation.ranks[rank] = replace(
                        view,
                        exited_at=self.time.now,
                        exit_recorded_at=self.time.now,
                        detail="gone without a report",
                    )
                    self._judge_exit(job, generation, generation.ranks[rank])

    # --- Ranks ---

    def _store_rank_fact(self, node: str, job: JobRow, row: GenerationRow, kind: str, rest: list[Any]) -> None:
        at = rest[-1]
        number = row.plan.generation
        if kind in ("saved", "step") and self._is_after_fence(node, row, at):
            return
        if kind == "saved":
            job.checkpoints.append(CheckpointRef(generation=number, step=rest[0]))
            return
        rank = rest[0]
        now = self.time.now
        view = row.ranks.get(rank) or RankView(rank=rank, node=row.plan.node_of(rank))
        match kind:
            case "started":
                view = replace(view, pid=1000 + rank, phase=Phase.SETUP, progress_at=at, progress_seen_at=now)
            case "phase":
                view = replace(view, phase=rest[1], progress_at=max(at, view.progress_at or 0.0), progress_seen_at=now)
            case "resumed":
                _, step, saved, live, _ = rest
                view = replace(view, resumed_step=step, resumed_at=at, saved_digest=saved, live_digest=live)
                row.resumed(rank, step=step, saved=saved, live=live)
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
                before = Nonfinite(since=view.nonfinite_since, count=view.nonfinite_count)
                found = fold_loss(before, step=step, loss=loss, enough=NONFINITE_STEPS)
                view = replace(
                    view,
                    nonfinite_since=found.since,
                    nonfinite_count=found.count,
                    nonfinite_at=at if found.count == 1 else view.nonfinite_at,
                    first_step_at=view.first_step_at or at,
                    last_step=max(view.last_step or 0, step),
                    progress_at=max(at, view.progress_at or 0.0),
                    progress_seen_at=now,
                    pace_s=max(job.shape.step_time_s, PACE_MEMORY * (view.pace_s or 0.0)),
                    phase=Phase.STEP if view.phase in (None, Phase.SETUP, Phase.COMPILE) else view.phase,
                )
            case "finished":
                view = replace(view, finished_step=rest[1])
            case "exited":
                _, code, signal, detail, _ = rest
                if view.exit_code is not None or view.signal:
                    return
                view = replace(view, exited_at=at, exit_recorded_at=now, exit_code=code, signal=signal, detail=detail)
        row.ranks[rank] = view
        row.seen = None
        if kind == "exited":
            self._judge_exit(job, row, view)

    @staticmethod
    def _is_after_fence(node: str, row: GenerationRow, at: float) -> bool:
        """What is done on a node after its share was fenced without its own word does not count."""
        proof = row.shares[node].proof
        return proof is not None and proof.kind not in AGENT_PROOFS and at > proof.at

    def _judge_exit(self, job: JobRow, generation: GenerationRow, view: RankView) -> None:
        wanted = generation.wanted is AssignmentPhase.RUN and not (job.stop_wanted or job.ended or job.behind_since)
        if view.died and wanted and job.open_incident is None:
            fault = Fault(
                generation=generation.plan.generation, rank=view.rank, at=view.exited_at, sentence="a rank died"
            )
            self.server.open_incident(job, fault)
