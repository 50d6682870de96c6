"""`StatefulBatches`: torchdata's StatefulDataLoader with the state that belongs to what was trained on.

A script wraps its loader in one, iterates that, and tracks it as the sampler. torchdata is not imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from everstep.data.loader import SpannedBatch
from everstep.data.sampler import ReplayableSampler
from everstep.data.span import SampleSpan
from everstep.errors import UsageError


class StatefulBatches:
    """Iterates a StatefulDataLoader and saves, with the position of `order`, the loader's state of the same batch.

    loader: made by `replayable_loader(..., loader_class=StatefulDataLoader)` with `order` as its sampler, or from a
    `ReplayableStream` (`order`, then) with `batch_size=None`; snapshot_every_n_steps must be 1, its default.

    The loader's state (of the dataset and of each worker) is taken as each batch is handed out, and is kept beside the
    batch's span until `Run` commits that span. So whatever runs ahead, a checkpoint holds the state behind the last
    trained batch. Where world size or number of workers changed, that state has no meaning: the position alone is
    restored, which is exact for order and samples; a dataset that keeps a state of its own begins with a fresh one.
    """

    def __init__(self, loader: Any, order: ReplayableSampler | Any) -> None:
        if getattr(loader, "snapshot_every_n_steps", None) != 1:
            raise UsageError(
                f"StatefulBatches needs a torchdata StatefulDataLoader with snapshot_every_n_steps=1, not a "
                f"{type(loader).__name__} with {getattr(loader, 'snapshot_every_n_steps', None)!r}: "
                "another one cannot tell its state behind each batch."
            )
        self.loader = loader
        self.order = order
        self._states: dict[SampleSpan, Any] = {}
        self._state: Any = None
        self._shape = {"world_size": order.world_size, "workers": loader.num_workers}

    def __iter__(self) -> Iterator[SpannedBatch]:
        """Batches for ever, from the committed position."""
        self._states.clear()
        place = self.order.state_dict()
        batches = iter(self.loader)
        self.order.load_state_dict(place)  # as a dataset it was given what it had seen itself, before it was trained on
        for batch in batches:
            if not isinstance(getattr(batch, "span", None), SampleSpan):
                raise UsageError(
                    f"The loader's batch is a {type(batch).__name__} without a span: make the loader with "
                    "everstep.replayable_loader, or from an everstep.ReplayableStream with batch_size=None."
                )
            self._states[batch.span] = copy.deepcopy(self.loader.state_dict())
            yield batch

    @property
    def epoch(self) -> int:
        """Epoch of the next sample to be trained on."""
        return int(self.order.epoch)

    @property
    def position(self) -> int:
        """Position in the epoch's order of the next sample to be trained on."""
        return int(self.order.position)

    def follows(self, span: SampleSpan) -> bool:
        """Whether the span starts exactly where training stands: nothing skipped, nothing repeated."""
        return bool(self.order.follows(span))

    def order_digest(self, span: SampleSpan) -> str | None:
        """`indices_digest` of what the order says that this rank's part of the span holds; None: it does not know."""
        digest: str | None = self.order.order_digest(span)
        return digest

    def commit(self, span: SampleSpan) -> None:
        """The span has been trained on: its loader state is the one to save. `Run` calls this with each step."""
        for older in list(self._states):
            state = self._states.pop(older)
            if older == span:
                self._state = state
                self._shape = {"world_size": self.order.world_size, "workers": self.loader.num_workers}
                break
        self.order.commit(span)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.state_dict(), "loader": self._state, **self._shape}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved position over, and the loader's own state where it was made by as many ranks and workers."""
        self.order.load_state_dict(state["order"])
        self._states.clear()
        self._state = state["loader"]
        self._shape = {name: state[name] for name in self._shape}
        same = self._shape == {"world_size": self.order.world_size, "workers": self.loader.num_workers}
        if self._state is not None and same:
            self.loader.load_state_dict(copy.deepcopy(self._state))
