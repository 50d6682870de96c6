"""The ranks of one generation in the simulation: they start, meet, resume, step together, save, end or die.

A step needs every rank: while a node is frozen or cut off from the others, all stand still. A node that thaws may still
finish the step that it has in hand, from what the others had sent before.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Protocol

from schedules import JobShape
from virtual_time import Action, VirtualTime

from agents.protocol.messages import Phase
from recovery.domain.plan import CheckpointRef, RecoveryPlan

PARTS = ("model", "optimizer", "rng", "sampler", "scheduler")
LEASE_EXIT_CODE = 76


class Surroundings(Protocol):
    """What ranks meet of the machines that they run on."""

    def tell(self, key: tuple[str, int], rank: int, fact: tuple[object, ...]) -> None:
        """The rank's node passes a fact on."""

    def gone(self, key: tuple[str, int], rank: int) -> None:
        """A rank's process is gone; called after its exit was told."""

    def held_up(self, nodes: tuple[str, ...]) -> bool:
        """Whether ranks on these nodes cannot go on together right now."""

    def is_frozen(self, node: str) -> bool: ...

    def progressed(self, key: tuple[str, int], node: str, phase: Phase, steps: int) -> None:
        """A sign for the node's lease."""

    def may_act(self, key: tuple[str, int], node: str) -> bool:
        """A rank's own look at its lease, before it says or publishes anything."""

    def acted(self, key: tuple[str, int], node: str, what: str) -> None:
        """A rank has made a step or published a checkpoint: judged by what is known of the whole world."""

    def published(self, ref: CheckpointRef, job: str) -> None:
        """A manifest is on disk."""


@dataclass
class Crash:
    """A deterministic fault of the script: a rank fails whenever it computes this step, so many times."""

    rank: int
    step: int
    times: int


@dataclass
class LostLoss:
    """A fault of script, data or hardware: the loss of so many generations is not finite from this step on."""

    step: int
    times: int


