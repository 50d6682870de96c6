"""`ReplayableStream`: samples that can only be read one after the other, with an exact position all the same.

A training script wraps its iterable dataset in one, gives it to a DataLoader with `batch_size=None`, and tracks it as
the sampler. Each rank and each worker reads the same stream and keeps its own part of each global batch, by the
sample's place in the stream. So the order of global batches depends on neither ranks nor workers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from everstep.data.loader import SpannedBatch
from everstep.data.span import SampleSpan, indices_digest
from everstep.errors import UsageError


class ReplayableStream(IterableDataset[SpannedBatch]):
    """Yields this rank's part of each global batch of `dataset` as `SpannedBatch`, epoch after epoch, for ever.

    dataset: iterated once per epoch; it must give the same samples in the same order whenever the same epoch is
    iterated, on each rank and in each worker. If it has `set_epoch`, that is called before each iteration.
    global_batch_size: samples per step over all ranks; sample n of a global batch belongs to rank n % world_size.
    drop_last: True ends the epoch before an incomplete batch; False yields it, and a rank may then have fewer samples
    than another, or none. uneven: as for `ReplayableSampler`. Both need `batch.span.weight`.
    size: samples of an epoch where that is known; a stream that ends elsewhere is then an error.
    collate: gets the list of samples, by default torch's `default_collate`.
    identify: a sample's own number, if it has one. The checksums that are reported are then made of these, so that a
    source which loses a sample is seen; otherwise they are made of the places that were counted here.

    How a resumed run gets to its position, and how a worker passes what is not its own:
    - the iterator has `seek(position)`: by that, at once. With `size` known, what belongs to others is not read at all.
    - the iterator or else the dataset has `state_dict` and `load_state_dict`: that state travels with each batch, is
      saved with the position, and is loaded. It must hold tensors, numbers, strings, lists and dicts only.
    - otherwise by reading and discarding: exact, but as slow as reading.
    Without `seek` each of n workers of each rank reads the whole stream, so workers help where decoding is the cost
    (do it in `collate`), not where reading is.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        drop_last: bool = True,
        uneven: bool = False,
        size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        identify: Callable[[Any], int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.drop_last = drop_last
        self.size = size
        self.collate = collate
        self.identify = identify
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self._epoch = 0
        self._next = 0
        self._source_state: Any = None
        if not hasattr(dataset, "__iter__"):
            raise UsageError(
                f"ReplayableStream cannot iterate a {type(dataset).__name__}: give it an iterable dataset. "
                "For one that is indexed there is ReplayableSampler."
            )
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"Rank {self.rank} is not one of a world of {self.world_size}.")
        if global_batch_size < self.world_size or (global_batch_size % self.world_size and not uneven):
            raise UsageError(
                f"A global batch of {global_batch_size} cannot be split evenly over {self.world_size} ranks: choose a "
                "multiple of the world size, or, with at least one sample per rank, say uneven=True and multiply each "
                "rank's mean loss by batch.span.weight."
            )

    @property
    def epoch(self) -> int:
        """Epoch of the next sample to be trained on, unless the stream ends before it."""
        return self._epoch

    @property
    def position(self) -> int:
        """Place in the epoch's stream of the next sample to be trained on."""
        return self._next

    @property
    def epoch_size(self) -> int | None:
        """Samples of one epoch that are trained on; None: not known."""
        if self.size is None or not self.drop_last:
            return self.size
        return self.size - self.size % self.global_batch_size

    def __iter__(self) -> StreamIterator:
        """From the committed position, on through epochs for ever. Moves nothing: `commit` does."""
        worker = get_worker_info()
        number, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return StreamIterator(
            self, epoch=self._epoch, position=self._next, source_state=self._source_state, worker=number, workers=of
        )

    def commit(self, span: SampleSpan) -> None:
        """The span has been trained on: the next batch is the one behind it. `Run` calls this with each step."""
        self._source_state = span.source_state
        if self.epoch_size is not None and span.stop >= self.epoch_size:
            self._epoch, self._next, self._source_state = span.epoch + 1, 0, None
        else:
            self._epoch, self._next = span.epoch, span.stop

    def follows(self, span: SampleSpan) -> bool:
        """Whether the span starts where training stands, or at the next epoch where this one's end is not known."""
        begins_next = self.epoch_size is None and (span.epoch, span.start) == (self._epoch + 1, 0) and self._next > 0
        return begins_next or (span.epoch, span.start) == (self._epoch, self._next)

    def order_digest(self, span: SampleSpan) -> str | None:
        """None: only the stream itself knows which samples lie where."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Position and what gives it its meaning; the same on each rank, and for each world size."""
        return {**self._identity(), "epoch": self._epoch, "next": self._next, "source": self._source_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved position over. Raises `UsageError` when this stream would give it another meaning."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise UsageError(
                    f"Cannot restore the stream: the checkpoint was made with {name}={state.get(name)!r}, "
                    f"this one has {name}={mine!r}. Build it with the same arguments."
                )
        self._epoch, self._next = int(state["epoch"]), int(state["next"])
        self._source_state = state["source"]

    def _identity(self) -> dict[str, Any]:
        return {
            "order": "stream-1",
            "global_batch_size": self.global_batch_size,
            "drop_last": self.drop_last,
            "size": self.size,
        }


