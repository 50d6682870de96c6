"""Torch loaders of map-style data whose batches carry their span: `replayable_loader`, and the parts it is made of.

A training script calls it with its dataset and a `ReplayableSampler`; workers, prefetching and persistent workers are
the loader's own affair, since the sampler's position moves with what was trained and not with what was fetched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.data.order import MASK_64, mix
from everstep.data.sampler import ReplayableSampler
from everstep.data.span import IndexBatch, SampleSpan
from everstep.errors import UsageError


@dataclass(frozen=True)
class SpannedBatch:
    """A collated batch with the span of what it holds."""

    data: Any
    span: SampleSpan

    def pin_memory(self) -> SpannedBatch:
        """Called by a loader with `pin_memory=True`."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, data=pin_memory(self.data))  # type: ignore[no-untyped-call]


class SpannedDataset:
    """Wraps a map-style dataset so that a DataLoader's batches carry their span: collate gets (span, [samples]).

    Torch's fetcher hands the whole index batch to `__getitems__` where a dataset has one, also in worker processes. The
    span's checksum is taken there, over the indices that are really fetched.
    sample_seed: seeds Python's, NumPy's and torch's generators before each sample from (seed, epoch, index), so that
    random augmentation is the same for each number of workers and after each resume; None leaves them alone.
    """

    def __init__(self, dataset: Any, *, sample_seed: int | None = None) -> None:
        self.dataset = dataset
        self.sample_seed = sample_seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: IndexBatch) -> tuple[SampleSpan, list[Any]]:
        span = batch.span
        if self.sample_seed is None:
            return span, self._fetch(batch)
        with _GeneratorsKept() as generators:
            samples = []
            for index in batch:
                generators.seed(mix(mix(self.sample_seed & MASK_64) ^ mix(span.epoch) ^ index))
                samples.append(self.dataset[index])
        return span, samples

    def _fetch(self, batch: Sequence[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(list(batch)))
        return [self.dataset[index] for index in batch]


class StatefulSpannedDataset(SpannedDataset):
    """The same for a dataset with a state of its own, which torchdata's StatefulDataLoader saves."""

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class _GeneratorsKept:
    """Puts the process's generators back at the end: without workers they are those that training draws from."""

    def __enter__(self) -> _GeneratorsKept:
        import numpy as np
        import torch

        self._python, self._torch, self._numpy = random, torch.default_generator, np.random
        self._before = (random.getstate(), self._torch.get_state(), np.random.get_state())
        return self

    def seed(self, value: int) -> None:
        self._python.seed(value)
        self._torch.manual_seed(value)
        self._numpy.seed(value & 0xFFFFFFFF)

    def __exit__(self, *_: object) -> None:
        python, torch_state, numpy_state = self._before
        self._python.setstate(python)
        self._torch.set_state(torch_state)
        self._numpy.set_state(numpy_state)


class SpannedCollate:
    """Collates the samples and keeps the span beside them."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate

    def __call__(self, spanned: tuple[SampleSpan, list[Any]]) -> SpannedBatch:
        span, samples = spanned
        if self._collate is not None:
            return SpannedBatch(self._collate(samples), span)
        from torch.utils.data import default_collate

        return SpannedBatch(default_collate(samples) if samples else samples, span)


class EveryEpoch:
    """The batch sampler of a loader that goes on through epochs for ever, from the sampler's committed position.

    Its position is saved with the sampler alone: a loader that saves and restores its batch sampler changes nothing.
    """

    def __init__(self, sampler: ReplayableSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[IndexBatch]:
        return self._sampler.stream()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The sampler has its position already, from the checkpoint's own part."""


def replayable_loader(
    dataset: Any,
    sampler: ReplayableSampler,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_class: Any = None,
    sample_seed: int | None = None,
    **options: Any,
) -> Any:
    """A DataLoader that yields `SpannedBatch` for ever, epoch after epoch, from the sampler's committed position.

    collate_fn: gets the list of samples, by default torch's; it is empty where a rank has no part of an uneven tail.
    loader_class: torch's DataLoader, or torchdata's StatefulDataLoader, which `StatefulBatches` then wraps.
    sample_seed: see `SpannedDataset`. options: the loader's own, such as num_workers, prefetch_factor, pin_memory and
    persistent_workers. It gets a generator of its own, since a loader draws from torch's global one whenever it is
    iterated, and a resumed run does that at another step than one that was never interrupted.
    Make it, and iterate it, after `run.resume()`: the position is read when iteration begins.
    """
    import torch
    from torch.utils.data import DataLoader

    _check_loader(dataset, sampler, options)
    stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    spanned: Any = (StatefulSpannedDataset if stateful else SpannedDataset)(dataset, sample_seed=sample_seed)
    collate: Any = SpannedCollate(collate_fn)
    options.setdefault("generator", torch.Generator().manual_seed(sampler.seed & (MASK_64 >> 1)))
    return (loader_class or DataLoader)(spanned, batch_sampler=EveryEpoch(sampler), collate_fn=collate, **options)


_DECIDED = frozenset({"batch_size", "shuffle", "batch_sampler", "drop_last"})
"""Options of a DataLoader that the sampler decides."""


def _check_loader(dataset: Any, sampler: Any, options: Mapping[str, Any]) -> None:
    """Raises `UsageError` for what torch would refuse less clearly, or only in a worker."""
    if not isinstance(sampler, ReplayableSampler):
        raise UsageError(f"replayable_loader needs a ReplayableSampler, not a {type(sampler).__name__}.")
    if twice := sorted(_DECIDED & options.keys()):
        raise UsageError(
            f"replayable_loader({twice[0]}=...): the sampler decides that. Say it to the ReplayableSampler."
        )
    if hasattr(dataset, "__len__") and len(dataset) < sampler.size:
        raise UsageError(
            f"The dataset has {len(dataset)} samples, and its sampler was made for {sampler.size}: "
            "make it by ReplayableSampler(len(dataset), ...)."
        )
