"""The ranks of one generation in the simulation: they start, meet, resume, step together, save, end or die."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from schedules import JobShape
from virtual_time import VirtualTime

from recovery.domain.plan import CheckpointRef, RecoveryPlan

Tell = Callable[[int, tuple[object, ...]], None]
"""Takes a rank and a fact about it; the rank's node passes it on."""

PARTS = ("model", "optimizer", "rng", "sampler", "scheduler")


@dataclass
class Crash:
    """A deterministic fault of the script: a rank fails whenever it computes this step, so many times."""

    rank: int
    step: int
    times: int


@dataclass
class SimulatedTraining:
    plan: RecoveryPlan
    shape: JobShape
    time: VirtualTime
    rng: random.Random
    tell: Tell
    gone: Callable[[int], None]
    """Called with a rank when its process is gone, after its exit was told."""
    saved: Callable[[CheckpointRef], None]
    crashes: list[Crash]
    broken_part: str = ""
    """What this generation fails to restore; empty for a sound resume."""
    exit_last: dict[int, int] = field(default_factory=dict)
    """Rank to exit code or signal that it ends with instead of leaving well after its last step."""

    alive: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    step: int = 0
    stepping: bool = False
    died: bool = False

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    def start_rank(self, rank: int) -> None:
        """A rank's process exists from here on; when all do, training begins."""
        self.alive.add(rank)
        self.tell(rank, ("started", rank))
        if len(self.alive) == self.world_size and not self.died:
            self.time.after(self.rng.uniform(0.1, 1.0), self._resume)

    def _resume(self) -> None:
        if self.died or len(self.alive) != self.world_size:
            return
        self.step = self.plan.parent.step if self.plan.parent else 0
        self.stepping = True
        for rank in range(self.world_size):
            saved = {part: f"{part}@{self.step}" for part in PARTS} if self.plan.parent else {}
            live = dict(saved)
            if self.broken_part in live:
                live[self.broken_part] = f"fresh {self.broken_part}"
            if not self.shape.reports_digests:
                saved, live = {}, {}
            resumed_at = self.step + (self.broken_part == "resumed_step" and rank == 0)
            self.tell(rank, ("resumed", rank, resumed_at, saved, live))
        if self.plan.parent is None and self.shape.saves_step_0:
            self._save()
        self._next()

    def _next(self) -> None:
        if self.step >= self.shape.total_steps:
            self._finish()
        else:
            self.time.after(self.shape.step_time_s, self._make_step)

    def _make_step(self) -> None:
        if self.died:
            return
        step = self.step + 1
        for crash in self.crashes:
            if crash.step == step and crash.times > 0 and crash.rank < self.world_size:
                crash.times -= 1
                self.end_rank(crash.rank, exit_code=3, detail=f"ValueError: bad batch at step {step}")
                return
        self.step = step
        for rank in range(self.world_size):
            self.tell(rank, ("step", rank, step, *self._record(rank, step)))
        if step % self.shape.save_every == 0:
            self._save()
        self._next()

    def _record(self, rank: int, step: int) -> tuple[float, float, int]:
        """Loss, learning rate and first sample of a step: a function of the step, unless something was not restored."""
        loss = 4.0 / (1.0 + 0.1 * step) + 0.001 * rank
        learning_rate = 1e-3 * 0.99**step
        first_sample = (step - 1) * 8
        if self.broken_part == "loss":
            loss *= 1.2
        elif self.broken_part == "scheduler":
            learning_rate = 1e-3
        elif self.broken_part == "sampler":
            first_sample += 8
        return loss, learning_rate, first_sample

    def _save(self) -> None:
        self.saved(CheckpointRef(generation=self.plan.generation, step=self.step))
        self.tell(0, ("saved", self.step))

    def _finish(self) -> None:
        """Each rank does its last things and leaves, one before the other."""
        for rank in range(self.world_size):
            self.finished.add(rank)
            self.tell(rank, ("finished", rank, self.step))
            how = self.exit_last.pop(rank, None)
            self.time.after(self.rng.uniform(0.0, 3.0), lambda rank=rank, how=how: self._leave(rank, how))  # type: ignore[misc]

    def _leave(self, rank: int, how: int | None) -> None:
        if how == 9:
            self.end_rank(rank, signal=9)
        else:
            self.end_rank(rank, exit_code=how or 0)

    def end_rank(self, rank: int, *, exit_code: int | None = None, signal: int | None = None, detail: str = "") -> None:
        """A rank ends. Unless that was its normal end, its peers fail in a collective, or hang until killed."""
        if rank not in self.alive:
            return
        self.alive.discard(rank)
        self.tell(rank, ("exited", rank, exit_code, signal, detail))
        self.gone(rank)
        if rank in self.finished and exit_code == 0:
            return
        self.died = True
        self.stepping = False
        for peer in sorted(self.alive - self.finished):
            if self.rng.random() < 0.6:
                delay = self.rng.uniform(0.05, 1.5)
                self.time.after(delay, lambda peer=peer: self._echo(peer))  # type: ignore[misc]

    def _echo(self, peer: int) -> None:
        self.end_rank(peer, exit_code=1, detail="RuntimeError: Connection closed by peer")

    def vanish(self, rank: int) -> None:
        """A rank's process is gone and nobody saw how: its machine rebooted or its runner died."""
        self.alive.discard(rank)
        self.died = True
        self.stepping = False
        self.gone(rank)
        for peer in sorted(self.alive - self.finished):
            if self.rng.random() < 0.6:
                self.time.after(self.rng.uniform(0.05, 1.5), lambda peer=peer: self._echo(peer))  # type: ignore[misc]
