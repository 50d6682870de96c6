"""The agent's one door to drills: takes the faults of each order, does each at most once, and tells how it went.

The daemon hands over faults (`take`), every sign of progress (`look`) and its start (`adopt`). Killing a rank and
cutting the agent's own connection happen here; whatever could take the agent with it is a keeper's (`keepers`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from agents.boot_clock import SECOND_NS, boottime_ns, this_boot
from agents.errors import StateUnusable
from agents.faults.drill_record import DrillRecord, DrillStep, DrillStore
from agents.faults.impossible import FaultImpossible
from agents.faults.keepers import Keepers
from agents.faults.kept_fault import LONGEST_FAULT_S, KeptFault, KeptStep
from agents.faults.kill_rank import kill_rank
from agents.faults.moment import DrilledRun, is_due, words_for_moment
from agents.log_lines import NodeLog
from agents.protocol.messages import FaultKind, FaultOrder, FaultReport, FaultState, Message, SeenPhase
from agents.settings import Settings

log = NodeLog(__name__)

_SETTLE_LIMIT_S = 5.0
"""A rank that was killed is reported by its runner within milliseconds."""
_HEAD_START_S = 0.5
"""A node that will fall silent says first that it is armed, and the server has this long to hear it."""
_FOLLOW_EVERY_S = 0.1
_NOT_AGAIN = "the agent restarted in its moment; it is not tried again"

_REPORTED = {
    DrillStep.ARMED: FaultState.ARMED,
    DrillStep.APPLIED: FaultState.APPLIED,
    DrillStep.UNDONE: FaultState.UNDONE,
    DrillStep.REFUSED: FaultState.REFUSED,
    DrillStep.EXPIRED: FaultState.EXPIRED,
}
_LASTING = (FaultKind.KILL_AGENT, FaultKind.FREEZE_NODE, FaultKind.PARTITION, FaultKind.ISOLATE_NODE)
"""Faults with a duration."""


class Runs(Protocol):
    """The supervisor, as far as drills know it."""

    def run(self, job: str, generation: int) -> DrilledRun | None: ...


class Cuttable(Protocol):
    """The link to the server."""

    def cut(self) -> None: ...
    def mend(self) -> None: ...


class Faults:
    """All drills on this node."""

    def __init__(
        self,
        *,
        state_directory: Path,
        supervisor: Runs,
        link: Cuttable,
        emit: Callable[[Message], None],
        server_now: Callable[[], float],
        settings: Settings,
        children: set[int],
    ) -> None:
        """`children`: processes that the agent started itself and still needs; keepers are added to them."""
        self._store = DrillStore(state_directory)
        self._keepers = Keepers(state_directory=state_directory, settings=settings, children=children)
        self._supervisor = supervisor
        self._link = link
        self._emit = emit
        self._server_now = server_now
        self._began = time.monotonic()
        self._told: set[tuple[str, DrillStep]] = set()
        """What this life of the agent has reported."""
        self._cut_for: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._complaints: dict[str, str] = {}

    def adopt(self) -> None:
        """Take up what an earlier life of this agent began. Called once, before the link connects.

        Raises `StateUnusable` if the drills' record cannot be read: without it, a fault could come twice.
        """
        self._store.load()
        self._follow_all()

    def take(self, orders: Sequence[FaultOrder]) -> None:
        """Take the faults of the newest order: arm new ones, tell again of old ones, withdraw those it does not name.

        Raises `StateUnusable` when a drill cannot be written down; nothing is applied then.
        """
        named = {order.drill for order in orders}
        for order in orders:
            record = self._store.get(order.drill)
            if record is None:
                self._begin(order)
            else:
                self._tell_again(record)
        for record in self._store.armed:
            if record.drill not in named:
                self._close(record, DrillStep.EXPIRED, "the server has withdrawn it")
        self.look()

    def look(self) -> None:
        """Apply what is due and close what is too late. Called on each progress of a rank and once a second."""
        for record in self._store.armed:
            try:
                self._look_at(record)
            except StateUnusable as err:
                log.error("a drill waits: its record could not be written", drill=record.drill, error=err)
        self._keep_following()

    async def close(self) -> None:
        """The agent ends. Keepers go on; a cut connection stays cut in the next life, until its limit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- Before the fault -----------------------------------------------------------------------------------------

    def _begin(self, order: FaultOrder) -> None:
        record = DrillRecord(
            drill=order.drill,
            kind=order.kind,
            job=order.job,
            generation=order.generation,
            rank=order.rank,
            not_after=order.not_after,
            steps_after_save=order.steps_after_save,
            duration_s=order.duration_s if order.kind in _LASTING else 0.0,
            step=DrillStep.ARMED,
            at=time.time(),
        )
        refusal = self._why_never(record) or self._why_not_now(record)
        if refusal:
            self._close(record, DrillStep.REFUSED, refusal)
        elif self._too_late(record):
            self._close(record, DrillStep.EXPIRED, "it came after its deadline")
        else:
            self._store.put(record)
            self._tell(record)

    def _why_never(self, record: DrillRecord) -> str:
        """What speaks against the drill as it was asked for."""
        if record.kind in _LASTING and not 0 < record.duration_s <= LONGEST_FAULT_S:
            return f"a fault lasts more than 0 and at most {LONGEST_FAULT_S:g} s, not {record.duration_s:g} s"
        if record.kind is not FaultKind.KILL_RANK:
            for other in (*self._store.armed, *self._store.open):
                if other.kind is not FaultKind.KILL_RANK:
                    return f"drill {other.drill} is not over on this node: one fault of a node at a time"
        return ""

    def _why_not_now(self, record: DrillRecord) -> str:
        """What is not here that it needs."""
        run = self._supervisor.run(record.job, record.generation)
        if run is None or run.phase is not SeenPhase.RUNNING:
            return f"generation {record.generation} of {record.job} does not run on this node"
        if record.rank not in run.ranks:
            return f"rank {record.rank} is no rank of this node"
        if record.rank in run.exited:
            return f"rank {record.rank} has exited already"
        return ""

    def _too_early(self, record: DrillRecord) -> bool:
        return record.kind is not FaultKind.KILL_RANK and 0 <= time.time() - record.at < _HEAD_START_S

    def _too_late(self, record: DrillRecord) -> bool:
        return self._server_now() > record.not_after

    def _look_at(self, record: DrillRecord) -> None:
        if self._too_late(record):
            self._close(record, DrillStep.EXPIRED, "its deadline passed before its moment came")
            return
        ended = self._why_not_now(record)
        if ended:
            self._close(record, DrillStep.EXPIRED, f"its moment never came: {ended}")
            return
        run = self._supervisor.run(record.job, record.generation)
        assert run is not None
        if is_due(record, run) and not self._too_early(record):
            self._apply(record, run)

    # --- The fault ------------------------------------------------------------------------------------------------

    def _apply(self, record: DrillRecord, run: DrilledRun) -> None:
        begun = msgspec.structs.replace(
            record,
            step=DrillStep.APPLYING,
            at=time.time(),
            boot_id=this_boot(),
            undo_at_ns=boottime_ns() + int(record.duration_s * SECOND_NS),
        )
        try:
            match record.kind:
                case FaultKind.KILL_RANK:
                    words = kill_rank(record, run, write_down=lambda: self._store.put(begun))
                    self._applied(begun, words, at=begun.at)
                case FaultKind.PARTITION:
                    self._store.put(begun)
                    self._follow_partition(begun)
                case _:
                    self._keepers.write_down(record, run, not_after_s=record.not_after - self._server_now())
                    # Last on our side: without this record what is written down for a keeper is never begun.
                    self._store.put(begun)
                    self._keepers.start(record.drill)
        except FaultImpossible as err:
            self._close(record, DrillStep.REFUSED, str(err))
        except OSError as err:
            self._keepers.withdraw(record.drill)
            self._close(record, DrillStep.REFUSED, f"its keeper could not be started ({err})")

    def _applied(self, record: DrillRecord, detail: str, *, at: float) -> DrillRecord:
        applied = msgspec.structs.replace(
            record, step=DrillStep.APPLIED, at=at, detail=detail, applied_at=at, applied_detail=detail
        )
        self._tell(applied)
        self._store.put(applied)
        return applied

    def _close(self, record: DrillRecord, step: DrillStep, detail: str, *, at: float | None = None) -> None:
        closed = msgspec.structs.replace(record, step=step, detail=detail, at=time.time() if at is None else at)
        # Told first: an agent that dies in between tells it twice, which is better than never.
        self._tell(closed)
        self._store.put(closed)

    # --- After the fault ------------------------------------------------------------------------------------------

    def _keep_following(self) -> None:
        if self._store.open and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FOLLOW_EVERY_S, self._follow_all)

    def _follow_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for record in self._store.open:
            try:
                match record.kind:
                    case FaultKind.KILL_RANK:
                        self._settle(record)
                    case FaultKind.PARTITION:
                        self._follow_partition(record)
                    case _:
                        self._follow_keeper(record)
            except (StateUnusable, OSError) as err:
                self._complain(record, str(err))
        self._keep_following()

    def _settle(self, record: DrillRecord) -> None:
        """After a restart in the very moment of a fault: find out what happened, and never try it again."""
        run = self._supervisor.run(record.job, record.generation)
        if run is not None and record.rank in run.exited:
            self._applied(record, "the agent restarted in its moment; the rank is dead", at=record.at)
        elif time.monotonic() - self._began > _SETTLE_LIMIT_S:
            self._close(record, DrillStep.EXPIRED, _NOT_AGAIN)

    def _follow_partition(self, record: DrillRecord) -> None:
        lasts = record.boot_id == this_boot() and boottime_ns() < record.undo_at_ns
        self._cut(record, wanted=lasts)
        if record.step is DrillStep.APPLYING:
            record = self._applied(record, f"{self._where(record)}: connection to the server cut", at=record.at)
        if not lasts:
            self._close(record, DrillStep.UNDONE, "the agent may reach the server again")

    def _follow_keeper(self, record: DrillRecord) -> None:
        kept = self._keepers.read(record.drill)
        if kept is None:
            self._without_file(record)
            return
        match kept.step:
            case KeptStep.WANTED:
                if not self._keepers.lives(record.drill) and self._keepers.withdraw(record.drill):
                    self._close(record, DrillStep.EXPIRED, _NOT_AGAIN)
            case KeptStep.REFUSED | KeptStep.EXPIRED:
                self._close(record, DrillStep(kept.step.value), kept.detail)
                self._keepers.forget(kept)
            case KeptStep.UNDONE:
                self._undone(self._told_applied(record, kept), kept)
            case KeptStep.DOING | KeptStep.APPLIED:
                # A keeper that died in its moment may have done it: it counts as done, and is undone.
                lives = self._keepers.lives(record.drill)
                if kept.step is KeptStep.APPLIED or not lives:
                    record = self._told_applied(record, kept)
                    lasts = kept.boot_id == this_boot() and boottime_ns() < kept.undo_at_ns
                    self._cut(record, wanted=lasts and record.kind is FaultKind.ISOLATE_NODE)
                if not lives:
                    self._keepers.start(record.drill)

    def _without_file(self, record: DrillRecord) -> None:
        self._cut(record, wanted=False)
        if record.step is DrillStep.APPLYING:
            self._close(record, DrillStep.EXPIRED, _NOT_AGAIN)
        else:
            self._close(record, DrillStep.UNDONE, "what its keeper wrote down is gone")

    def _told_applied(self, record: DrillRecord, kept: KeptFault) -> DrillRecord:
        if record.step is DrillStep.APPLIED:
            return record
        at = record.at if kept.applied_at is None else kept.applied_at
        what = kept.detail or "its keeper died in its moment: it counts as done, and is undone"
        return self._applied(record, f"{self._where(record)}: {what}", at=at)

    def _undone(self, record: DrillRecord, kept: KeptFault) -> None:
        self._cut(record, wanted=False)
        self._close(record, DrillStep.UNDONE, kept.undone_detail, at=kept.undone_at)
        self._keepers.forget(kept)

    def _cut(self, record: DrillRecord, *, wanted: bool) -> None:
        if wanted and self._cut_for is None:
            self._cut_for = record.drill
            self._link.cut()
        elif not wanted and self._cut_for == record.drill:
            self._cut_for = None
            self._link.mend()

    # --- What is told ---------------------------------------------------------------------------------------------

    def _where(self, record: DrillRecord) -> str:
        run = self._supervisor.run(record.job, record.generation)
        return f"rank {record.rank}" if run is None else f"rank {record.rank} {words_for_moment(record, run)}"

    def _tell_again(self, record: DrillRecord) -> None:
        """The server names a drill that is known here: it may not have heard how it went."""
        if (record.drill, record.step) in self._told:
            return
        if record.step is DrillStep.UNDONE:
            self._tell(
                msgspec.structs.replace(
                    record, step=DrillStep.APPLIED, at=record.applied_at, detail=record.applied_detail
                )
            )
        self._tell(record)

    def _tell(self, record: DrillRecord) -> None:
        state = _REPORTED.get(record.step)
        if state is None or (record.drill, record.step) in self._told:
            return
        self._told.add((record.drill, record.step))
        log.info("drill", drill=record.drill, kind=record.kind, state=state, detail=record.detail, job=record.job)
        self._emit(FaultReport(drill=record.drill, state=state, at=record.at, detail=record.detail))

    def _complain(self, record: DrillRecord, words: str) -> None:
        """Once for each reason, not ten times a second."""
        if self._complaints.get(record.drill) != words:
            self._complaints[record.drill] = words
            log.error("a drill waits: its state could not be read or written", drill=record.drill, error=words)
