"""All runs of this node: takes orders over, adopts what an earlier life started, and answers what is going on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace

from agents.log_lines import NodeLog
from agents.protocol.messages import Assignment, AssignmentPhase, AssignmentReport, ProofKind, SeenPhase, StopProof
from agents.sensors.rank_reports import PokeSaid, Said
from agents.supervisor.environment import mark_of
from agents.supervisor.highest import HighestStore, HighWater
from agents.supervisor.orders import Act, Action, Key, Known, reconcile
from agents.supervisor.run import Run, Workplace
from agents.supervisor.stopping import Target, prove_stopped
from agents.supervisor.wishes import Wishes

log = NodeLog(__name__)

_ENDED = (SeenPhase.STOPPED, SeenPhase.PREPARE_FAILED, SeenPhase.REFUSED)
_TOLD_AGAIN = 20
"""Ended runs, newest first, whose story a restarted agent tells again."""


class Supervisor:
    """Keeps one `Run` per generation that is, or recently was, on this node."""

    def __init__(self, *, highest: HighestStore, place: Workplace, slots: int) -> None:
        self.slots = slots
        self._highest = highest
        self._place = place
        self._runs: dict[Key, Run] = {}
        self._others: dict[Key, AssignmentReport] = {}
        """What was reported of generations that never became a run: refused, or stopped before they came."""
        self._proving: set[Key] = set()
        self._wanted: Sequence[Assignment] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cleaning: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether ranks run here."""
        return any(run.alive for run in self._runs.values())

    def run(self, job: str, generation: int) -> Run | None:
        return self._runs.get((job, generation))

    def take(self, said: Said, user: int) -> bool:
        """Hand a datagram of a user to the run that it is for; False if he may not say it."""
        run = self._runs.get((said.job, said.generation))
        if run is None or not run.may_speak(user):
            return False
        if isinstance(said, PokeSaid):
            run.poke()
            return True
        return run.take(said)

    def adopt(self) -> None:
        """Find again what an earlier life of this agent started. Called once, before the first order."""
        records = self._place.records.all()
        ended = [record for record in records if record.proof is not None]
        newest = {record.job: record for record in ended}  # oldest generation first: the newest stays
        told = sorted(newest.values(), key=lambda record: record.proof.at if record.proof else 0)[-_TOLD_AGAIN:]
        for record in records:
            run = Run(
                job=record.job,
                generation=record.generation,
                plan_id=record.plan_id,
                launch=record.launch,
                place=self._place,
            )
            if record.proof is None:
                self._runs[record.job, record.generation] = run
                run.adopt(record)
                self._spawn(run.follow())
            elif record in told:
                self._runs[record.job, record.generation] = run
                run.adopt_ended(record)

    def apply(self, assignments: Sequence[Assignment]) -> None:
        """Take an order over: record first, then act. Raises `StateUnusable` if it cannot be recorded."""
        self._wanted = assignments
        named = {(assignment.job, assignment.generation) for assignment in assignments}
        for key in [key for key, run in self._runs.items() if key not in named and run.phase in _ENDED]:
            del self._runs[key]
        for key in [key for key in self._others if key not in named]:
            del self._others[key]
        self.reconcile()
        self._raise_leases()
        self._pass_wishes_on()

    def clean_memory(self, needed: Sequence[str]) -> None:
        """Remove the snapshots in memory of all jobs but these and those that are here, in a thread: it takes time."""
        here = {run.job for run in self._runs.values() if run.phase not in _ENDED}
        keep = {*needed, *here, *(assignment.job for assignment in self._wanted)}
        if self._cleaning is None or self._cleaning.done():
            self._cleaning = self._spawn(self._clean_memory(keep))

    async def _clean_memory(self, keep: set[str]) -> None:
        removed = await asyncio.to_thread(self._place.memory.clean, keep)
        if removed:
            log.info("snapshots in memory removed", jobs=removed)

    def note_contact(self, sent_ns: int) -> None:
        """The server has written down that it heard what this node sent at `sent_ns` (CLOCK_BOOTTIME).

        Nothing renews the lease of what is to stop, whether that could be recorded and done or not: the server may have
        a proof by another word than this agent's, and other jobs' ranks beside it keep theirs.
        """
        to_stop = {(one.job, one.generation) for one in self._wanted if one.phase is AssignmentPhase.STOP}
        for key, run in self._runs.items():
            if key not in to_stop:
                run.note_contact(sent_ns)

    def reconcile(self) -> None:
        """Do what the latest order still asks for; also called when a run has changed."""
        self._bar_the_ended()
        result = reconcile(self._wanted, known=self._known(), high=self._highest.jobs, slots=self.slots)
        self._highest.merge(result.high)
        for action in result.actions:
            self._act(action)

    def reports(self) -> list[AssignmentReport]:
        """The latest report of each generation that is remembered."""
        runs = [run.report for run in self._runs.values() if run.report is not None]
        return [*runs, *(report for key, report in self._others.items() if key not in self._runs)]

    async def stop_all(self, *, within_s: float) -> None:
        """Kill whatever runs here."""
        for run in self._runs.values():
            if run.phase not in _ENDED:
                run.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    async def close(self) -> None:
        """Let go of all runs without touching their processes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        for run in self._runs.values():
            run.release()

    def _bar_the_ended(self) -> None:
        """What has ended by itself does not run again either, however late an order to run it comes."""
        barred: dict[str, HighWater] = {}
        for (job, generation), run in self._runs.items():
            if run.phase is SeenPhase.STOPPED:
                high = barred.get(job) or self._highest.jobs.get(job)
                if high is not None and high.stopped < generation:
                    barred[job] = replace(high, stopped=generation)
        self._highest.merge(barred)

    def _raise_leases(self) -> None:
        for assignment in self._wanted:
            run = self._runs.get((assignment.job, assignment.generation))
            if run is not None and assignment.lease is not None and run.plan_id == assignment.plan_id:
                run.raise_lease(assignment.lease)

    def _pass_wishes_on(self) -> None:
        for assignment in self._wanted:
            run = self._runs.get((assignment.job, assignment.generation))
            if run is not None and run.plan_id == assignment.plan_id and assignment.phase is not AssignmentPhase.STOP:
                run.wish(Wishes.of(assignment))

    def _known(self) -> dict[Key, Known]:
        known = {key: Known(plan_id=report.plan_id, phase=report.phase) for key, report in self._others.items()}
        known.update(
            (key, Known(plan_id=run.plan_id, phase=run.phase, ranks=run.launch.ranks_per_node))
            for key, run in self._runs.items()
        )
        return known

    def _act(self, action: Action) -> None:
        assignment = action.assignment
        key = (assignment.job, assignment.generation)
        run = self._runs.get(key)
        match action.act:
            case Act.PREPARE if assignment.launch is not None:
                run = Run(
                    job=assignment.job,
                    generation=assignment.generation,
                    plan_id=assignment.plan_id,
                    launch=assignment.launch,
                    place=self._place,
                )
                self._runs[key] = run
                self._spawn(run.drive())
            case Act.START if run is not None and assignment.launch is not None:
                run.start(assignment.launch, lease=assignment.lease)
            case Act.STOP if run is not None and run.phase is not SeenPhase.STOPPED:
                run.stop()
            case Act.STOP:
                told = self._others.get(key)
                if told is None or (told.plan_id, told.phase) != (assignment.plan_id, SeenPhase.STOPPED):
                    self._spawn(self._prove_absent(assignment))
            case Act.REFUSE:
                self._report_once(action, SeenPhase.REFUSED)
            case Act.FAIL:
                self._report_once(action, SeenPhase.PREPARE_FAILED)

    def _report_once(self, action: Action, phase: SeenPhase) -> None:
        assignment = action.assignment
        key = (assignment.job, assignment.generation)
        told = self._others.get(key)
        if told is not None and (told.plan_id, told.phase) == (assignment.plan_id, phase):
            return
        log.warning(
            "an order cannot be followed",
            job=assignment.job,
            generation=assignment.generation,
            plan=assignment.plan_id,
            phase=assignment.phase,
            reason=action.reason,
            detail=action.detail,
        )
        self._report(assignment, phase, detail=action.detail, reason=action.reason)

    async def _prove_absent(self, assignment: Assignment) -> None:
        """Prove that nothing is left of a generation that is no run here: never started, or long ended."""
        job, generation, plan_id = assignment.job, assignment.generation, assignment.plan_id
        if (job, generation) in self._proving:
            return
        self._proving.add((job, generation))
        try:
            record = self._place.records.read(job, generation)
            groups = self._place.groups
            target = Target(
                mark=mark_of(job, generation, plan_id, node=self._place.node),
                group=groups.group(job, generation) if groups else None,
                runner=None,
            )
            # Looked for all the same: a state directory may have been lost, the processes would not be.
            found = await prove_stopped(
                lambda: target,
                own_children=self._place.children,
                stuck=lambda words: self._report(assignment, SeenPhase.STOPPING, detail=words),
                unkillable=lambda proof: self._report(assignment, SeenPhase.STOPPED, proof=proof),
            )
            if record is None and not found.killed:
                evidence = "no process of it was started here, and none carries its mark"
                found = StopProof(kind=ProofKind.NEVER_STARTED, at=time.time(), evidence=evidence)
            self._report(assignment, SeenPhase.STOPPED, proof=found)
        finally:
            self._proving.discard((job, generation))

    def _report(
        self,
        assignment: Assignment,
        phase: SeenPhase,
        *,
        detail: str = "",
        reason: str = "",
        proof: StopProof | None = None,
    ) -> None:
        report = AssignmentReport(
            job=assignment.job,
            generation=assignment.generation,
            plan_id=assignment.plan_id,
            phase=phase,
            at=time.time(),
            detail=detail[:4000],
            reason=reason,
            proof=proof,
            boot_id=self._place.boot_id,
        )
        self._others[assignment.job, assignment.generation] = report
        self._place.emit(report)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a run's task ended with an error", error=repr(task.exception()))
