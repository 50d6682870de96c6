"""Data whose order can be replayed: `ReplayableSampler` and what belongs to it. No torch here.

The order of an epoch is a pure function of (seed, epoch, position), the same on each machine and for each world size.
The sampler's saved position moves only when `Run` commits the span that travelled with a batch through the training
step, so a loader may fetch ahead as far as it likes without the position running ahead of training.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.errors import UsageError

_MASK_64 = (1 << 64) - 1
_ROUNDS = 6
"""Rounds of the Feistel network; four are enough for a pseudo-random permutation, two more cost a microsecond."""


@dataclass(frozen=True, kw_only=True)
class SampleSpan:
    """Positions [start, stop) of one epoch's order that one global batch covers, over all ranks."""

    epoch: int
    start: int
    stop: int


class IndexBatch(list[int]):
    """One rank's dataset indices of one step, with the global span that they are part of."""

    span: SampleSpan

    def __init__(self, indices: Sequence[int], span: SampleSpan) -> None:
        super().__init__(indices)
        self.span = span

    def __reduce__(self) -> tuple[Any, ...]:
        return (IndexBatch, (list(self), self.span))


def mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def permute(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Where `position` of the epoch's order lies in a dataset of `size` samples: a permutation of range(size).

    A Feistel network over the smallest even number of bits that holds `size`, walked until it falls inside (fewer than
    four rounds on average). Integers only, so that each platform gets the same order.
    """
    if not 0 <= position < size:
        raise UsageError(f"Position {position} is outside of a dataset of {size} samples.")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half) - 1
    keys = _round_keys(seed, epoch)
    value = position
    while True:
        left, right = value >> half, value & half_mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & half_mask)
        value = (left << half) | right
        if value < size:
            return value


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    epoch_key = mix(mix(seed & _MASK_64) ^ (epoch & _MASK_64))
    return tuple(mix(epoch_key ^ number) for number in range(_ROUNDS))


class ReplayableSampler:
    """Yields this rank's dataset indices, batch by batch, from a position that a checkpoint restores exactly.

    size: samples in the dataset. global_batch_size: samples per step over all ranks; must be a multiple of the world
    size. rank and world_size default to torch elastic's environment, else to a single process.
    drop_last: True ends the epoch before an incomplete batch (those samples wait for another epoch's order); False
    yields it, cut as evenly as possible, so that a rank may get one sample less than another, or none.

    Iterating it yields the rest of the current epoch as `IndexBatch`; `stream()` goes on through epochs for ever. Both
    start at the committed position. It can be the `batch_sampler` of a torch DataLoader: wrap the dataset in
    `SpannedDataset`, and give the loader a `generator` of its own, since it draws from torch's global one at the start
    of each iteration and a resumed run starts in mid-epoch.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.size = size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self._epoch = 0
        self._next = 0
        self._check()

    def _check(self) -> None:
        if self.size < 1 or self.global_batch_size < 1:
            raise UsageError(
                f"Cannot sample batches of {self.global_batch_size} from {self.size} samples: both must be at least 1."
            )
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"Rank {self.rank} is not one of a world of {self.world_size}.")
        if self.global_batch_size % self.world_size:
            raise UsageError(
                f"A global batch of {self.global_batch_size} cannot be split over {self.world_size} ranks: "
                "choose a multiple of the world size."
            )
        if self.drop_last and self.size < self.global_batch_size:
            raise UsageError(
                f"A dataset of {self.size} samples holds no batch of {self.global_batch_size}: "
                "choose a smaller batch, or drop_last=False."
            )

    @property
    def epoch(self) -> int:
        """Epoch of the next sample to be trained on."""
        return self._epoch

    @property
    def position(self) -> int:
        """Position in the epoch's order of the next sample to be trained on."""
        return self._next

    @property
    def epoch_size(self) -> int:
        """Samples of one epoch that are trained on."""
        return self.size - self.size % self.global_batch_size if self.drop_last else self.size

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return -(-self.epoch_size // self.global_batch_size)

    def __iter__(self) -> Iterator[IndexBatch]:
        """The rest of the current epoch. Moves nothing: `commit` does."""
        return self._batches(self._epoch, self._next)

    def stream(self) -> Iterator[IndexBatch]:
        """Batches for ever, from the committed position through this epoch and all that follow."""
        epoch, position = self._epoch, self._next
        while True:
            yield from self._batches(epoch, position)
            epoch, position = epoch + 1, 0

    def _batches(self, epoch: int, position: int) -> Iterator[IndexBatch]:
        while position < self.epoch_size:
            stop = min(position + self.global_batch_size, self.epoch_size)
            yield self.batch(SampleSpan(epoch=epoch, start=position, stop=stop))
            position = stop

    def batch(self, span: SampleSpan) -> IndexBatch:
        """This rank's share of a span: a contiguous cut, as even as it can be."""
        count = span.stop - span.start
        first = span.start + count * self.rank // self.world_size
        last = span.start + count * (self.rank + 1) // self.world_size
        return IndexBatch([self.dataset_index(span.epoch, position) for position in range(first, last)], span)

    def dataset_index(self, epoch: int, position: int) -> int:
        """The sample at `position` of an epoch's order."""
        return permute(position, size=self.size, seed=self.seed, epoch=epoch) if self.shuffle else position

    def commit(self, span: SampleSpan) -> None:
        """The span has been trained on: the next batch is the one behind it. `Run` calls this with each step."""
        if span.stop >= self.epoch_size:
            self._epoch, self._next = span.epoch + 1, 0
        else:
            self._epoch, self._next = span.epoch, span.stop

    def follows(self, span: SampleSpan) -> bool:
        """Whether the span starts exactly where training stands: nothing skipped, nothing repeated."""
        return (span.epoch, span.start) == (self._epoch, self._next)

    def state_dict(self) -> dict[str, Any]:
        """Position and what gives it its meaning; the same on each rank, and for each world size."""
        return {**self._identity(), "epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved position over. Raises `UsageError` when this sampler would give it another meaning."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise UsageError(
                    f"Cannot restore the sampler: the checkpoint was made with {name}={state.get(name)!r}, "
                    f"this one has {name}={mine!r}. Build the sampler with the same arguments."
                )
        self._epoch, self._next = int(state["epoch"]), int(state["next"])

    def _identity(self) -> dict[str, Any]:
        return {
            "order": "feistel-splitmix64-1",
            "size": self.size,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }


class SpannedDataset:
    """Wraps a map-style dataset so that a DataLoader's batches carry their span: collate gets (span, [samples]).

    Torch's fetcher hands the whole index batch to `__getitems__` where a dataset has one, also in worker processes.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: IndexBatch) -> tuple[SampleSpan, list[Any]]:
        return batch.span, [self.dataset[index] for index in batch]
