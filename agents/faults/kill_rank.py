"""The drill `kill-rank`: SIGKILL for one rank of this node, at a chosen distance from its checkpoint, at most once.

The daemon hands over the faults of each order and every sign of progress of a rank; the rest is kept here and on disk.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

import msgspec

from agents.errors import StateUnusable
from agents.faults.impossible import FaultImpossible
from agents.faults.moment import DrilledRun as _Run, words_for_moment
from agents.faults.drill_record import DrillRecord, DrillStep, DrillStore
from agents.log_lines import NodeLog
from agents.protocol.messages import FaultOrder, FaultReport, FaultState, LaunchSpec, Message, SeenPhase
from agents.supervisor.checkpoints import complete_steps
from agents.supervisor.intake import Intake, Progress
from agents.supervisor.process_table import open_exact

log = NodeLog(__name__)

_SETTLE_LIMIT_S = 5.0
"""A rank that was killed is reported by its runner within milliseconds."""

_REPORTED = {
    DrillStep.ARMED: FaultState.ARMED,
    DrillStep.APPLIED: FaultState.APPLIED,
    DrillStep.REFUSED: FaultState.REFUSED,
    DrillStep.EXPIRED: FaultState.EXPIRED,
}


class DrilledRun(Protocol):
    """What a drill has to know of a run; see `supervisor.run.Run`."""

    phase: SeenPhase
    launch: LaunchSpec
    intake: Intake

    @property
    def ranks(self) -> Container[int]: ...
    @property
    def rank_pids(self) -> Mapping[int, int]: ...
    @property
    def exited(self) -> Container[int]: ...
    def holds_process(self, pid: int) -> bool: ...


def steps_past_save(progress: Progress, *, rank: int, complete: Sequence[int] = ()) -> int | None:
    """Return how many steps a rank is past the newest checkpoint that it could go back to; None if there is none.

    `complete` are this generation's checkpoints as the storage shows them: only rank 0 tells of saves, and it may run
    on another node. Step 0 is the beginning, no checkpoint worth a drill.
    """
    step = progress.step.get(rank)
    saves = [save for save in (*progress.saved, *complete, progress.resumed.get(rank, 0)) if save > 0]
    if step is None or not saves:
        return None
    return step - max(saves)


class KillRank:
    """All drills of this kind on this node."""

    def __init__(
        self,
        *,
        store: DrillStore,
        find_run: Callable[[str, int], DrilledRun | None],
        emit: Callable[[Message], None],
        server_now: Callable[[], float],
    ) -> None:
        self._store = store
        self._find_run = find_run
        self._emit = emit
        self._server_now = server_now
        self._began = time.monotonic()
        self._told: set[str] = set()
        """Drills whose state this life of the agent has reported."""

    def take(self, orders: Sequence[FaultOrder]) -> None:
        """Take the faults of the newest order: arm new ones, tell again of old ones, withdraw those it does not name.

        Raises `StateUnusable` when a drill cannot be written down; nothing is applied then.
        """
        named = {order.drill for order in orders}
        for order in orders:
            record = self._store.get(order.drill)
            if record is None:
                self._begin(order)
            elif order.drill not in self._told:
                self._tell(record)
        for record in self._store.armed:
            if record.drill not in named:
                self._close(record, DrillStep.EXPIRED, "the server has withdrawn it")
        self.look()

    def look(self) -> None:
        """Apply what is due and close what is too late. Called on each progress of a rank and once a second."""
        for record in (*self._store.applying, *self._store.armed):
            try:
                if record.step is DrillStep.APPLYING:
                    self._settle(record)
                else:
                    self._look_at(record)
            except StateUnusable as err:
                log.error("a drill waits: its record could not be written", drill=record.drill, error=err)

    def _begin(self, order: FaultOrder) -> None:
        record = DrillRecord(
            drill=order.drill,
            job=order.job,
            generation=order.generation,
            rank=order.rank,
            not_after=order.not_after,
            steps_after_save=order.steps_after_save,
            step=DrillStep.ARMED,
            at=time.time(),
        )
        refusal = self._why_refused(record)
        if refusal:
            self._close(record, DrillStep.REFUSED, refusal)
        elif self._too_late(record):
            self._close(record, DrillStep.EXPIRED, "it came after its deadline")
        else:
            self._store.put(record)
            self._tell(record)

    def _why_refused(self, record: DrillRecord) -> str:
        run = self._find_run(record.job, record.generation)
        if run is None or run.phase is not SeenPhase.RUNNING:
            return f"generation {record.generation} of {record.job} does not run on this node"
        if record.rank not in run.ranks:
            return f"rank {record.rank} is no rank of this node"
        if record.rank in run.exited:
            return f"rank {record.rank} has exited already"
        return ""

    def _too_late(self, record: DrillRecord) -> bool:
        return self._server_now() > record.not_after

    def _look_at(self, record: DrillRecord) -> None:
        if self._too_late(record):
            self._close(record, DrillStep.EXPIRED, "its deadline passed before its moment came")
            return
        ended = self._why_refused(record)
        if ended:
            self._close(record, DrillStep.EXPIRED, f"its moment never came: {ended}")
            return
        run = self._find_run(record.job, record.generation)
        assert run is not None
        if self._due(record, run):
            self._apply(record, run)

    def _due(self, record: DrillRecord, run: DrilledRun) -> bool:
        if record.rank not in run.rank_pids:
            return False
        if record.steps_after_save <= 0:
            return True
        complete = complete_steps(run.launch.checkpoint_directory, record.generation)
        past = steps_past_save(run.intake.progress, rank=record.rank, complete=complete)
        return past is not None and past >= record.steps_after_save

    def _apply(self, record: DrillRecord, run: DrilledRun) -> None:
        pid = run.rank_pids[record.rank]
        descriptor = open_exact(pid, None)
        try:
            # The number came from a file of the job's: the kernel says whether it is a process of this generation.
            if descriptor is None or not run.holds_process(pid) or pid == os.getpid():
                self._close(record, DrillStep.REFUSED, f"process {pid} is no process of rank {record.rank} any more")
                return
            self._store.put(msgspec.structs.replace(record, step=DrillStep.APPLYING, at=time.time()))
            at = time.time()
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            self._close(record, DrillStep.REFUSED, f"rank {record.rank} died by itself just before")
            return
        finally:
            if descriptor is not None:
                os.close(descriptor)
        step = run.intake.progress.step.get(record.rank)
        where = "before its first step" if step is None else f"after step {step}"
        self._close(record, DrillStep.APPLIED, f"SIGKILL to rank {record.rank}, process {pid}, {where}", at=at)

    def _close(self, record: DrillRecord, step: DrillStep, detail: str, *, at: float | None = None) -> None:
        closed = msgspec.structs.replace(record, step=step, detail=detail, at=time.time() if at is None else at)
        try:
            self._store.put(closed)
        finally:
            # What happened has happened, also when the disk is full.
            self._tell(closed)

    def _tell(self, record: DrillRecord) -> None:
        state = _REPORTED.get(record.step)
        if state is None:
            return
        self._told.add(record.drill)
        log.info("drill", drill=record.drill, state=state, detail=record.detail, job=record.job, rank=record.rank)
        self._emit(FaultReport(drill=record.drill, state=state, at=record.at, detail=record.detail))

    def _settle(self, record: DrillRecord) -> None:
        """After a restart in the very moment of a fault: find out what happened, and never try it again."""
        run = self._find_run(record.job, record.generation)
        if run is not None and record.rank in run.exited:
            self._close(record, DrillStep.APPLIED, "the agent restarted in its moment; the rank is dead", at=record.at)
        elif time.monotonic() - self._began > _SETTLE_LIMIT_S:
            self._close(record, DrillStep.EXPIRED, "the agent restarted in its moment; it is not tried again")


def kill_rank(record: DrillRecord, run: _Run, *, write_down: Callable[[], None]) -> str:
    """Kill the rank, after `write_down` has put that on disk; returns what was done, as a sentence.

    Raises `FaultImpossible`, or whatever `write_down` raises, before anything has happened.
    """
    pid = run.rank_pids[record.rank]
    descriptor = open_exact(pid, None)
    if descriptor is None:
        raise FaultImpossible(f"process {pid} is no process of rank {record.rank} any more")
    try:
        # The number came from a file of the job's: the kernel says whether it is a process of this generation.
        if not run.holds_process(pid) or pid == os.getpid():
            raise FaultImpossible(f"process {pid} is no process of rank {record.rank} any more")
        write_down()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError as err:
        raise FaultImpossible(f"rank {record.rank} died by itself just before") from err
    finally:
        os.close(descriptor)
    return f"SIGKILL to rank {record.rank}, process {pid}, {words_for_moment(record, run)}"
