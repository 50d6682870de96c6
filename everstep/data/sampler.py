"""`ReplayableSampler`: the order of map-style data, and the exact position in it. No torch here.

The order of an epoch is a pure function of (seed, epoch, position), the same on each machine and for each world size.
The sampler's saved position moves only when `Run` commits the span that travelled with a batch through the training
step, so a loader may fetch ahead as far as it likes without the position running ahead of training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from numbers import Integral
from typing import Any

from everstep.data.order import permute
from everstep.data.span import IndexBatch, SampleSpan, indices_digest
from everstep.errors import UsageError

_REMEMBERED = 4096
"""Batches handed out and not yet trained on whose checksums are kept; more are computed anew."""


class ReplayableSampler:
    """Yields this rank's dataset indices, batch by batch, from a position that a checkpoint restores exactly.

    size: samples in the dataset. global_batch_size: samples per step over all ranks. rank and world_size default to
    torch elastic's environment, else to a single process.
    uneven: True allows a global batch that is no multiple of the world size, so that a job can go on with any number of
    ranks: some then get one sample more than others, and the script must multiply each rank's mean loss by
    `batch.span.weight`. Otherwise such a batch is refused, since gradients would be averaged wrongly.
    drop_last: True ends the epoch before an incomplete batch (those samples wait for another epoch's order); False
    yields it, cut as evenly as possible, so that a rank may get one sample less than another, or none: weight the loss.

    Each global batch is the next `global_batch_size` positions of the epoch's order; rank r of w takes the contiguous
    part from count * r // w to count * (r + 1) // w of it. So the global order depends on neither world size nor ranks.

    Iterating it yields the rest of the current epoch as `IndexBatch`; `stream()` goes on through epochs for ever. Both
    start at the committed position. `replayable_loader` makes a torch DataLoader of it.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        uneven: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.size = size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.uneven = uneven
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self._epoch = 0
        self._next = 0
        self._promised: dict[tuple[int, int, int], str] = {}
        self._check()

    def _check(self) -> None:
        for name, value in (("size", self.size), ("global_batch_size", self.global_batch_size)):
            if not isinstance(value, Integral):
                kind = type(value).__name__
                raise UsageError(f"ReplayableSampler({name}=...) is a {kind}: give a number of samples.")
        if self.size < 1 or self.global_batch_size < 1:
            raise UsageError(
                f"Cannot sample batches of {self.global_batch_size} from {self.size} samples: both must be at least 1."
            )
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"Rank {self.rank} is not one of a world of {self.world_size}.")
        if self.global_batch_size < self.world_size:
            raise UsageError(
                f"A global batch of {self.global_batch_size} cannot be split over {self.world_size} ranks: "
                "some would never have a sample. Choose at least one sample per rank."
            )
        if self.global_batch_size % self.world_size and not self.uneven:
            raise UsageError(
                f"A global batch of {self.global_batch_size} cannot be split evenly over {self.world_size} ranks: "
                "choose a multiple of the world size, or say uneven=True and multiply each rank's mean loss by "
                "batch.span.weight."
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
            yield self.batch(self._span(epoch, position, stop))
            position = stop

    def _span(self, epoch: int, start: int, stop: int) -> SampleSpan:
        return SampleSpan(epoch=epoch, start=start, stop=stop, epoch_size=self.epoch_size, world_size=self.world_size)

    def batch(self, span: SampleSpan) -> IndexBatch:
        """This rank's share of a span: a contiguous cut, as even as it can be."""
        batch = IndexBatch(self._share(span), span)
        if len(self._promised) >= _REMEMBERED:
            self._promised.pop(next(iter(self._promised)))
        self._promised[_place(span)] = batch.span.indices_digest or ""
        return batch

    def order_digest(self, span: SampleSpan) -> str | None:
        """`indices_digest` of what the order says that this rank's part of the span holds.

        A batch whose own digest is another one holds other samples than its span claims.
        """
        promised = self._promised.get(_place(span))
        return indices_digest(self._share(span)) if promised is None else promised

    def _share(self, span: SampleSpan) -> list[int]:
        count = span.stop - span.start
        first = span.start + count * self.rank // self.world_size
        last = span.start + count * (self.rank + 1) // self.world_size
        return [self.dataset_index(span.epoch, position) for position in range(first, last)]

    def dataset_index(self, epoch: int, position: int) -> int:
        """The sample at `position` of an epoch's order."""
        return permute(position, size=self.size, seed=self.seed, epoch=epoch) if self.shuffle else position

    def commit(self, span: SampleSpan) -> None:
        """The span has been trained on: the next batch is the one behind it. `Run` calls this with each step."""
        self._promised.pop(_place(span), None)
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


def _place(span: SampleSpan) -> tuple[int, int, int]:
    """What a span is known by; each step looks it up, and a tuple's hash costs a fifth of a dataclass's."""
    return span.epoch, span.start, span.stop
