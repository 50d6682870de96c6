"""What the ranks of one generation report, on its way to the server: in order, without repeats, steps in batches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agents.protocol.messages import (
    CheckpointRehashed,
    CheckpointSaved,
    Message,
    RankFinished,
    RankPhase,
    RankResumed,
    SaveInTrouble,
    SaveTroubleKind,
    SnapshotKept,
    StateProbe,
    StepReport,
    StepReports,
)
from agents.sensors.rank_reports import (
    FinishedSaid,
    KeptSaid,
    NotKeptSaid,
    PhaseSaid,
    RankReport,
    RehashedSaid,
    ResumedSaid,
    SavedSaid,
    SaveFailedSaid,
    SaveNote,
    SaveSkippedSaid,
    StepSaid,
)
from agents.told import ToldGeneration, note_key

FLUSH_AFTER_S = 0.2
_LARGEST_BATCH = 500
_MOST_WAITING = 50_000


@dataclass
class Progress:
    """How far the ranks of a generation on this node have come."""

    resumed: dict[int, int] = field(default_factory=dict)
    """Rank to the steps that were done when it began."""
    step: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    kept: dict[int, int] = field(default_factory=dict)
    """Rank to the step of its newest snapshot in memory. An agent's next life tells it again, which does no harm."""
    save_notes: set[str] = field(default_factory=set)
    """What was said of saves beside their success: `told.note_key`."""
    phase_at: dict[int, float] = field(default_factory=dict)
    """When the newest phase of each rank began, by the rank's clock."""

    @classmethod
    def told(cls, told: ToldGeneration) -> Progress:
        """What an earlier life of this agent has passed on already."""
        return cls(
            resumed=told.resumed,
            step=told.step,
            finished=told.finished,
            saved=set() if told.saved is None else {told.saved},
            save_notes=set(told.save_notes),
            phase_at=told.phase,
        )


