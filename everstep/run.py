"""`Run`: resume, iterate, report, checkpoint. A training script wraps its loop in one.

    run = everstep.Run(total_steps=1000, save_every=50, seed=1)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    run.resume()
    for step, batch in zip(run.steps(), sampler.stream()):
        ...
        run.report(loss=loss, learning_rate=scheduler.get_last_lr()[0], span=batch.span)

Under Everstep's runner it resumes from exactly the checkpoint that the plan names and tells the node's agent about each
step. Alone, the same script resumes from the newest checkpoint of its directory.

Where the runner keeps a lease, a rank that finds it run out ends itself with exit code 76 (`rank_lease.py`).
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.checkpoint import memory, rng
from everstep.checkpoint.manifest import (
    MANIFEST,
    CheckpointName,
    newest_checkpoint,
    newest_generation,
    read_lineage,
    record_lineage,
)
from everstep.checkpoint.memory import Held
from everstep.checkpoint.memory_load import assemble, disband, look
from everstep.checkpoint.memory_tier import MemorySettings
from everstep.checkpoint.probe import StateProbes
from everstep.checkpoint.reader import Loaded, read_checkpoint
from everstep.checkpoint.retention import KEEP
from everstep.checkpoint.saver import News, Saver, SaveSettings, WhenBusy
from everstep.checkpoint.snapshot import RNG, put_back, take, unwrap
from everstep.context import RunContext
from everstep.data import SampleOrder, SampleSpan
from everstep.elastic.lease import Phase
from everstep.errors import BadDatagram, CheckpointDamaged, CheckpointMissing, EverstepError, UsageError
from everstep.memory_interval import MemoryInterval
from everstep.rank_lease import RankLease
from everstep.rank_log import RankLog
from everstep.ranks import Team
from everstep.save_interval import SaveInterval
from everstep.save_requests import SaveRequests
from everstep.step_split import MemoryGauge, StepSplit
from everstep.telemetry import Telemetry, encode_fields, join_fields


class Stateful(Protocol):
    """Anything whose state can be saved and put back, such as a module, an optimizer or a scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Batch = TypeVar("Batch")

MEMORY_PARTNER = "EVERSTEP_MEMORY_PARTNER"

_NOT_SAID: Any = object()

_LAST_ATTEMPTS = 2
"""To bring the last step to disk before the run ends."""

_LEFT_OUT = {
    "model": "its weights are neither saved nor restored, so that a recovery starts training from scratch",
    "optimizer": "its moments are lost in a recovery; the loss goes on almost unchanged and then drifts",
    "scheduler": "the learning rate starts over in a recovery",
    "sampler": "a recovery repeats samples or skips them",
}


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What the script reported about the step in hand."""

    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    span: SampleSpan | None = None
    optional: dict[str, Any] = field(default_factory=dict)
    """What is told only where it is known, by its name in the datagram."""


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a generation begins with. in_memory: the token of the parent's snapshot in memory, if it is whole there."""

    parent: CheckpointName | None
    generation: int
    token: str
    in_memory: str | None
    on_disk: bool


