"""What a training script imports: a run that can be resumed, and data whose order can be replayed.

Names are loaded on first use (PEP 562), so that `import everstep` needs neither torch nor anything else that is heavy:
the CLI, the runner and the agent import parts of this package too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.data import (
        ReplayableSampler,
        ReplayableStream,
        SampleSpan,
        SpannedBatch,
        SpannedDataset,
        StatefulBatches,
        replayable_loader,
    )
    from everstep.errors import (
        CheckpointDamaged,
        CheckpointMissing,
        EverstepError,
        SaveFailed,
        UnsupportedState,
        UsageError,
    )
    from everstep.run import Run

__version__ = "0.1.0"

__all__ = [
    "CheckpointDamaged",
    "CheckpointMissing",
    "EverstepError",
    "ReplayableSampler",
    "ReplayableStream",
    "Run",
    "SampleSpan",
    "SaveFailed",
    "SpannedBatch",
    "SpannedDataset",
    "StatefulBatches",
    "UnsupportedState",
    "UsageError",
    "replayable_loader",
]

_HOME_OF = {
    "Run": "everstep.run",
    "ReplayableSampler": "everstep.data",
    "ReplayableStream": "everstep.data",
    "SampleSpan": "everstep.data",
    "SpannedBatch": "everstep.data",
    "SpannedDataset": "everstep.data",
    "StatefulBatches": "everstep.data",
    "replayable_loader": "everstep.data",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME_OF.get(name, "everstep.errors")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
