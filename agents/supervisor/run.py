"""One generation on this node, from its first order to its proof of stop: a single task walks it through, step by step.

The supervisor makes one per (job, generation) and tells it what is wanted; it reports what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents.errors import AgentError, CheckFailed, PolicyRefused, StartFailed
from agents.log_lines import NodeLog
from agents.policy import Account, Policy
from agents.protocol.messages import (
    AssignmentReport,
    LaunchSpec,
    LeaseTerms,
    Message,
    ProofKind,
    RankExited,
    RankStarted,
    SeenPhase,
    StopProof,
)
from agents.sensors.rank_reports import RankReport
from agents.supervisor.cgroups import ControlGroup, NodeGroups
from agents.supervisor.checkpoints import is_complete
from agents.supervisor.environment import base_environment, mark_of, rank_environment
from agents.supervisor.events import (
    EventTail,
    LeaseExpired,
    LineTail,
    RankBegan,
    RankEnded,
    RunnerEnded,
    RunnerEvent,
    RunnerStarted,
)
from agents.supervisor.fingerprint import Fingerprint, ask_interpreter, take_fingerprint
from agents.supervisor.intake import Intake
from agents.supervisor.launch_file import LEASE_PROTOCOL, RUNNER_PROTOCOLS, choose_protocol, launch_file
from agents.supervisor.lease import Lease, LeaseFiles
from agents.supervisor.memory_places import MemoryPlaces
from agents.supervisor.missed_words import missed_words
from agents.supervisor.ports import PORT_BUSY, PortReservations
from agents.supervisor.process_table import carries_mark
from agents.supervisor.processes import RunnerProcess
from agents.supervisor.records import RunRecord, RunRecords
from agents.supervisor.stopping import Target, prove_stopped
from agents.supervisor.wishes import Wishes, write_wishes
from agents.told import ToldGeneration

log = NodeLog(__name__)

_LOOK_AGAIN_S = 0.5
"""How often events are read without a poke; pokes may be lost."""
_REASONS = {"port_busy": PORT_BUSY, "rank_failed": "", "": "", "lease": "lease"}


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What runs share on this node."""

    node: str
    boot_id: str
    runner_command: tuple[str, ...]
    checks_runner: bool
    """Ask the interpreter whether the runner is installed there."""
    policy: Policy
    records: RunRecords
    ports: PortReservations
    groups: NodeGroups | None
    memory: MemoryPlaces
    socket: Path
    environment: Mapping[str, str]
    driver: Callable[[], str]
    emit: Callable[[Message], None]
    tell_gap: Callable[[str], None]
    """Something is lost for good: the server shows it."""
    drain: Callable[[], None]
    """Take all that ranks have said until now."""
    children: set[int]
    """Processes that the agent started itself and still needs."""
    changed: Callable[[], None]
    """A run has a new phase: orders that waited for it may go on."""
    progressed: Callable[[str, int, int], None]
    """(job, generation, rank) has made progress."""
    told: Callable[[str, int], ToldGeneration]
    """What the server has been told of a generation, also by earlier lives of this agent."""
    contact_ns: Callable[[], int]
    """When the newest message was sent that the server has written down (CLOCK_BOOTTIME, ns)."""


