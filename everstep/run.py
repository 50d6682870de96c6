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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from everstep.checkpoint import memory, rng
from everstep.checkpoint.left_overs import unfinished_saves
from everstep.checkpoint.lineage import lineage_token, newest_generation, newest_snapshot, record_lineage
from everstep.checkpoint.manifest import MANIFEST, CheckpointName, Manifest
from everstep.checkpoint.memory import Held
from everstep.checkpoint.memory_load import assemble, disband, look
from everstep.checkpoint.memory_tier import MemorySettings
from everstep.checkpoint.ownership import foreign_owner, not_ours
from everstep.checkpoint.probe import StateProbes
from everstep.checkpoint.reader import Loaded, read_checkpoint
from everstep.checkpoint.retention import KEEP
from everstep.checkpoint.saver import News, Saver, SaveSettings, WhenBusy
from everstep.checkpoint.snapshot import RNG, data_parallel, put_back, take, unwrap
from everstep.checkpoint.trackable import check_trackable
from everstep.context import RunContext
from everstep.data import SampleOrder, SampleSpan
from everstep.elastic.lease import Phase
from everstep.errors import BadDatagram, CheckpointDamaged, CheckpointMissing, EverstepError, UsageError
from everstep.memory_interval import MemoryInterval
from everstep.rank_lease import RankLease
from everstep.rank_log import RankLog
from everstep.ranks import Team
from everstep.save_interval import SaveInterval
from everstep.save_rate import save_rate
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

_REBUILT_FROM = 3
"""Ranks from which on the order of a sum matters: of two numbers it does not."""

_LAST_SAVE_LIMIT_S = 60.0
"""How long a script that ends before its last step waits for a save under way; one that failed ends at once."""

_NO_LOSS = '{"loss_hex":null}'

_LEFT_OUT = {
    "model": "its weights are neither saved nor restored, so that a recovery starts training from scratch",
    "optimizer": "its moments are lost in a recovery; the loss goes on almost unchanged and then drifts",
    "scheduler": "the learning rate starts over in a recovery",
    "sampler": "a recovery repeats samples or skips them",
}