class Run:
    """One rank's view of a training run of `total_steps` optimizer steps, saved each `save_every` of them.

    seed: seeds Python's, NumPy's and torch's generators on construction, the same on each rank, and apart from each
    other when training starts from the beginning; None leaves them alone.
    checkpoint_directory: where checkpoints lie when no runner says so; all nodes must share it.
    deterministic: the promise that equal state gives equal losses, bit for bit; by default, whether torch was told to
    use deterministic algorithms when training starts.
    save_every: steps between saves, or "auto": what costs least by the measured time of saves and steps and by how
    often machines fail (`save_interval.py`). A server's word (EVERSTEP_SAVE_EVERY) overrides it.
    keep: complete checkpoints to keep, beside those that the server has pinned.
    memory_every: steps between snapshots that stay in the node's memory and outlive its ranks, so that a rank's death
    costs no more; "auto" keeps one as often as that holds training up for less than 1 % (`memory_interval.py`). A
    server's word (EVERSTEP_MEMORY_EVERY) overrides it. None keeps none; the disk remains the base in any case.
    memory_partner: keep each node's snapshots on another node as well, so that a node's death costs no more either.

    SIGTERM, an operator or a notice of maintenance gives one save at a step that all ranks agree on, within about a
    second; after SIGTERM to any rank, all end with exit code 143 once it is saved, or when 25 s are over.

    Exit code 76: under a runner, neither contact with the server nor progress came within the limit of the phase, for
    example because the node was frozen, so that another generation may be running. The rank ends itself before it
    reports a step, begins a phase or publishes a checkpoint; it says so in its output and cleans nothing up.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        save_every: int | Literal["auto"] = 100,
        seed: int | None = 0,
        checkpoint_directory: str | os.PathLike[str] = "checkpoints",
        deterministic: bool | None = None,
        keep: int = KEEP,
        when_busy: WhenBusy = "wait",
        memory_every: int | Literal["auto"] | None = None,
        memory_partner: bool = False,
    ) -> None:
        if total_steps < 1 or keep < 1:
            raise UsageError(f"Run(total_steps={total_steps}, keep={keep}): each must be at least 1.")
        self.total_steps = total_steps
        self._interval = SaveInterval(save_every, nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")))
        self._memory_interval = MemoryInterval(memory_every)
        self._memory_partner = memory_partner or os.environ.get(MEMORY_PARTNER) == "1"
        self.seed = seed
        self.keep = keep
        self._deterministic = deterministic
        self._context = RunContext.from_environment()
        self.checkpoint_directory = self._context.checkpoint_directory or Path(checkpoint_directory)
        self._memory_root = self._context.memory_directory or memory.default_root(
            self._context.job, self.checkpoint_directory
        )
        self._memory_kept: tuple[CheckpointName, str] | None = None
        self._token = ""
        self._on_disk = False
        self._not_kept_since = ""
        self._tier: Literal["disk", "memory"] = "disk"
        self._requests = SaveRequests(self._context.run_directory)
        self.rank = self._context.rank
        self.generation = self._context.generation or 0
        """Rising number of this start of the job; 0 until `resume` where no runner gave one."""
        self._tracked: dict[str, Stateful] = {}
        self._declared: set[str] = set()
        self._team: Team | None = None
        self._parent: CheckpointName | None = None
        self._loaded: Loaded | None = None
        self._done = 0
        self._made = 0
        self._phase = Phase.SETUP
        self._saver: Saver | None = None
        self._when_busy = when_busy
        self._saved_step: int | None = None
        self._blocked_s = 0.0
        self._failures = 0
        self._probes = StateProbes()
        self._numbers: StepNumbers | None = None
        self._split = StepSplit()
        self._gauge = MemoryGauge()
        self._log = RankLog(self._context.log_directory, rank=self.rank, generation=self.generation)
        self._log.write("start", ppid=os.getppid(), cmd=sys.orig_argv)
        if self._context.beats:
            self._log.start_beats()
        self._telemetry = Telemetry(
            socket_path=self._context.socket_path,
            job=self._context.job,
            generation=self.generation,
            rank=self.rank,
        )
        paths = self._context.lease
        self._lease = None if paths is None else RankLease(paths, local_rank=self._context.local_rank, log=self._log)
        atexit.register(self._stop)
        if seed is not None:
            rng.seed_all(seed)

    @property
    def step(self) -> int:
        """Steps done."""
        return self._done

    @property
    def save_every(self) -> int:
        """Steps between saves; with `auto`, as measured until now."""
        return self._interval.steps

    def track(
        self,
        *,
        model: Stateful = _NOT_SAID,
        optimizer: Stateful | None = _NOT_SAID,
        scheduler: Stateful | None = _NOT_SAID,
        sampler: Stateful | None = _NOT_SAID,
        **others: Stateful,
    ) -> None:
        """Name what decides the next step; it is saved, restored, and checked after the restore.

        Say `scheduler=None` where there is none: leaving it out warns. Whoever builds an object anew must track it
        again. `others` takes whatever else has a state_dict, such as a gradient scaler or averaged weights.
        """
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, **others}
        for part, target in named.items():
            if target is _NOT_SAID:
                continue
            if part == RNG:
                raise UsageError(f"The name {RNG!r} is taken: Run saves the random generators itself.")
            self._declared.add(part)
            if target is None:
                self._tracked.pop(part, None)
            elif not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
                raise UsageError(f"Cannot track {part}: a {type(target).__name__} has no state_dict/load_state_dict.")
            else:
                self._tracked[part] = target

    def warm_up(self, forward_backward: Callable[[], object]) -> None:
        """Make a resumed run sum gradients in the same order as one that was never interrupted. Call before `resume`.

        DistributedDataParallel lays its buckets out anew after the first backward pass, so at 3 ranks and more a
        resumed process starts with other sums. `forward_backward` is called twice, with any data; weights, gradients
        and random generators are put back.
        """
        if self._team is not None or "model" not in self._tracked:
            raise UsageError("Call run.warm_up after run.track(model=...) and before run.resume().")
        team = Team()
        if team.world_size < 3:
            return
        model = unwrap(self._tracked["model"])
        weights, generators = copy.deepcopy(model.state_dict()), rng.capture()
        for _ in range(2):
            forward_backward()
        model.load_state_dict(weights)
        model.zero_grad(set_to_none=True)
        rng.restore(generators)

    def resume(self) -> int:
        """Load the checkpoint that training goes on from, if there is one, into what is tracked.

        Returns the steps already done: 0 at the beginning. Raises `CheckpointMissing` or `CheckpointDamaged`, on every
        rank alike, when the checkpoint that the plan names cannot be used: there is no silent start from step 0.
        """
        self._team = team = Team()
        self.rank = team.rank
        self._warn_of_what_is_left_out()
        seen = look(team, self._memory_root)
        self._choose_parent(team, seen)
        if self._parent is not None:
            self._loaded = self._load_best(team, seen, self._parent)
            self._done = self._parent.step
            self._saved_step = None if self._tier == "memory" else self._done
        return self._done

    def steps(self) -> Iterator[int]:
        """Number of each step to be made, the first one after the checkpoint up to `total_steps`.

        A step is done, reported and saved when the next one is asked for, so that it includes all that the loop's body
        does. Restores the random generators, and takes the state digest, just before the first.
        """
        if self._team is None:
            raise UsageError("Call run.resume() before run.steps(); it does nothing when there is nothing to resume.")
        self._begin()
        guard = register_optimizer_step_pre_hook(self._check_stepped_optimizer)
        self._split.watch_optimizers()
        try:
            while self._done < self.total_steps:
                self._numbers = None
                started = time.monotonic()
                yield self._done + 1
                self._finish_step(time.monotonic() - started)
                guard.remove()
        finally:
            guard.remove()
            self._split.close()
        self._finish()

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """The source's batches, over and over; how long training waits for each is the step's data time.

        for step, batch in zip(run.steps(), run.batches(loader)): ...

        A source that comes to its end is iterated anew, as the next epoch. Raises `UsageError` if it is empty.
        """
        passes = 0
        while True:
            given, iterator = 0, iter(source)
            while True:
                started = time.monotonic()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                self._split.fetched(time.monotonic() - started)
                given += 1
                yield batch
            passes += 1
            if not given:
                raise UsageError(
                    f"run.batches got no batch at all from a {type(source).__name__} at its pass {passes}: "
                    "give it a loader that can be iterated again and again, such as a DataLoader."
                )

    def report(
        self,
        *,
        loss: Any = None,
        learning_rate: Any = None,
        grad_norm: Any = None,
        parameter_norm: Any = None,
        span: SampleSpan | None = None,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Say once per step what it did. Numbers may be one-element tensors. `span` is the batch's `span`.

        With a tracked sampler the span is required: it moves the sampler's position. It must be the one that travelled
        with the batch. samples and tokens are this rank's; a span knows its samples. parameter_norm is reported if it
        is given: it costs a pass over all parameters, so give it now and then.
        """
        if self._numbers is not None:
            raise UsageError(f"Step {self._done + 1} was reported already: call run.report once per step.")
        sampler: Any = self._tracked.get("sampler")
        order: SampleOrder | None = sampler if hasattr(sampler, "commit") else None
        optional: dict[str, Any] = {
            "parameter_norm": _number(parameter_norm),
            "samples": span.count if samples is None and span is not None else samples,
            "tokens": tokens,
        }
        if span is not None:
            optional["epoch_size"] = span.epoch_size
            optional["indices_digest"] = span.indices_digest
            optional["order_digest"] = None if order is None else order.order_digest(span)
        self._numbers = StepNumbers(
            loss=_number(loss),
            learning_rate=_number(learning_rate),
            grad_norm=_number(grad_norm),
            span=span,
            optional={name: value for name, value in optional.items() if value is not None},
        )
        if order is None:
            return
        if span is None:
            raise UsageError("run.report needs span=batch.span, since a sampler is tracked: it moves its position.")
        if not order.follows(span):
            self._warn(
                f"Step {self._done + 1} trained on samples [{span.start}, {span.stop}) of epoch {span.epoch}, but the "
                f"tracked sampler stands at {order.position} of epoch {order.epoch}: samples were skipped or "
                "repeated. Iterate the sampler that is tracked."
            )
        promised = optional["order_digest"]
        if promised is not None and span.indices_digest not in (None, promised):
            self._warn(
                f"Step {self._done + 1}: the batch that came with the span [{span.start}, {span.stop}) of epoch "
                f"{span.epoch} holds other samples than the order has there: samples were skipped or repeated. "
                "Look at what lies between the sampler and the dataset."
            )
        order.commit(span)

    def wait(self) -> AbstractContextManager[None]:
        """Say for what part of a step this rank waits for others: `with run.wait(): dist.barrier()`"""
        return self._split.waiting()

    def phase(self, name: Literal["evaluation", "compile"]) -> AbstractContextManager[None]:
        """Say for how long training does something else than steps: `with run.phase("evaluation"): ...`

        Each phase has a limit of its own for how long a rank may be silent, so that neither an evaluation nor a
        compilation is taken for a hang. Enter it on every rank, also on those that only wait for another one. Entering
        counts as progress: an evaluation of many parts enters it once for each. Saving is a phase by itself, and what
        comes before the first finished step is setup. A compilation after the first finished step is part of its step.
        """
        if name not in ("evaluation", "compile"):
            raise UsageError(f"There is no phase {name!r} to enter: say 'evaluation' or 'compile'.")
        if name == "compile" and self._made:
            return nullcontext()
        return self._during(Phase[name.upper()])

    def note(self, kind: str, **fields: Any) -> None:
        """Append a line of the script's own to this rank's log; nothing where there is no log."""
        self._log.write(kind, **fields)

    # --- Resuming -------------------------------------------------------------------------------------------------

    def _choose_parent(self, team: Team, seen: Sequence[Sequence[Held]]) -> None:
        """Rank 0 looks and decides, so that ranks cannot disagree about a directory that changes."""
        choice: tuple[_Start | None, str] = (None, "")
        if team.leads:
            try:
                choice = (self._look_for_parent(seen), "")
            except OSError as err:
                choice = (None, f"{type(err).__name__}: {err}")
        start, problem = team.broadcast(choice)
        if start is None:
            raise UsageError(f"Cannot use checkpoint directory {self.checkpoint_directory}: {problem}.")
        self._parent, self.generation, self._token = start.parent, start.generation, start.token
        self._memory_kept = None if start.in_memory is None or start.parent is None else (start.parent, start.in_memory)
        self._on_disk = start.on_disk
        self._log.generation = self._telemetry.generation = self.generation

    def _look_for_parent(self, seen: Sequence[Sequence[Held]]) -> _Start:
        """`seen`: what of each node's memory may be used."""
        root = self.checkpoint_directory
        in_memory = {
            name: token
            for name, token in memory.whole_snapshots(held for one in seen for held in one).items()
            if (lineage := read_lineage(root, name.generation)) is not None and lineage.token == token
        }
        if self._context.generation is not None:
            parent, generation = self._context.parent, self._context.generation
        else:
            parent = self._context.parent or newest_checkpoint(root, in_memory=in_memory)
            generation = self.generation or newest_generation(root) + 1
        return _Start(
            parent=parent,
            generation=generation,
            token=record_lineage(root, generation, parent=parent).token,
            in_memory=None if parent is None else in_memory.get(parent),
            on_disk=parent is not None and (parent.directory(root) / MANIFEST).exists(),
        )

    def _load_best(self, team: Team, seen: Sequence[Sequence[Held]], name: CheckpointName) -> Loaded:
        """From memory where it is there, else, or where that is not whole, from disk; another step only if alone."""
        if self._memory_kept is None:
            return self._load(team, name, name.directory(self.checkpoint_directory))
        try:
            try:
                directory = assemble(
                    team, seen, self._memory_root, name=name, token=self._memory_kept[1], tracked=self._tracked
                )
                loaded = self._load(team, name, directory)
            finally:
                disband(self._memory_root)
            self._tier = "memory"
            return loaded
        except (CheckpointDamaged, CheckpointMissing) as err:
            if not self._on_disk and self._context.parent is not None:
                raise
            if not self._on_disk:
                self._choose_parent(team, ())
            self._memory_kept = None
            if self._parent is None:
                raise type(err)(
                    f"{err} There is no checkpoint on disk to go on from; to train from the beginning, remove "
                    f"{self._memory_root} and {self.checkpoint_directory}."
                ) from err
            self._warn(f"The snapshot {name} in memory cannot be used: {err} Going on from {self._parent} on disk.")
        return self._load(team, self._parent, self._parent.directory(self.checkpoint_directory))

    def _load(self, team: Team, name: CheckpointName, directory: Path) -> Loaded:
        error: EverstepError | None = None
        try:
            loaded = read_checkpoint(
                directory,
                rank=team.rank,
                world_size=team.world_size,
                tracked=self._tracked,
            )
            put_back(self._tracked, loaded.states)
        except EverstepError as err:
            error = err
        except (ValueError, RuntimeError, KeyError, TypeError) as err:
            error = UsageError(
                f"The state of checkpoint {name} does not fit what the script tracks: {str(err).rstrip('.')}. "
                "Build the same model, optimizer and scheduler as the run that saved it."
            )
            error.__cause__ = err
        problems = team.gather(str(error) if error else "")
        if error is not None:
            raise error
        others = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        if others:
            kind = CheckpointMissing if "no complete checkpoint" in others[0] else CheckpointDamaged
            raise kind(f"Cannot resume from {name}, since another rank cannot: {others[0]}")
        return loaded

    def _warn_of_what_is_left_out(self) -> None:
        for part, consequence in _LEFT_OUT.items():
            if part not in self._declared:
                hint = "" if part == "model" else f", or {part}=None if there is none"
                self._warn(f"The {part} is not tracked: {consequence}. Call run.track({part}=...){hint}.")

    # --- Training -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        assert self._team is not None
        saved = {} if self._loaded is None else self._loaded.digests
        if self._loaded is not None and RNG in self._loaded.states:
            rng.restore(self._loaded.states[RNG])
        elif self.seed is not None:
            rng.seed_all(rng.rank_seed(self.seed, rank=self._team.rank, step=self._done))
        live = take(self._tracked).digests()
        if self._loaded is not None and RNG not in saved:
            live.pop(RNG)  # another world size: there is nothing to compare it with
        self._loaded = None
        self._probes.begin(self._tracked)
        deterministic = self._deterministic
        self._check_lease()
        self._tell(
            "resumed",
            step=self._done,
            total_steps=self.total_steps,
            parent_generation=self._parent.generation if self._parent else None,
            parent_step=self._parent.step if self._parent else None,
            tier=self._tier,
            saved_digest=saved,
            live_digest=live,
            deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        )
        self._interval.begin(self._done)
        self._memory_interval.begin(self._done)
        self._requests.begin(self._team, step=self._done)
        self._saver = Saver(
            SaveSettings(
                root=self.checkpoint_directory,
                job=self._context.job,
                total_steps=self.total_steps,
                parent=self._parent,
                keep=self.keep,
                when_busy=self._when_busy,
                memory=None if self._memory_interval.steps is None else self._memory_settings(),
            ),
            self._team,
        )
        if self._parent is None:
            self._save()

    def _memory_settings(self) -> MemorySettings:
        return MemorySettings(
            root=self._memory_root,
            token=self._token,
            job=self._context.job,
            total_steps=self.total_steps,
            parent=self._parent,
            partner=self._memory_partner,
            keep=self._memory_kept,
        )

    def _finish_step(self, step_time_s: float) -> None:
        numbers = self._numbers or StepNumbers()
        if self._numbers is None and "sampler" in self._tracked:
            raise UsageError(
                f"Step {self._done + 1} ended without run.report(span=batch.span): the tracked sampler did not move."
            )
        self._done += 1
        self._made += 1
        span = numbers.span
        before, self._phase = self._phase, max(self._phase, Phase.STEP)
        self._advance()
        self._tell(
            "step",
            log_fields={"loss_hex": None if numbers.loss is None else numbers.loss.hex()},
            step=self._done,
            loss=numbers.loss,
            learning_rate=numbers.learning_rate,
            grad_norm=numbers.grad_norm,
            epoch=span.epoch if span else 0,
            span_start=span.start if span else None,
            span_stop=span.stop if span else None,
            step_time_s=step_time_s,
            **numbers.optional,
            **self._split.take(step_time_s),
            **self._gauge.read(time.monotonic()),
            probe=self._probes.after_step(self._tracked),
        )
        if self._phase != before:
            self._tell("phase", phase=self._phase.word)
        self._interval.made(step_time_s)
        self._memory_interval.made(step_time_s)
        self._hear_of_saves()
        asked = self._requests.due(self._done)
        to_disk, to_memory = asked or self._interval.due(self._done), self._memory_interval.due(self._done)
        if to_disk or to_memory:
            self._save(to_disk=to_disk, to_memory=to_memory)
        if self._requests.all_end:
            self._save_for_good()
        self._requests.leave_if_told()

    def _finish(self) -> None:
        self._save_for_good()
        self._check_lease()
        assert self._team is not None
        if self._team.broadcast(self._saved_step == self._done):
            memory.forget(self._memory_root)  # the disk has the end
        self._tell("finished", step=self._done)

    def _save(self, *, to_disk: bool = True, to_memory: bool = False) -> None:
        """Begin to save, all ranks together. A failure is told and survived: the next save tries again."""
        assert self._team is not None and self._saver is not None
        started = time.monotonic()
        with self._during(Phase.SAVE), self._split.saving():
            self._hear_of_saves()
            name = CheckpointName(generation=self.generation, step=self._done)
            begun = self._saver.save(name, self._tracked, to_disk=to_disk, to_memory=to_memory)
            self._probes.begin(self._tracked)
        blocked_s = time.monotonic() - started
        if to_disk:
            self._blocked_s = blocked_s
        self._hear_of_saves()
        if begun and to_disk:
            self._interval.saved(self._done, blocked_s=blocked_s)
        if to_memory:
            self._memory_interval.kept(self._done, blocked_s=blocked_s)
            if not self._saver.keeps_in_memory:
                self._memory_interval.stop()
        if self._memory_interval.measures:
            steps = self._memory_interval.best_steps() if self._team.leads else 0
            self._memory_interval.steps = self._team.greatest(steps)[0]
        if self._interval.measures:
            self._interval.steps = self._team.greatest(self._interval.best_steps() if self._team.leads else 0)[0]

    def _save_for_good(self) -> None:
        """Wait for what is under way, and return once the last step is on disk, or could not be brought there."""
        assert self._team is not None and self._saver is not None
        for _ in range(_LAST_ATTEMPTS):
            with self._during(Phase.SAVE):
                self._saver.settle()
            self._hear_of_saves()
            if self._team.broadcast(self._saved_step == self._done):
                return
            self._save()
        with self._during(Phase.SAVE):
            self._saver.settle()
        self._hear_of_saves()

    def _hear_of_saves(self) -> None:
        """Tell what has become of earlier saves."""
        if self._saver is None:
            return
        for news in self._saver.news():
            self._tell_of_save(news)

    def _tell_of_save(self, news: News) -> None:
        name, root = news.name, self.checkpoint_directory
        match news.kind:
            case "saved":
                self._check_lease()
                self._saved_step, self._failures = name.step, 0
                assert self._team is not None
                self._tell(
                    "saved",
                    step=name.step,
                    directory=str(name.directory(root)),
                    size_bytes=news.size_bytes,
                    world_size=self._team.world_size,
                    parent_generation=self._parent.generation if self._parent else None,
                    parent_step=self._parent.step if self._parent else None,
                    save_time_s=news.save_time_s,
                    blocked_s=self._blocked_s,
                )
                if news.note:
                    self._warn(f"Old checkpoints under {root} could not be removed: {news.note}. Watch its free space.")
            case "failed":
                self._failures += 1
                self._tell("save_failed", step=name.step, attempt=self._failures, reason=news.problem)
                self._warn(
                    f"Checkpoint {name} was not saved under {root}: {news.problem}. Training goes on and the next save "
                    "tries again; check space and permissions there."
                )
            case "skipped":
                self._tell("save_skipped", step=name.step, reason=news.problem)
                self._warn(f"Checkpoint {name} was skipped: {news.problem}. Save less often, or to faster storage.")
            case "kept":
                self._memory_interval.written(news.save_time_s)
                self._not_kept_since = ""
                assert self._team is not None
                self._tell(
                    "kept",
                    step=name.step,
                    world_size=self._team.world_size,
                    copy_of=news.copy_of,
                    size_bytes=news.size_bytes,
                    save_time_s=news.save_time_s,
                )
            case "not_kept":
                if news.problem != self._not_kept_since:  # a slow save to disk may cost many in a row
                    self._not_kept_since = news.problem
                    self._tell("not_kept", step=name.step, reason=news.problem)
                    self._warn(
                        f"Snapshot {name} was not kept in memory: {news.problem}. Saves to disk go on as before."
                    )
            case "rehashed":
                self._tell("rehashed", step=name.step, ok=not news.problem, reason=news.problem)
                if news.problem:
                    self._warn(f"Checkpoint {name} is damaged already: {news.problem}")

    def _check_stepped_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """In the first step: does an optimizer that nobody saves move the tracked model?"""
        if "optimizer" not in self._tracked or any(optimizer is target for target in self._tracked.values()):
            return
        parameters = getattr(unwrap(self._tracked.get("model")), "parameters", list)
        mine = {id(parameter) for parameter in parameters()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._warn(
                f"The {type(optimizer).__name__} that steps the tracked model is not the tracked optimizer: its state "
                "is neither saved nor restored. Call run.track(optimizer=...) with the one that is used."
            )

    # --- Phases and the lease ------------------------------------------------------------------------------------

    @contextmanager
    def _during(self, phase: Phase) -> Iterator[None]:
        before = self._phase
        self._begin_phase(phase)
        try:
            yield
        finally:
            self._begin_phase(before)

    def _begin_phase(self, phase: Phase) -> None:
        before, self._phase = self._phase, phase
        self._advance()
        if phase != before:
            self._tell("phase", phase=phase.word)

    def _advance(self) -> None:
        if self._lease is not None:
            self._lease.advance(self._phase, steps=self._made)

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    # --- Telling --------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, *, log_fields: dict[str, Any] | None = None, **fields: Any) -> None:
        if not (self._log.open or self._telemetry.open):
            return
        try:
            encoded = encode_fields(fields)
            for_log = join_fields(encoded, encode_fields(log_fields)) if log_fields else encoded
        except BadDatagram:
            return
        self._log.write_encoded(kind, for_log)
        self._telemetry.send_encoded(kind, encoded)

    def _warn(self, text: str) -> None:
        self._log.write("warning", text=text)
        warnings.warn(text, stacklevel=3)

    def _stop(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._log.write("stop", step=self._done)
        self._telemetry.close()


def _number(value: Any) -> float | None:
    return None if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)