class Run:
    """One generation on this node."""

    def __init__(self, *, job: str, generation: int, plan_id: str, launch: LaunchSpec, place: Workplace) -> None:
        self.job = job
        self.generation = generation
        self.plan_id = plan_id
        self.launch = launch
        self.phase = SeenPhase.PREPARING
        self.report: AssignmentReport | None = None
        self.rank_pids: dict[int, int] = {}
        """Ranks that were started, by the runner's word."""
        self.exited: set[int] = set()
        self._place = place
        self._files = place.records.files(job, generation)
        self._mark = mark_of(job, generation, plan_id, node=place.node)
        self._group = place.groups.group(job, generation) if place.groups else None
        self._events = EventTail(self._files.events)
        self._record: RunRecord | None = None
        self._runner: RunnerProcess | None = None
        self._runner_ended: RunnerEnded | None = None
        self._lease: Lease | None = None
        self._lease_wanted: LeaseTerms | None = None
        self._lease_expired: LeaseExpired | None = None
        self._wishes = Wishes()
        self._wishes_written: Wishes | None = None
        self._protocol = RUNNER_PROTOCOLS[-1]
        self._told = place.told(job, generation)
        self._port: int | None = None
        self._fingerprint: Fingerprint | None = None
        self._stop_wanted = asyncio.Event()
        self._start_wanted = asyncio.Event()
        self._poked = asyncio.Event()
        self._killed_at: float | None = None
        self.intake = Intake(
            job=job,
            generation=generation,
            ranks=self.ranks,
            emit=place.emit,
            progressed=lambda rank: place.progressed(job, generation, rank),
            told=self._told,
        )

    @property
    def ranks(self) -> range:
        return range(self.launch.first_rank, self.launch.first_rank + self.launch.ranks_per_node)

    @property
    def alive(self) -> bool:
        """Whether processes of it may exist."""
        return self.phase in (SeenPhase.RUNNING, SeenPhase.STOPPING)

    @property
    def runner_pid(self) -> int | None:
        return self._runner.pid if self._runner is not None and not self._runner.ended.is_set() else None

    def start(self, launch: LaunchSpec, *, lease: LeaseTerms | None) -> None:
        """Everything is prepared: run, by the launch that the order now holds (with the port)."""
        self.launch = launch
        self._lease_wanted = lease
        self._start_wanted.set()

    def raise_lease(self, terms: LeaseTerms) -> None:
        """The order holds terms of the lease; longer ones are handed to the runner."""
        if self._lease is None:
            return
        try:
            if self._lease.raise_terms(terms):
                self._try_to_remember(lease=self._lease.terms)
        except OSError as err:
            # The runner then counts on less than the server does, which is the safe side.
            log.warning("the lease of a run could not be raised", error=err, **self._fields)

    def wish(self, wishes: Wishes) -> None:
        """What the order holds besides what to run; its ranks read it from the run's directory."""
        self._wishes = wishes
        if self.phase is SeenPhase.RUNNING and self._record is not None:
            self._write_wishes()

    def _write_wishes(self) -> None:
        if self._wishes == self._wishes_written:
            return
        try:
            write_wishes(self._files.directory, self._wishes, before=self._wishes_written)
            self._wishes_written = self._wishes
        except OSError as err:
            # Training does not need them; the next order tries again.
            log.warning("the wishes for a run could not be handed on", error=err, **self._fields)

    def note_contact(self, sent_ns: int) -> None:
        """The server has written down that it heard what this node sent at `sent_ns` (CLOCK_BOOTTIME)."""
        if self._lease is None:
            return
        try:
            self._lease.note_contact(sent_ns)
        except OSError as err:
            log.warning("contact could not be noted for a run's lease", error=err, **self._fields)

    def stop(self) -> None:
        """Kill it, whatever it is doing."""
        self._stop_wanted.set()
        if self.phase in (SeenPhase.PREPARE_FAILED, SeenPhase.REFUSED):
            self._never_started()

    def release(self) -> None:
        """Let go of the runner without touching it: the agent ends, training goes on."""
        self.intake.flush()
        self._close_lease()
        if self._runner is not None:
            self._runner.release()

    def poke(self) -> None:
        """The runner has written events."""
        self._poked.set()

    def may_speak(self, user: int) -> bool:
        """Whether datagrams of this user can come from this run: it is the account of its ranks."""
        return self._record is not None and user == self._record.uid

    def take(self, said: RankReport) -> bool:
        """A rank's report; False if no rank of this run may speak now."""
        return self.alive and self.intake.take(said)

    def holds_process(self, pid: int) -> bool:
        """Whether a process belongs to this generation, by the kernel's word and not by the runner's."""
        return self._group.holds(pid) if self._group is not None else carries_mark(pid, self._mark)

    # --- The walk -------------------------------------------------------------------------------------------------

    async def drive(self) -> None:
        """Prepare, wait for the order to run, run, and end with a proof."""
        self._tell(SeenPhase.PREPARING)
        try:
            if not await self._prepare_or_stop():
                return
            await self._first(self._start_wanted, self._stop_wanted)
            if self._stop_wanted.is_set():
                self._never_started()
                return
            self._launch()
        except CheckFailed as err:
            self._give_up(SeenPhase.PREPARE_FAILED, str(err), err.reason)
            return
        except PolicyRefused as err:
            self._give_up(SeenPhase.REFUSED, str(err), "policy")
            return
        except (StartFailed, AgentError, OSError) as err:
            log.exception("a run could not be started", **self._fields)
            self._give_up(SeenPhase.PREPARE_FAILED, str(err), "runner")
            return
        await self.follow()

    def adopt(self, record: RunRecord) -> None:
        """Find again what an earlier life of this agent began, from what it wrote down; `follow` goes on with it."""
        self._record = record
        self.phase = SeenPhase.RUNNING
        self._group = None if record.cgroup is None else ControlGroup(Path(record.cgroup))
        self._runner = self._find_runner(record)
        self._find_lease(record)
        log.info("run found again", alive=self._runner is not None, **self._fields)
        # The logs before the first datagram: what was said while no agent listened stands in them only.
        self._take_from_logs(self.ranks)
        self._read_events()
        self._note(SeenPhase.RUNNING, detail="Found again after the agent's restart.")

    def adopt_ended(self, record: RunRecord) -> None:
        """Remember a run that was proven stopped in an earlier life; what of it was never told is told now.

        That is nothing as long as the outbox is sound, and the whole story if it was lost.
        """
        assert record.proof is not None
        self._record = record
        self.phase = SeenPhase.RUNNING
        self._killed_at = record.killed_at
        for event in self._events.read():
            self._hear(event)
        self._note(SeenPhase.STOPPED, detail=record.detail, reason=record.reason, proof=record.proof)

    async def _prepare_or_stop(self) -> bool:
        """Prepare, unless the stop comes first. False if it did."""
        preparing = asyncio.ensure_future(self._prepare())
        stopping = asyncio.ensure_future(self._stop_wanted.wait())
        try:
            await asyncio.wait((preparing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._stop_wanted.is_set():
                preparing.cancel()
                with contextlib.suppress(asyncio.CancelledError, AgentError, OSError):
                    await preparing
                self._never_started()
                return False
            await preparing
            return True
        finally:
            preparing.cancel()
            stopping.cancel()

    async def _prepare(self) -> None:
        launch, place = self.launch, self._place
        account = place.policy.account_for(launch)
        place.policy.check_environment(launch)
        place.policy.check_directory(launch)
        base = base_environment(launch, account=account, node=place.environment)
        interpreter = place.policy.interpreter_for(launch, search_path=base["PATH"])
        self._check_places()
        if launch.node_rank == 0:
            self._port = place.ports.reserve(launch.master_port)
        said = await ask_interpreter(
            interpreter,
            account=account,
            environment=base,
            directory=launch.working_directory,
            children=place.children,
        )
        if place.checks_runner and not said.has_runner:
            raise CheckFailed(
                f"{interpreter} has no module everstep: install everstep into the job's environment on this node.",
                reason="runner",
            )
        if place.checks_runner:
            self._protocol = choose_protocol(said.runner_protocols, interpreter=interpreter)
        self._fingerprint = take_fingerprint(launch, interpreter=said, driver=place.driver())
        self._tell(SeenPhase.PREPARED)

    def _check_places(self) -> None:
        """The working directory and the parent checkpoint have to be here. Raises `CheckFailed`."""
        launch = self.launch
        if not Path(launch.working_directory).is_dir() or not os.access(launch.working_directory, os.R_OK | os.X_OK):
            raise CheckFailed(
                f"Working directory {launch.working_directory} is not there or not readable on this node: "
                f"put it on storage that all nodes share.",
                reason="working_directory",
            )
        if launch.parent_generation is None or launch.parent_step is None or launch.parent_in_memory:
            return  # parts that are in memory are the ranks' to find, together
        if not is_complete(launch.checkpoint_directory, launch.parent_generation, launch.parent_step):
            raise CheckFailed(
                f"Checkpoint {launch.parent_generation}:{launch.parent_step} is not complete in "
                f"{launch.checkpoint_directory}, seen from this node: put checkpoints on storage that all nodes share.",
                reason="checkpoint",
            )

    def _launch(self) -> None:
        """Write down what is started, then start it. Everything before the start can be undone by forgetting it."""
        launch, place = self.launch, self._place
        expected = launch.expected_fingerprint
        if expected and self._fingerprint is not None and expected != self._fingerprint.value:
            raise CheckFailed(
                f"The job is {self._fingerprint.value} here, {expected} was expected: make the nodes' files agree.",
                reason="fingerprint",
            )
        if launch.master_port is None:
            raise CheckFailed("The order to run names no rendezvous port.", reason="runner")
        account = place.policy.account_for(launch)
        base = base_environment(launch, account=account, node=place.environment)
        interpreter = place.policy.interpreter_for(launch, search_path=base["PATH"])
        terms = self._lease_wanted if self._protocol >= LEASE_PROTOCOL else None
        lease = None if terms is None else LeaseFiles(self._files.directory)
        environment = rank_environment(
            base,
            launch,
            job=self.job,
            generation=self.generation,
            plan_id=self.plan_id,
            mark=self._mark,
            socket=place.socket,
            run_directory=self._files.directory,
            log_directory=self._files.logs,
            memory=place.memory.place(self.job, uid=account.uid),
            lease=lease,
        )
        if self._group is not None:
            self._group.create()
        self._remember(
            RunRecord(
                job=self.job,
                generation=self.generation,
                plan_id=self.plan_id,
                mark=self._mark,
                launch=launch,
                boot_id=place.boot_id,
                uid=account.uid,
                cgroup=None if self._group is None else str(self._group.path),
                protocol=self._protocol,
                lease=terms,
            )
        )
        content = launch_file(
            launch,
            protocol=self._protocol,
            job=self.job,
            generation=self.generation,
            plan_id=self.plan_id,
            argv=[interpreter, *launch.argv[1:]],
            environment=environment,
            socket=place.socket,
            mark=self._mark,
            log_directory=self._files.logs,
            cgroup=None if self._group is None else self._group.path,
            lease=lease,
        )
        self._files.create(account, content)
        self._write_wishes()
        if terms is not None:
            self._lease = Lease.create(
                self._files.directory,
                account=account,
                ranks=launch.ranks_per_node,
                terms=terms,
                contact_ns=place.contact_ns(),
            )
        if self._port is not None:
            place.ports.release(self._port)
        self._runner = self._start_runner(interpreter, account, environment)
        self._place.children.add(self._runner.pid)
        self._try_to_remember(pid=self._runner.pid, start_time=self._runner.start_time)
        log.info("runner started", pid=self._runner.pid, cgroup=self._group and self._group.path, **self._fields)
        self._tell(SeenPhase.RUNNING)

    def _start_runner(self, interpreter: str, account: Account, environment: dict[str, str]) -> RunnerProcess:
        return RunnerProcess.start(
            [interpreter, *self._place.runner_command, "--directory", str(self._files.directory)],
            account=account,
            directory=self._files.directory,
            environment=environment,
            cgroup=None if self._group is None else self._group.path,
            log=self._files.runner_log,
        )

    # --- While it runs --------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Pass on what runner and ranks say until it ends or must end; then make sure that nothing is left."""
        while not self._stop_wanted.is_set():
            self._poked.clear()
            self._read_events()
            if self._runner is None or self._runner.ended.is_set():
                break
            await self._first(self._poked, self._stop_wanted, self._runner.ended, within_s=_LOOK_AGAIN_S)
        if self._stop_wanted.is_set():
            self._read_events()
            self._tell(SeenPhase.STOPPING)
            self._killed_at = time.time()
        proof = self._boot_proof() or await prove_stopped(
            self._target,
            own_children=self._place.children,
            stuck=lambda words: self._tell(SeenPhase.STOPPING, detail=words),
            unkillable=self._tell_unkillable,
        )
        self._read_events()
        self._catch_up(self.ranks)
        self._end(proof)

    def _boot_proof(self) -> StopProof | None:
        """Nothing outlives the kernel that ran it: no need to look."""
        assert self._record is not None
        before, now = self._record.boot_id, self._place.boot_id
        if before == now:
            return None
        evidence = f"it ran in boot {before}, and this node has booted since (boot {now})"
        return StopProof(kind=ProofKind.BOOT_CHANGED, at=time.time(), evidence=evidence)

    def _tell_unkillable(self, proof: StopProof) -> None:
        """Enough for other nodes. Here it goes on: the slots stay taken, and the better proof follows if it comes."""
        log.error("what is left of a run is stuck in the kernel: reboot the node", proof=proof.evidence, **self._fields)
        detail, reason = self._why_ended()
        self._note(SeenPhase.STOPPED, detail=detail, reason=reason, proof=proof)
        self.phase = SeenPhase.STOPPING
        assert self.report is not None
        self._place.emit(self.report)

    def _end(self, proof: StopProof) -> None:
        detail, reason = self._why_ended()
        self._close_lease()
        if self._runner is not None:
            self._runner.release()
            self._place.children.discard(self._runner.pid)
        if self._group is not None:
            self._group.remove()
        self._try_to_remember(proof=proof, detail=_clip(detail), reason=reason, killed_at=self._killed_at)
        log.info("run is over", proof=proof.kind, killed=proof.killed, reason=reason or detail, **self._fields)
        self._tell(SeenPhase.STOPPED, detail=detail, reason=reason, proof=proof)

    def _why_ended(self) -> tuple[str, str]:
        """(detail, reason) of a run that ended without being told to; both empty if it was told to."""
        if self._lease_expired is not None:
            silent_s, limit_s = self._lease_expired.silent_s, self._lease_expired.limit_s
            limit = f"limit of phase {phase}:" if (phase := self._lease_expired.phase) else "limit"
            words = f"its lease ran out after {silent_s:.1f} s without contact and progress ({limit} {limit_s:.1f} s)"
            return words, "lease"
        if self._killed_at is not None:
            return "", ""
        if self._record is not None and self._record.boot_id != self._place.boot_id:
            return "The node was booted while it ran.", "runner"
        ended = self._runner_ended
        if ended is not None:
            return ended.detail, _REASONS.get(ended.reason, "runner")
        if self._runner is None:
            return "The runner was gone when the agent came back.", "runner"
        return f"{self._runner.exit_words} {self._last_words()}".strip(), "runner"

    def _last_words(self) -> str:
        lines = LineTail.of_end(self._files.runner_log, 8192).lines()
        return lines[-1].decode(errors="replace")[:1000] if lines else ""

    def _read_events(self) -> None:
        for event in self._events.read():
            self._hear(event)

    def _hear(self, event: RunnerEvent) -> None:
        match event:
            case RunnerStarted(protocol=protocol):
                if protocol not in RUNNER_PROTOCOLS:
                    log.warning("the runner is newer than this agent: upgrade the agent", protocol=protocol)
            case RankBegan() if event.rank in self.ranks:
                self.rank_pids[event.rank] = event.pid
                if self._told.started.get(event.rank) != event.pid:
                    self._place.emit(
                        RankStarted(
                            job=self.job, generation=self.generation, rank=event.rank, pid=event.pid, at=event.at
                        )
                    )
            case RankEnded() if event.rank in self.ranks and event.rank not in self.exited:
                self._hear_exit(event)
            case LeaseExpired():
                self._lease_expired = event
                log.warning("the lease ran out", silent_s=event.silent_s, limit_s=event.limit_s, **self._fields)
            case RunnerEnded():
                self._runner_ended = event

    def _hear_exit(self, event: RankEnded) -> None:
        self.exited.add(event.rank)
        if event.rank in self._told.exited:
            return
        if self._killed_at is not None and event.at >= self._killed_at:
            return  # killed by this agent, on order: no news
        self._catch_up([event.rank])
        self._place.emit(
            RankExited(
                job=self.job,
                generation=self.generation,
                rank=event.rank,
                pid=event.pid,
                at=event.at,
                exit_code=event.exit_code,
                signal=event.signal,
                detail=_clip(event.detail),
            )
        )
        self._place.progressed(self.job, self.generation, event.rank)

    def _catch_up(self, ranks: Iterable[int]) -> None:
        """Take what the ranks said but did not get through: first from the socket, then from their own logs."""
        self._place.drain()
        self._take_from_logs(ranks)

    def _take_from_logs(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            known_step = self.intake.progress.step.get(rank, 0)
            missed = missed_words(
                self._files.rank_log(rank),
                job=self.job,
                generation=self.generation,
                rank=rank,
                known_step=known_step,
            )
            if not missed.whole:
                self._place.tell_gap(
                    f"job {self.job}, generation {self.generation}: rank {rank} said more than can be read again while "
                    f"nobody listened; of its steps from {known_step + 1} on the oldest are not told"
                )
            for said in missed.reports:
                if not self.intake.take(said):
                    self.intake.flush()
                    self.intake.take(said)
            self.intake.flush()

    # --- Ends -----------------------------------------------------------------------------------------------------

    def _never_started(self) -> None:
        """The end of a run whose order to run never came, or could not be followed."""
        self._release_port()
        evidence = "no process of it was started here"
        proof = StopProof(kind=ProofKind.NEVER_STARTED, at=time.time(), evidence=evidence)
        self._tell(SeenPhase.STOPPED, proof=proof)

    def _give_up(self, phase: SeenPhase, detail: str, reason: str) -> None:
        self._release_port()
        self._close_lease()
        if self._group is not None:
            self._group.remove()
        if self._record is not None and self._runner is None:
            evidence = "its runner could not be started"
            proof = StopProof(kind=ProofKind.NEVER_STARTED, at=time.time(), evidence=evidence)
            self._try_to_remember(proof=proof, detail=_clip(detail), reason=reason)
        log.warning("a run cannot be", phase=phase, reason=reason, detail=detail, **self._fields)
        self._tell(phase, detail=detail, reason=reason)

    def _release_port(self) -> None:
        if self._port is not None:
            self._place.ports.release(self._port)

    # --- Small things ---------------------------------------------------------------------------------------------

    @property
    def _fields(self) -> dict[str, object]:
        return {"job": self.job, "generation": self.generation, "plan": self.plan_id}

    def _target(self) -> Target:
        return Target(mark=self._mark, group=self._group, runner=self.runner_pid)

    def _find_lease(self, record: RunRecord) -> None:
        if self._runner is None or record.lease is None:
            return
        try:
            self._lease = Lease.open(self._files.directory, uid=record.uid, terms=record.lease)
        except OSError as err:
            # Its runner gets no contact then, and lives by its ranks' progress alone: the safe side.
            log.warning("the lease of a run could not be found again", error=err, **self._fields)

    def _close_lease(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _find_runner(self, record: RunRecord) -> RunnerProcess | None:
        if record.boot_id != self._place.boot_id:
            return None
        if record.pid is not None:
            return RunnerProcess.adopt(pid=record.pid, start_time=record.start_time)
        # The agent died between start and note: the runner has written its number, if it came so far.
        for event in EventTail(self._files.events).read():
            if isinstance(event, RunnerStarted) and self.holds_process(event.pid):
                return RunnerProcess.adopt(pid=event.pid, start_time=None)
        return None

    def _remember(self, record: RunRecord) -> None:
        self._record = record
        self._place.records.write(record)

    def _try_to_remember(self, **changes: object) -> None:
        """Note what became of a run; a full disk must not keep the server from hearing it."""
        assert self._record is not None
        try:
            self._remember(msgspec.structs.replace(self._record, **changes))
        except AgentError as err:
            log.error("a run's record could not be written", error=err, **self._fields)

    def _tell(self, phase: SeenPhase, *, detail: str = "", reason: str = "", proof: StopProof | None = None) -> None:
        self._note(phase, detail=detail, reason=reason, proof=proof)
        assert self.report is not None
        self._place.emit(self.report)
        self._place.changed()

    def _note(self, phase: SeenPhase, *, detail: str = "", reason: str = "", proof: StopProof | None = None) -> None:
        """Take on a phase; the server hears it with all others after the next hello."""
        self.phase = phase
        self.report = AssignmentReport(
            job=self.job,
            generation=self.generation,
            plan_id=self.plan_id,
            phase=phase,
            at=time.time(),
            detail=_clip(detail),
            reason=reason,
            master_port=self._port,
            fingerprint=self._fingerprint.value if self._fingerprint else "",
            fingerprint_parts=self._fingerprint.parts if self._fingerprint else {},
            proof=proof,
            boot_id=self._place.boot_id,
            keeps_lease=self._record is not None and self._record.lease is not None,
            launch=self.launch if phase is SeenPhase.RUNNING else None,
        )

    @staticmethod
    async def _first(*events: asyncio.Event, within_s: float | None = None) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _clip(text: str) -> str:
    """The wire takes 4000 characters of text; the end says more than the beginning."""
    return text if len(text) <= 4000 else "..." + text[-3990:]