class StepNumbers(NamedTuple):
    """What the script reported about the step in hand. A tuple, since one is made in each step."""

    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    span: SampleSpan | None = None
    optional: Mapping[str, Any] = {}
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
    when_busy: what a save does while the one before it is still being written: "wait" for at most 30 s and skip it
    then, or "skip" at once. Either is told.
    save_bytes_per_s: what all nodes together write to the store at most, so that it sees a stream and no storm; None
    does not limit it. EVERSTEP_SAVE_BYTES_PER_S overrides it.
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
        save_bytes_per_s: float | None = None,
        memory_every: int | Literal["auto"] | None = None,
        memory_partner: bool = False,
    ) -> None:
        for name, value in (("total_steps", total_steps), ("keep", keep)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"Run({name}={value!r}): give a whole number of at least 1.")
        if when_busy not in get_args(WhenBusy):
            raise UsageError(f"Run(when_busy={when_busy!r}): say 'wait' or 'skip'.")
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
        self._warmed_up = False
        self._in_step = False
        """The loop's body is at work on a step, or has left the loop in it."""
        self._begun = self._finished = False
        self._saver: Saver | None = None
        self._when_busy = when_busy
        self._save_bytes_per_s = save_rate(save_bytes_per_s)
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
        self._pid = os.getpid()
        atexit.register(self._stop)
        if seed is not None:
            rng.seed_all(seed)

    @property
    def step(self) -> int:
        """Steps done."""
        return self._done

    @property
    def _promises(self) -> bool:
        """Whether equal state gives equal losses, bit for bit."""
        promised = self._deterministic
        return torch.are_deterministic_algorithms_enabled() if promised is None else promised

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
            if target is None:
                self._tracked.pop(part, None)
            else:
                check_trackable(part, target)
                self._tracked[part] = target
            self._declared.add(part)

    def warm_up(self, forward_backward: Callable[[], object]) -> None:
        """Make a resumed run sum gradients in the same order as one that was never interrupted. Call before `resume`.

        DistributedDataParallel lays its buckets out anew after the first backward pass, so at 3 ranks and more a
        resumed process starts with other sums. `forward_backward` is called twice, with any data; weights, gradients
        and random generators are put back.
        """
        if self._team is not None or "model" not in self._tracked:
            raise UsageError("Call run.warm_up after run.track(model=...) and before run.resume().")
        self._warmed_up = True
        team = Team()
        if team.world_size < _REBUILT_FROM:
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
        self._begun = self._finished = self._in_step = False
        self._warn_of_what_is_left_out(team)
        seen = look(team, self._memory_root)
        self._choose_parent(team, seen)
        if self._parent is not None:
            self._loaded = self._load_best(team, seen, self._parent)
            if self._parent.step > self.total_steps:
                raise UsageError(
                    f"Checkpoint {self._parent} in {self.checkpoint_directory} was taken after step "
                    f"{self._parent.step}, and total_steps is {self.total_steps}: raise it, or use another directory."
                )
            self._warn_of_what_changed(team, self._loaded.manifest)
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
        if self._begun:
            raise UsageError(
                f"run.steps() was iterated before, up to step {self._done} of {self.total_steps}. Iterate it once: "
                "zip(run.steps(), run.batches(loader)) goes on through all epochs."
            )
        self._begin()
        guard: RemovableHandle | None = register_optimizer_step_pre_hook(self._check_stepped_optimizer)
        self._split.watch_optimizers()
        try:
            while self._done < self.total_steps:
                self._numbers = None
                started = time.monotonic()
                self._in_step = True
                yield self._done + 1
                self._in_step = False
                self._finish_step(time.monotonic() - started)
                if guard is not None:
                    guard.remove()
                    guard = None
        finally:
            if guard is not None:
                guard.remove()
            self._split.close()
        self._finish()

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """The source's batches, over and over; how long training waits for each is the step's data time.

        for step, batch in zip(run.steps(), run.batches(loader)): ...

        A source that comes to its end is iterated anew, as the next epoch. Raises `UsageError` if it is empty.
        """
        if not hasattr(source, "__iter__"):
            raise UsageError(f"run.batches cannot iterate a {type(source).__name__}: give it a loader.")
        passes, warned = 0, False
        while True:
            given, iterator = 0, iter(source)
            while True:
                if not self._in_step and not warned:
                    warned = True
                    self._warn(
                        f"A batch is fetched before step {self._done + 1} has begun: what that draws from the random "
                        "generators is drawn again in a recovery. Write zip(run.steps(), run.batches(loader))."
                    )
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
        if not self._in_step:
            raise UsageError("Call run.report within the loop over run.steps(): there is no step to report.")
        if self._numbers is not None:
            raise UsageError(f"Step {self._done + 1} was reported already: call run.report once per step.")
        sampler: Any = self._tracked.get("sampler")
        order: SampleOrder | None = sampler if hasattr(sampler, "commit") else None
        optional: dict[str, Any] = {}
        if parameter_norm is not None:
            optional["parameter_norm"] = _number(parameter_norm)
        if samples is None and span is not None:
            samples = span.count
        if samples is not None:
            optional["samples"] = samples
        if tokens is not None:
            optional["tokens"] = tokens
        promised = None
        if span is not None:
            promised = None if order is None else order.order_digest(span)
            if span.epoch_size is not None:
                optional["epoch_size"] = span.epoch_size
            if span.indices_digest is not None:
                optional["indices_digest"] = span.indices_digest
            if promised is not None:
                optional["order_digest"] = promised
        self._numbers = StepNumbers(_number(loss), _number(learning_rate), _number(grad_norm), span, optional)
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

    def _choose_parent(self, team: Team, seen: Sequence[Sequence[Held]], *, number: int | None = None) -> None:
        """Rank 0 looks and decides, so that ranks cannot disagree about a directory that changes.

        `seen`: what of each node's memory may be used. `number`: of a generation that has one and chooses again.
        """
        choice: tuple[_Start | None, EverstepError | None] = (None, None)
        if team.leads:
            try:
                choice = (self._look_for_parent(seen, number), None)
            except EverstepError as err:
                choice = (None, err)
            except OSError as err:
                what = f"Cannot use checkpoint directory {self.checkpoint_directory}: {type(err).__name__}: {err}."
                choice = (None, UsageError(what))
        start, problem = team.broadcast(choice)
        if problem:
            raise problem
        assert start is not None
        self._parent, self.generation, self._token = start.parent, start.generation, start.token
        self._memory_kept = None if start.in_memory is None or start.parent is None else (start.parent, start.in_memory)
        self._on_disk = start.on_disk
        self._log.generation = self._telemetry.generation = self.generation

    def _warn_of_unfinished_saves(self, parent: CheckpointName | None) -> None:
        names = [str(name) for name in unfinished_saves(self.checkpoint_directory, after=parent)]
        if names:
            goes_on = f"goes on from checkpoint {parent}" if parent else "starts from the beginning"
            self._warn(
                f"The save of {', '.join(names[-3:])} under {self.checkpoint_directory} was never finished: it does "
                f"not count, and training {goes_on}."
            )

    def _look_for_parent(self, seen: Sequence[Sequence[Held]], number: int | None) -> _Start:
        root = self.checkpoint_directory
        in_memory = {
            name: token
            for name, token in memory.whole_snapshots(held for one in seen for held in one).items()
            if lineage_token(root, name.generation) == token
        }
        if self._context.generation is not None:
            parent, generation = self._context.parent, self._context.generation
            other = "" if parent else foreign_owner(root, self._context.job)
            if other:
                raise UsageError(
                    f"Cannot use checkpoint directory {root}: it holds checkpoints of job {other}, and this job, "
                    f"{self._context.job}, starts from the beginning. Give each job a directory of its own."
                )
        else:
            parent = self._context.parent or newest_snapshot(root, in_memory)
            generation = number or newest_generation(root) + 1
        self._warn_of_unfinished_saves(parent)
        return _Start(
            parent=parent,
            generation=generation,
            token=record_lineage(root, generation, parent=parent),
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
                self._choose_parent(team, (), number=self.generation)
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
            if self._context.generation is not None and (problem := not_ours(loaded.manifest, self._context.job)):
                raise UsageError(problem)
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

    def _warn_of_what_is_left_out(self, team: Team) -> None:
        for part, consequence in _LEFT_OUT.items():
            if part not in self._declared:
                hint = "" if part == "model" else f", or {part}=None if there is none"
                self._warn(f"The {part} is not tracked: {consequence}. Call run.track({part}=...){hint}.")
        wrapped = any(data_parallel(target) is not None for target in self._tracked.values())
        if team.world_size >= _REBUILT_FROM and wrapped and self._promises and not self._warmed_up:
            self._warn(
                f"With {team.world_size} ranks, DistributedDataParallel sums gradients in another order after a resume "
                "than in a run that went through, so losses differ in their last bits. Call run.warm_up before "
                "run.resume."
            )

    def _warn_of_what_changed(self, team: Team, saved: Manifest) -> None:
        """What a checkpoint was saved with, where another thing now means that no bits can be promised."""
        if saved.world_size != team.world_size and team.leads:
            self._warn(
                f"Checkpoint {saved.name} was saved by {saved.world_size} ranks and is resumed with {team.world_size}: "
                "the random generators cannot be mapped and begin anew, so dropout and the like draw other numbers."
            )
        if saved.torch_version != torch.__version__ and team.leads:
            self._warn(
                f"Checkpoint {saved.name} was saved with torch {saved.torch_version} and is resumed with "
                f"{torch.__version__}: losses may differ in their last bits."
            )
        if saved.job != self._context.job and team.leads:
            self._warn(
                f"Checkpoint {saved.name} is one of job {saved.job}: this run goes on from it and saves beside it as "
                f"generation {self.generation}. If that job is still wanted, give this run a directory of its own."
            )

    # --- Training -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        assert self._team is not None
        self._begun = True
        if self._saver is not None:
            self._saver.close()
        saved = {} if self._loaded is None else self._loaded.digests
        if self._loaded is not None and RNG in self._loaded.states:
            rng.restore(self._loaded.states[RNG])
        elif self.seed is not None:
            rng.seed_all(rng.rank_seed(self.seed, rank=self._team.rank, step=self._done))
        snapshot = take(self._tracked)
        live = snapshot.digests()
        if self._loaded is not None and RNG not in saved:
            live.pop(RNG)  # another world size: there is nothing to compare it with
        self._loaded = None
        self._probes.begin(self._tracked)
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
            deterministic=self._promises,
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
                bytes_per_s=self._save_bytes_per_s,
                memory=None if self._memory_interval.steps is None else self._memory_settings(),
                look_at_lease=self._lease.check if self._lease else None,
            ),
            self._team,
        )
        here = CheckpointName(generation=self.generation, step=self._done)
        self._saver.test_storage(here, size_bytes=sum(tensor.nbytes for tensor in snapshot.tensors.values()))
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
        before = self._phase
        if before < Phase.STEP:
            self._phase = Phase.STEP
        self._advance()
        self._tell_step(numbers, step_time_s)
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
        """Not finished before the last step is on disk: a job that ends without its result has not succeeded."""
        self._finished = True
        saved = self._save_for_good()
        self._check_lease()
        if saved:
            memory.forget(self._memory_root)
            self._tell("finished", step=self._done)
        else:
            self._warn(
                f"Step {self._done}, the last one, could not be saved under {self.checkpoint_directory}: this run does "
                "not count as finished. Once there is room, start it again: it goes on from its last checkpoint."
            )

    def _save(self, *, to_disk: bool = True, to_memory: bool = False) -> None:
        """Begin to save, all ranks together. A failure is told and survived: the next save tries again."""
        assert self._team is not None and self._saver is not None
        started = time.monotonic()
        with self._during(Phase.SAVE), self._split.saving():
            self._hear_of_saves()
            name = CheckpointName(generation=self.generation, step=self._done)
            self._saver.save(name, self._tracked, to_disk=to_disk, to_memory=to_memory, look=self._probes.begin_with)
        blocked_s = time.monotonic() - started
        if to_disk:
            self._blocked_s = blocked_s
        self._hear_of_saves()
        if to_disk:
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

    def _save_for_good(self) -> bool:
        """Wait for what is under way, and return whether the last step is on disk, or could not be brought there."""
        assert self._team is not None and self._saver is not None
        with self._during(Phase.SAVE):
            for attempts_left in reversed(range(_LAST_ATTEMPTS + 1)):
                self._saver.settle()
                self._hear_of_saves()
                saved = self._team.broadcast(self._saved_step == self._done)
                if saved or not attempts_left:
                    break
                self._save()
        return saved

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
                self._tell_failure(name, news.problem)
                self._warn(
                    f"Checkpoint {name} was not saved under {root}: {news.problem}. Training goes on and the next save "
                    "tries again; check space and permissions there."
                )
            case "unwritable":
                self._tell_failure(
                    name, f"the write test of this node failed, whatever its free space says: {news.problem}"
                )
                self._warn(
                    f"This node cannot write checkpoints under {root}: {news.problem}. A file was written there as a "
                    "test, so this counts whatever the free space says. Training goes on; look for a full target, a "
                    "quota or a read-only mount before the next save."
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

    def _tell_failure(self, name: CheckpointName, problem: str) -> None:
        self._failures += 1
        self._tell("save_failed", step=name.step, attempt=self._failures, reason=problem)

    def _check_stepped_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """In the first step: does an optimizer that nobody saves move the tracked model?"""
        steppers = (
            stepper for target in self._tracked.values() for stepper in (target, getattr(target, "optim", None))
        )
        if "optimizer" not in self._tracked or any(optimizer is stepper for stepper in steppers):
            return  # a ZeroRedundancyOptimizer steps another one, its `optim`
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

    def _tell_step(self, numbers: StepNumbers, step_time_s: float) -> None:
        """Every step pays for this: it is counted in microseconds by benchmarks/step_overhead.py."""
        span, loss = numbers.span, numbers.loss
        fields: dict[str, Any] = {
            "step": self._done,
            "loss": loss,
            "learning_rate": numbers.learning_rate,
            "grad_norm": numbers.grad_norm,
            "step_time_s": step_time_s,
            **numbers.optional,
        }
        fields["epoch"], fields["span_start"], fields["span_stop"] = (
            (0, None, None) if span is None else (span.epoch, span.start, span.stop)
        )
        self._split.take(step_time_s, into=fields)
        self._gauge.read(time.monotonic(), into=fields)
        if (probe := self._probes.after_step(self._tracked)) is not None:
            fields["probe"] = probe
        self._tell_fields("step", fields, log_only=_NO_LOSS if loss is None else f'{{"loss_hex":"{loss.hex()}"}}')

    def _tell(self, kind: str, **fields: Any) -> None:
        self._tell_fields(kind, fields)

    def _tell_fields(self, kind: str, fields: dict[str, Any], *, log_only: str = "{}") -> None:
        """To log and agent; `log_only` is a JSON object of what the agent does not need."""
        if not (self._log.open or self._telemetry.open):
            return
        try:
            encoded = encode_fields(fields)
        except BadDatagram:
            return
        self._log.write_encoded(kind, join_fields(encoded, log_only))
        self._telemetry.send_encoded(kind, encoded)

    def _warn(self, text: str) -> None:
        self._log.write("warning", text=text)
        warnings.warn(text, stacklevel=3)

    def _stop(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child ends, and the rank goes on
        if self._saver is not None:
            failed = getattr(sys, "last_value", None) is not None
            self._saver.close(limit_s=0.0 if failed else _LAST_SAVE_LIMIT_S)
            self._hear_of_saves()
            if self._made and not (self._finished or failed or self._requests.all_end):
                self._warn(
                    f"This script ends after step {self._done} of {self.total_steps}: the run is not finished, and "
                    "what came after the last checkpoint is lost. Iterate run.steps() to its end."
                )
            self._saver = None
        self._log.write("stop", step=self._done)
        self._telemetry.close()


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    return None if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)
