"""Data whose order can be replayed: samplers, streams and loaders whose batches carry their span.

Training scripts import it, mostly by the names of `everstep` itself. Only `ReplayableStream` needs torch at import, so
it is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from everstep.data.loader import SpannedBatch, SpannedCollate, SpannedDataset, replayable_loader
from everstep.data.order import mix, permute
from everstep.data.sampler import ReplayableSampler
from everstep.data.span import IndexBatch, SampleOrder, SampleSpan, indices_digest
from everstep.data.stateful_batches import StatefulBatches

if TYPE_CHECKING:
    from everstep.data.stream import ReplayableStream

__all__ = [
    "IndexBatch",
    "ReplayableSampler",
    "ReplayableStream",
    "SampleOrder",
    "SampleSpan",
    "SpannedBatch",
    "SpannedCollate",
    "SpannedDataset",
    "StatefulBatches",
    "indices_digest",
    "mix",
    "permute",
    "replayable_loader",
]


def __getattr__(name: str) -> object:
    if name != "ReplayableStream":
        raise AttributeError(f"module 'everstep.data' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return importlib.import_module("everstep.data.stream").ReplayableStream
