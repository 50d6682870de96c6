"""What travels with a batch: the span of the global order that it is part of, and a checksum of what it really holds.

Samplers and streams make spans, loaders carry them through worker processes, `Run.report` passes them on. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from everstep.data.order import MASK_64, mix

_VECTOR_FROM = 24
"""From so many indices on, numpy's fixed cost is less than the loop's."""


@dataclass(frozen=True, kw_only=True)
class SampleSpan:
    """Positions [start, stop) of one epoch's order that one global batch covers, over all ranks.

    Only these three make two spans equal; the other fields tell of the one rank's batch that the span travelled with.
    """

    epoch: int
    start: int
    stop: int
    epoch_size: int | None = field(default=None, compare=False)
    """Position at which this epoch ends; None: not known."""
    count: int | None = field(default=None, compare=False)
    """Samples of this rank's part."""
    world_size: int = field(default=1, compare=False)
    indices_digest: str | None = field(default=None, compare=False)
    """`indices_digest` of what this rank's part holds; None: nobody looked."""
    source_state: Any = field(default=None, compare=False, repr=False)
    """A stream's own state right behind this span, where it has one."""

    @property
    def weight(self) -> float:
        """Factor for the mean loss over this rank's samples, so that the mean over ranks is the mean over the samples.

        1.0 where all ranks have equally many. Gradients that DistributedDataParallel averages are then those of the
        whole global batch at each world size. A rank without samples has weight 0, but must still take part in the
        backward pass: give it a loss of zero that depends on the parameters, since the mean of nothing is NaN.
        """
        count = self.stop - self.start if self.count is None else self.count
        return count * self.world_size / (self.stop - self.start)


class SampleOrder(Protocol):
    """What `Run` needs of a tracked sampler, stream or loader."""

    @property
    def epoch(self) -> int: ...

    @property
    def position(self) -> int: ...

    def follows(self, span: SampleSpan) -> bool: ...

    def commit(self, span: SampleSpan) -> None: ...

    def order_digest(self, span: SampleSpan) -> str | None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class IndexBatch(list[int]):
    """One rank's dataset indices of one step, with the global span that they are part of."""

    def __init__(self, indices: Iterable[int], span: SampleSpan) -> None:
        super().__init__(indices)
        self._span = span
        self._seen: list[int] | None = None

    @property
    def span(self) -> SampleSpan:
        """The span, with count and checksum of what this list holds now: a changed list does not keep an old one."""
        if self._seen != self:
            self._seen = list(self)
            self._span = replace(self._span, count=len(self), indices_digest=indices_digest(self))
        return self._span

    def __reduce__(self) -> tuple[Any, ...]:
        return (IndexBatch, (list(self), self._span))


def indices_digest(indices: Sequence[int]) -> str:
    """Checksum of a set of samples, 16 hex digits: the sum of their mixed indices modulo 2^64.

    It does not depend on their order, and the checksums of ranks add up to that of the global batch: so it can be
    compared across world sizes. Two different batches agree with a chance of 2^-64 unless they were made to.
    """
    if len(indices) < _VECTOR_FROM:
        return f"{sum(map(mix, indices)) & MASK_64:016x}"
    import numpy as np

    value = np.asarray(indices, dtype=np.int64).astype(np.uint64)
    value += np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return f"{int(value.sum(dtype=np.uint64)):016x}"
