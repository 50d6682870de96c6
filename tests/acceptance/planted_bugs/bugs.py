"""The ways in which a script resumes wrongly, each as its author would have written it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import everstep
from everstep.checkpoint import rng
from everstep.checkpoint.manifest import CheckpointName
from everstep.data import IndexBatch
from planted_bugs.training import (
    PARENT_STEP,
    SAVE_EVERY,
    Plant,
    Script,
    new_model,
    new_optimizer,
    new_sampler,
    new_scheduler,
)


class OptimizerNotRestored(Plant):
    words = "the optimizer was not restored"

    def after_resume(self, script: Script) -> None:
        script.optimizer.state.clear()


class OtherOptimizerSteps(Plant):
    """The restored one is forgotten: the model is stepped by one that was made after the resume."""

    words = "the model is stepped by another optimizer, which was not restored"

    def after_resume(self, script: Script) -> None:
        rates = script.scheduler.state_dict()
        script.optimizer = new_optimizer(script.model)
        script.scheduler = new_scheduler(script.optimizer)
        script.scheduler.load_state_dict(rates)
        for group, rate in zip(script.optimizer.param_groups, script.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


class SchedulerRestarted(Plant):
    words = "the scheduler was not restored"

    def after_resume(self, script: Script) -> None:
        script.scheduler = new_scheduler(script.optimizer)
        script.track()


class OtherSchedulerSteps(Plant):
    """The schedule starts over, and nobody told the run of the new one."""

    words = "the scheduler was not restored"

    def after_resume(self, script: Script) -> None:
        script.scheduler = new_scheduler(script.optimizer)


class GeneratorsNotRestored(Plant):
    words = "the rng was not restored"

    def before_resume(self, script: Script) -> None:
        mock.patch.object(rng, "restore").start()  # for as long as this rank lives


class GeneratorsSeededAnew(Plant):
    """A helper seeds everything at the start of training, behind the restore: it repeats the dropout of step 1."""

    words = "the random generators (rng) are not where they were before the fault"
    exact_only = True

    def in_step(self, script: Script, number: int) -> None:
        if number == 1:
            torch.manual_seed(self.case.seed)


class LoaderAtEpochStart(Plant):
    words = "the sampler was not restored"

    def after_resume(self, script: Script) -> None:
        script.sampler = new_sampler(self.case)
        script.track()


class OtherLoaderAtEpochStart(Plant):
    """The tracked sampler is restored, the loader iterates one that is not."""

    words = "the loader began an epoch anew"

    def batches(self, script: Script) -> Iterator[IndexBatch]:
        return new_sampler(self.case).stream()


class OneSampleSkipped(Plant):
    """The loader is one sample further than its counter says, from the resume on."""

    words = "the loader skips or repeats samples that its counter does not know of"

    def batches(self, script: Script) -> Iterator[IndexBatch]:
        for batch in script.sampler.stream():
            span = batch.span
            behind = everstep.SampleSpan(epoch=span.epoch, start=span.start + 1, stop=span.stop + 1)
            yield IndexBatch(list(script.sampler.batch(behind)), span)


class OneTensorCorrupted(Plant):
    """A tensor arrives with values of 1e-42 here and there, as a faulty copy leaves it."""

    words = "the model was not restored"

    def after_resume(self, script: Script) -> None:
        with torch.no_grad():
            next(script.model.parameters()).view(-1)[::7] = 1e-42


class StepOffByOne(Plant):
    words = "its step counter is off by one"

    def after_resume(self, script: Script) -> None:
        script.run._done += 1 if self.case.seed % 2 else -1


class OneRankElsewhere(Plant):
    """The last rank finds an older checkpoint than the others do."""

    words = "the rank is at another step"

    def before_resume(self, script: Script) -> None:
        if script.rank != script.case.world_size - 1:
            return
        choose = script.run._choose_parent

        def choose_older(*looked_at: Any) -> None:
            choose(*looked_at)
            script.run._parent = CheckpointName(generation=1, step=PARENT_STEP - SAVE_EVERY)

        mock.patch.object(script.run, "_choose_parent", choose_older).start()


class WeightsFrozen(Plant):
    """The model is made anew and loaded, but the optimizer still holds the parameters of the old one."""

    words = "the weights are frozen"

    def after_resume(self, script: Script) -> None:
        restored = copy.deepcopy(script.run._tracked["model"].state_dict())
        script.model = new_model()
        script.model.load_state_dict(restored)
        script.track()


BUGS: dict[str, type[Plant]] = {
    "optimizer not restored": OptimizerNotRestored,
    "optimizer made anew": OtherOptimizerSteps,
    "scheduler restarted": SchedulerRestarted,
    "scheduler made anew": OtherSchedulerSteps,
    "RNG not restored": GeneratorsNotRestored,
    "RNG seeded anew": GeneratorsSeededAnew,
    "loader at the epoch's start": LoaderAtEpochStart,
    "loader made anew": OtherLoaderAtEpochStart,
    "one sample skipped, counter goes on": OneSampleSkipped,
    "one tensor corrupted": OneTensorCorrupted,
    "step off by one": StepOffByOne,
    "one rank at another step": OneRankElsewhere,
    "weights frozen": WeightsFrozen,
}