@dataclass
class SimulatedTraining:
    plan: RecoveryPlan
    shape: JobShape
    time: VirtualTime
    rng: random.Random
    around: Surroundings
    crashes: list[Crash]
    lost_losses: list[LostLoss]
    poisoned: set[CheckpointRef]
    """Checkpoints that hold what is no number: whoever loads one has lost its loss from the first step on."""
    broken_part: str = ""
    """What this generation fails to restore; empty for a sound resume."""
    exit_last: dict[int, int] = field(default_factory=dict)
    """Rank to exit code or signal that it ends with instead of leaving well after its last step."""

    alive: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    step: int = 0
    first_step: int = 0
    stepping: bool = False
    died: bool = False
    phase: Phase = Phase.SETUP
    troubled_at: float = 0.0
    """When something last kept its ranks from going on together."""
    in_hand: set[str] = field(default_factory=set)
    """Frozen nodes that can finish what they had begun without a further word from the others."""
    ahead: set[str] = field(default_factory=set)
    """Nodes that have finished the step which the others still have to make."""
    lost: bool = False
    """Its loss is not finite any more."""
    _waiting: Action | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.plan.job, self.plan.generation

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def healthy(self) -> bool:
        """Every rank is there, and nothing keeps them from going on."""
        complete = len(self.alive | self.finished) == self.world_size
        return not self.died and complete and not self.around.held_up(self.plan.nodes)

    def ranks_on(self, node: str) -> list[int]:
        return [rank for rank in sorted(self.alive) if self.plan.node_of(rank) == node]

    # --- Beginning ---

    def start_rank(self, rank: int) -> None:
        """A rank's process exists from here on; when all do, training begins."""
        self.alive.add(rank)
        self._tell(rank, "started", rank)
        if len(self.alive) == self.world_size and not self.died:
            self._later(self.rng.uniform(0.1, self.shape.setup_s), self._resume)

    def _resume(self) -> None:
        if len(self.alive) != self.world_size or not self._may_all_act():
            return
        self.step = self.first_step = self.plan.parent.step if self.plan.parent else 0
        self.stepping = True
        for rank in range(self.world_size):
            saved = {part: f"{part}@{self.step}" for part in PARTS} if self.plan.parent else {}
            live = dict(saved)
            if self.broken_part in live:
                live[self.broken_part] = f"fresh {self.broken_part}"
            if not self.shape.reports_digests:
                saved, live = {}, {}
            resumed_at = self.step + (self.broken_part == "resumed_step" and rank == 0)
            self._tell(rank, "resumed", rank, resumed_at, saved, live)
        if self.plan.parent is None and self.shape.saves_step_0:
            self._save()
        else:
            self._next()

    # --- Steps ---

    def _next(self) -> None:
        if self.step >= self.shape.total_steps:
            self._finish()
        else:
            self._later(self.shape.step_time_s, self._make_step)

    def _make_step(self) -> None:
        step = self.step + 1
        for crash in self.crashes:
            if crash.step == step and crash.times > 0 and crash.rank < self.world_size:
                crash.times -= 1
                self.end_rank(crash.rank, exit_code=3, detail=f"ValueError: bad batch at step {step}")
                return
        if not self._may_all_act():
            return
        self._lose_loss(step)
        self.step = step
        for node in self.plan.nodes:
            if node not in self.ahead:
                self._finish_step_on(node, step)
        self.ahead.clear()
        self.phase = Phase.STEP
        if step % self.shape.save_every == 0:
            self._save()
        else:
            self._next()

    def _finish_step_on(self, node: str, step: int) -> None:
        self.around.progressed(self.key, node, Phase.STEP, step - self.first_step)
        for rank in self.ranks_on(node):
            self._tell(rank, "step", rank, step, *self._record(rank, step))
        self.around.acted(self.key, node, f"made step {step}")

    def _lose_loss(self, step: int) -> None:
        if self.plan.parent in self.poisoned:
            self.lost = True
        for fault in self.lost_losses:
            if not self.lost and step >= fault.step and fault.times > 0:
                fault.times -= 1
                self.lost = True

    def _record(self, rank: int, step: int) -> tuple[float, float, int]:
        """Loss, learning rate and first sample of a step: a function of the step, unless something was not restored."""
        loss = math.nan if self.lost else 4.0 / (1.0 + 0.1 * step) + 0.001 * rank
        learning_rate = 1e-3 * 0.99**step
        first_sample = (step - 1) * 8
        if self.broken_part == "loss":
            loss *= 1.2
        elif self.broken_part == "scheduler":
            learning_rate = 1e-3
        elif self.broken_part == "sampler":
            first_sample += 8
        return loss, learning_rate, first_sample

    # --- Saves and evaluations ---

    def _save(self) -> None:
        self._enter(Phase.SAVE)
        self._later(self.rng.uniform(0.0, self.shape.save_time_s), self._publish)

    def _publish(self) -> None:
        if not self._may_all_act():
            return
        self._put_manifest()
        if self.shape.evaluates_s and self.step:
            self._enter(Phase.EVALUATION)
            self._later(self.shape.evaluates_s, self._evaluated)
        else:
            self._evaluated()

    def _put_manifest(self) -> None:
        if self.lost:
            self.poisoned.add(CheckpointRef(generation=self.plan.generation, step=self.step))
        self.around.published(CheckpointRef(generation=self.plan.generation, step=self.step), self.plan.job)
        self._tell(0, "saved", self.step)
        self.around.acted(self.key, self.plan.nodes[0], f"published the checkpoint of step {self.step}")

    def _evaluated(self) -> None:
        if self._may_all_act():
            self._enter(Phase.STEP)
            self._next()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        for node in self.plan.nodes:
            self.around.progressed(self.key, node, phase, self.step - self.first_step)
        for rank in sorted(self.alive):
            self._tell(rank, "phase", rank, phase)

    # --- Being held up ---

    def _later(self, delay_s: float, action: Action) -> None:
        """Go on after a while, once nothing keeps the ranks from it, if they live."""

        def due() -> None:
            if self.died:
                return
            if self.around.held_up(self.plan.nodes):
                self._waiting = action
                self.troubled_at = self.time.now
            else:
                action()

        self.time.after(delay_s, due)

    def freeze(self, node: str) -> None:
        """A node's ranks stand still. Whether the others' last words had reached it decides what it can do later."""
        self.troubled_at = self.time.now
        busy = self.stepping and self.phase in (Phase.STEP, Phase.SAVE) and self.step < self.shape.total_steps
        if busy and not self.died and self.ranks_on(node) and self.rng.random() < 0.6:
            self.in_hand.add(node)

    def thaw(self, node: str) -> None:
        self.troubled_at = self.time.now
        if node in self.in_hand:
            self.in_hand.discard(node)
            self.time.after(self.rng.uniform(0.001, 0.05), lambda: self._finish_in_hand(node))
        self.go_on()

    def go_on(self) -> None:
        """Something that held them up is over."""
        self.troubled_at = self.time.now
        if self._waiting is not None and not self.died and not self.around.held_up(self.plan.nodes):
            action, self._waiting = self._waiting, None
            self._later(self.rng.uniform(0.01, 0.5), action)

    def _finish_in_hand(self, node: str) -> None:
        """What a thawed node does alone: the one step, or the one manifest, for which it needs nobody any more."""
        if not self.ranks_on(node) or self.around.is_frozen(node) or node in self.ahead:
            return
        if not self._may_act(node):
            return
        if self.phase is Phase.SAVE:
            if node == self.plan.nodes[0]:
                self._put_manifest()
        elif self.died or self._waiting is not None:
            self.ahead.add(node)
            self._finish_step_on(node, self.step + 1)

    def _may_all_act(self) -> bool:
        """Each node's ranks look at their lease; those whose lease has run out end themselves."""
        looks = {node: self._may_act(node) for node in self.plan.nodes}
        return all(looks.values()) and not self.died

    def _may_act(self, node: str) -> bool:
        if self.around.may_act(self.key, node):
            return True
        for rank in self.ranks_on(node):
            self.end_rank(rank, exit_code=LEASE_EXIT_CODE, detail="The lease has run out.")
        return False

    # --- Ending ---

    def _finish(self) -> None:
        """Each rank does its last things and leaves, one before the other."""
        if not self._may_all_act():
            return
        for rank in range(self.world_size):
            self.finished.add(rank)
            self._tell(rank, "finished", rank, self.step)
            how = self.exit_last.pop(rank, None)
            self.time.after(self.rng.uniform(0.0, 3.0), lambda rank=rank, how=how: self._leave(rank, how))  # type: ignore[misc]

    def _leave(self, rank: int, how: int | None) -> None:
        if self.around.is_frozen(self.plan.node_of(rank)):
            self.time.after(1.0, lambda: self._leave(rank, how))
        elif how == 9:
            self.end_rank(rank, signal=9)
        else:
            self.end_rank(rank, exit_code=how or 0)

    def end_rank(
        self,
        rank: int,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        detail: str = "",
        told: bool = True,
        quietly: bool = False,
    ) -> None:
        """A rank ends. Unless that was its normal end, its peers fail in a collective, or hang until killed.

        told: whether somebody saw it end. quietly: its machine is gone too, so that peers rather hang than fail.
        """
        if rank not in self.alive:
            return
        self.alive.discard(rank)
        if told:
            self._tell(rank, "exited", rank, exit_code, signal, detail)
        self.around.gone(self.key, rank)
        if rank in self.finished and exit_code == 0:
            return
        self.died = True
        self.stepping = False
        for peer in sorted(self.alive - self.finished):
            if self.rng.random() < (0.2 if quietly else 0.6):
                self.time.after(self.rng.uniform(0.05, 1.5), lambda peer=peer: self._echo(peer))  # type: ignore[misc]

    def _echo(self, peer: int) -> None:
        """A peer's collective breaks; a frozen one learns of it when it thaws."""
        if self.around.is_frozen(self.plan.node_of(peer)):
            if peer in self.alive:
                self.time.after(1.0, lambda: self._echo(peer))
        else:
            self.end_rank(peer, exit_code=1, detail="RuntimeError: Connection closed by peer")

    def _tell(self, rank: int, kind: str, *rest: object) -> None:
        self.around.tell(self.key, rank, (kind, *rest))