class StreamIterator(Iterator[SpannedBatch]):
    """One worker's way through the stream. It makes each `workers`-th batch, as a DataLoader asks its workers in turn.

    torchdata's StatefulDataLoader saves and restores it through `state_dict` and `load_state_dict`.
    """

    def __init__(
        self, stream: ReplayableStream, *, epoch: int, position: int, source_state: Any, worker: int, workers: int
    ) -> None:
        self._stream = stream
        self._epoch = epoch
        self._position = position
        self._worker = worker
        self._workers = workers
        self._number = 0
        """Batches passed since this iteration began, over all workers."""
        self._source_state = source_state
        self._source: Any = None
        self._read = 0
        """Place of the source's next sample."""

    def __next__(self) -> SpannedBatch:
        while True:
            mine = self._number % self._workers == self._worker
            start, places, samples = self._position, list[int](), list[Any]()
            stop = self._take(start, places, samples, mine=mine)
            incomplete = stop - start < self._stream.global_batch_size
            if stop == start or (incomplete and self._stream.drop_last):
                self._next_epoch(start)
                continue
            self._number += 1
            self._position = stop
            self._source_state = self._state_of_source()
            if mine:
                return self._batch(start, stop, places, samples)

    def _take(self, start: int, places: list[int], samples: list[Any], *, mine: bool) -> int:
        """Read one global batch, keep this rank's samples of it, and return where it ended."""
        stream = self._stream
        self._open()
        stop = start + stream.global_batch_size
        seekable = stream.size is not None and hasattr(self._source, "seek")
        if seekable:
            stop = min(stop, stream.size or 0)
        for place in range(start, stop):
            kept = mine and (place - start) % stream.world_size == stream.rank
            if seekable and not kept:
                continue
            if seekable and place != self._read:
                self._source.seek(place)
            try:
                sample = next(self._source)
            except StopIteration:
                self._check_end(place)
                return place
            self._read = place + 1
            if kept:
                places.append(place)
                samples.append(sample)
        return stop

    def _batch(self, start: int, stop: int, places: list[int], samples: list[Any]) -> SpannedBatch:
        stream = self._stream
        numbers = places if stream.identify is None else [stream.identify(sample) for sample in samples]
        collate = stream.collate or (default_collate if samples else list)
        span = SampleSpan(
            epoch=self._epoch,
            start=start,
            stop=stop,
            epoch_size=stream.epoch_size,
            count=len(samples),
            world_size=stream.world_size,
            indices_digest=indices_digest(numbers),
            source_state=self._source_state,
        )
        return SpannedBatch(collate(samples), span)

    def _next_epoch(self, ended_at: int) -> None:
        if ended_at == 0:
            raise UsageError(
                f"Epoch {self._epoch} of the stream holds no global batch of {self._stream.global_batch_size} samples: "
                "give it more samples, a smaller batch, or drop_last=False."
            )
        self._epoch, self._position, self._source_state, self._source = self._epoch + 1, 0, None, None

    def _check_end(self, place: int) -> None:
        size = self._stream.size
        if size is not None and place != size:
            raise UsageError(
                f"Epoch {self._epoch} of the stream ended after {place} samples, but size={size} was said: "
                "samples would be skipped or repeated. Find out why, or say the right size."
            )

    def _open(self) -> None:
        """Begin to read where this iterator stands, by the fastest way that the source offers."""
        if self._source is not None:
            return
        dataset = self._stream.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._epoch)
        restores = hasattr(dataset, "load_state_dict")
        source = iter(dataset)
        if self._position and hasattr(source, "seek"):
            source.seek(self._position)
        elif self._source_state is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(copy.deepcopy(self._source_state))
        elif self._source_state is not None and restores:
            dataset.load_state_dict(copy.deepcopy(self._source_state))
            source = iter(dataset)
        else:
            self._discard(source, self._position)
        self._source, self._read = source, self._position

    def _discard(self, source: Iterator[Any], count: int) -> None:
        for place in range(count):
            try:
                next(source)
            except StopIteration:
                raise UsageError(
                    f"Epoch {self._epoch} of the stream ended after {place} samples, but training stood at {count}: "
                    "it is not the stream that the checkpoint was made with."
                ) from None

    def _state_of_source(self) -> Any:
        """What the source itself says of its position, right behind the global batch; None where it says nothing."""
        if hasattr(self._source, "seek"):
            return None
        for holder in (self._source, self._stream.dataset):
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                return copy.deepcopy(holder.state_dict())
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "number": self._number,
            "source": self._source_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._position, self._number = state["epoch"], state["position"], state["number"]
        self._source_state, self._source = state["source"], None