class Intake:
    """Takes one generation's reports from datagrams and, after a gap, from the ranks' own logs."""

    def __init__(
        self,
        *,
        job: str,
        generation: int,
        ranks: Iterable[int],
        emit: Callable[[Message], None],
        progressed: Callable[[int], None],
        told: ToldGeneration | None = None,
    ) -> None:
        self.progress = Progress() if told is None else Progress.told(told)
        self._saved_before = -1 if told is None or told.saved is None else told.saved
        self._job = job
        self._generation = generation
        self._ranks = frozenset(ranks)
        self._emit = emit
        self._progressed = progressed
        self._steps: list[StepReport] = []
        self._timer: asyncio.TimerHandle | None = None

    def take(self, said: RankReport) -> bool:
        """Take one report; False if it is of no rank here, or too many wait. A repeat is taken and forgotten."""
        if said.rank not in self._ranks:
            return False
        match said:
            case StepSaid():
                if said.step <= self.progress.step.get(said.rank, 0):
                    return True
                if len(self._steps) >= _MOST_WAITING:
                    return False
                self.progress.step[said.rank] = said.step
                self._keep(said)
            case ResumedSaid():
                if said.rank in self.progress.resumed:
                    return True
                self.progress.resumed[said.rank] = said.step
                self._pass_on(self._resumed(said))
            case SavedSaid():
                if said.step in self.progress.saved or said.step <= self._saved_before:
                    return True
                self.progress.saved.add(said.step)
                if said.rank == 0:  # the others note it in their own logs; one word to the server is enough
                    self._pass_on(self._saved(said))
            case KeptSaid():
                if said.step <= self.progress.kept.get(said.rank, -1):
                    return True
                self.progress.kept[said.rank] = said.step
                self._pass_on(self._kept(said))
            case RehashedSaid() | SaveFailedSaid() | SaveSkippedSaid() | NotKeptSaid():
                note = self._note(said)
                if note_key(note) in self.progress.save_notes:
                    return True
                self.progress.save_notes.add(note_key(note))
                self._pass_on(note)
            case PhaseSaid():
                if said.at <= self.progress.phase_at.get(said.rank, -math.inf):
                    return True
                self.progress.phase_at[said.rank] = said.at
                self._pass_on(
                    RankPhase(job=self._job, generation=self._generation, rank=said.rank, phase=said.phase, at=said.at)
                )
            case FinishedSaid():
                if said.rank in self.progress.finished:
                    return True
                self.progress.finished[said.rank] = said.step
                self._pass_on(
                    RankFinished(job=self._job, generation=self._generation, rank=said.rank, step=said.step, at=said.at)
                )
        self._progressed(said.rank)
        return True

    def flush(self) -> None:
        """Hand on the steps that wait for their batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        steps, self._steps = self._steps, []
        for start in range(0, len(steps), _LARGEST_BATCH):
            batch = steps[start : start + _LARGEST_BATCH]
            self._emit(StepReports(job=self._job, generation=self._generation, steps=batch))

    def _keep(self, said: StepSaid) -> None:
        self._steps.append(
            StepReport(
                rank=said.rank,
                step=said.step,
                at=said.at,
                loss=said.loss,
                learning_rate=said.learning_rate,
                grad_norm=said.grad_norm,
                epoch=said.epoch,
                span_start=said.span_start,
                span_stop=said.span_stop,
                step_time_s=said.step_time_s,
                epoch_size=said.epoch_size,
                indices_digest=said.indices_digest,
                order_digest=said.order_digest,
                samples=said.samples,
                tokens=said.tokens,
                parameter_norm=said.parameter_norm,
                data_s=said.data_s,
                forward_backward_s=said.forward_backward_s,
                optimizer_s=said.optimizer_s,
                wait_s=said.wait_s,
                checkpoint_s=said.checkpoint_s,
                memory_bytes=said.memory_bytes,
                gpu_memory_bytes=said.gpu_memory_bytes,
                probe=StateProbe(digests=said.probe.digests, unmoved=said.probe.unmoved) if said.probe else None,
            )
        )
        if self._timer is None:
            # A rank's first step ends the wait of a recovery: it goes at once, later ones in batches.
            first = (
                len(self.progress.step) < len(self._ranks) or said.step <= self.progress.resumed.get(said.rank, 0) + 1
            )
            self._timer = asyncio.get_running_loop().call_later(0 if first else FLUSH_AFTER_S, self._flush_by_timer)

    def _flush_by_timer(self) -> None:
        self._timer = None
        self.flush()

    def _pass_on(self, message: Message) -> None:
        self.flush()  # the steps before it go first
        self._emit(message)

    def _resumed(self, said: ResumedSaid) -> RankResumed:
        return RankResumed(
            job=self._job,
            generation=self._generation,
            rank=said.rank,
            step=said.step,
            total_steps=said.total_steps,
            at=said.at,
            parent_generation=said.parent_generation,
            saved_digest=said.saved_digest,
            live_digest=said.live_digest,
            deterministic=said.deterministic,
        )

    def _saved(self, said: SavedSaid) -> CheckpointSaved:
        return CheckpointSaved(
            job=self._job,
            generation=self._generation,
            step=said.step,
            at=said.at,
            directory=said.directory,
            size_bytes=said.size_bytes,
            world_size=said.world_size,
            parent_generation=said.parent_generation,
            parent_step=said.parent_step,
            save_time_s=said.save_time_s,
            blocked_s=said.blocked_s,
        )

    def _kept(self, said: KeptSaid) -> SnapshotKept:
        return SnapshotKept(
            job=self._job,
            generation=self._generation,
            rank=said.rank,
            step=said.step,
            at=said.at,
            world_size=said.world_size,
            copy_of=said.copy_of,
        )

    def _note(self, said: SaveNote) -> CheckpointRehashed | SaveInTrouble:
        if isinstance(said, RehashedSaid):
            return CheckpointRehashed(
                job=self._job,
                generation=self._generation,
                rank=said.rank,
                step=said.step,
                at=said.at,
                ok=said.ok,
                reason=said.reason,
            )
        failed = isinstance(said, SaveFailedSaid)
        return SaveInTrouble(
            job=self._job,
            generation=self._generation,
            rank=said.rank,
            step=said.step,
            at=said.at,
            kind=SaveTroubleKind.FAILED if failed else SaveTroubleKind.SKIPPED,
            attempt=said.attempt if isinstance(said, SaveFailedSaid) else 1,
            reason=f"not kept in memory: {said.reason}" if isinstance(said, NotKeptSaid) else said.reason,
        )
