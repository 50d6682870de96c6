"""Generations that run though the rows do not know them, since a backup was restored; as `recovery.strays` does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from simulated_agent import Report, Wanted
from simulated_server import GenerationRow, JobRow, SimulatedServer
from virtual_time import VirtualTime

from agents.protocol.messages import AssignmentPhase, SeenPhase
from recovery.domain.generations import ShareView
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.silence import Contact

CONCLUDES_AFTER_S = 60.0
_ALIVE = (SeenPhase.RUNNING, SeenPhase.STOPPING)


@dataclass
class SimulatedStrays:
    server: SimulatedServer
    time: VirtualTime
    reports: dict[tuple[str, str, int], Report] = field(default_factory=dict)
    """By node, job and generation."""

    def hello(self, highest: Mapping[str, int]) -> None:
        """An agent knows newer generations: take no number below theirs, and conclude nothing yet."""
        for job_id, number in highest.items():
            job = self.server.jobs[job_id]
            if number > job.generation:
                job.generation = number
                if not job.ended:
                    job.behind_since = job.behind_since or self.time.now

    def note(self, node: str, job: str, number: int, report: Report) -> None:
        """Remember, or forget, what a node says of a generation that is not known here."""
        if report.phase in _ALIVE:
            self.reports[node, job, number] = report
            self._hold_if_number_is_taken(self.server.jobs[job], number, report)
            self.server.nodes[node].revision += 1
            self.server.push(node)
            return
        known = self.reports.get((node, job, number))
        if known is not None and known.plan.plan_id == report.plan.plan_id:
            del self.reports[node, job, number]

    def forget(self, node: str, job: str, number: int) -> None:
        """A node runs what is known by this number, so that it runs no other plan of it."""
        if self.reports.pop((node, job, number), None) is not None:
            self.server.nodes[node].revision += 1
            self.server.push(node)

    def _hold_if_number_is_taken(self, job: JobRow, number: int, report: Report) -> None:
        """These rows have given a number out once more: launch nothing before the plan that had it first is gone."""
        rival = job.generations.get(number)
        taken = rival is not None and rival.plan.plan_id != report.plan.plan_id
        superseded = any(row.run_ordered for newer, row in job.generations.items() if newer > number)
        if taken and not superseded and not job.ended:
            job.behind_since = job.behind_since or self.time.now

    def by_node(self) -> dict[str, str]:
        """Nodes that nothing else may be placed on."""
        return {node: f"generation {number} of {job}" for node, job, number in self.reports}

    def stops_on(self, node: str) -> tuple[Wanted, ...]:
        return tuple(
            Wanted(phase=AssignmentPhase.STOP, plan=report.plan)
            for (where, job, number), report in self.reports.items()
            if where == node and self._should_go(self.server.jobs[job], number)
        )

    def settle(self) -> None:
        """Take over what runs, if all of it is known; else wait."""
        for job in self.server.jobs.values():
            if job.behind_since is not None:
                self._settle_job(job)

    def _settle_job(self, job: JobRow) -> None:
        mine = {key: report for key, report in self.reports.items() if key[1] == job.id}
        going_on = [(key, report) for key, report in mine.items() if not self._should_go(job, key[2])]
        if not going_on:
            waited = self.time.now - (job.behind_since or 0.0) > CONCLUDES_AFTER_S
            unseen = any(node.contact is not Contact.SEEN for node in self.server.fleet().nodes)
            if not mine and waited and not unseen:
                job.behind_since = None
                job.version += 1
            return
        number = max(key[2] for key, _ in going_on)
        newest = {key[0]: report for key, report in going_on if key[2] == number}
        plan = next(iter(newest.values())).plan
        running = all(r.phase is SeenPhase.RUNNING and r.plan.plan_id == plan.plan_id for r in newest.values())
        if running and set(newest) == set(plan.nodes):
            self._adopt(job, newest)

    def _adopt(self, job: JobRow, reports: Mapping[str, Report]) -> None:
        plan = next(iter(reports.values())).plan
        nodes = self.server.nodes
        if any(nodes[name].claimed_by not in (None, job.id) for name in plan.nodes):
            return
        job.generations[plan.generation] = GenerationRow(
            # No lease: its runners may hold longer terms than these rows know.
            plan=replace(plan, lease=None),
            wanted=AssignmentPhase.RUN,
            shares={
                name: ShareView(
                    node=name,
                    seen=SeenPhase.RUNNING,
                    boot_id=reports[name].boot_id,
                    keeps_lease=reports[name].keeps_lease,
                )
                for name in plan.nodes
            },
            run_ordered=True,
        )
        for older in job.generations.values():
            if older.plan.generation < plan.generation:
                older.wanted, older.seen = AssignmentPhase.STOP, None
        for name, node in nodes.items():
            if name in plan.nodes:
                node.claimed_by = job.id
        row = job.open_incident
        if row is not None:
            row.incident = replace(row.incident, state=IncidentState.CANCELLED, deadline_at=None)
            row.states.append(IncidentState.CANCELLED)
            row.version += 1
        job.behind_since, job.state, job.state_since = None, JobState.RUNNING, self.time.now
        job.generation, job.version = plan.generation, job.version + 1
        job.adopted.add(plan.generation)
        self.reports = {key: report for key, report in self.reports.items() if key[1:] != (job.id, plan.generation)}
        for name in nodes:
            nodes[name].revision += 1
            self.server.push(name)

    def _should_go(self, job: JobRow, number: int) -> bool:
        return number <= max(job.generations, default=0) or job.ended or job.stop_wanted
