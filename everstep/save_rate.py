"""How fast a run may write its checkpoints, so that a shared store sees a stream and no storm.

`Run` asks once. The rate is that of all nodes together; each gets its share, and their blocks take turns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from everstep.errors import UsageError

SAVE_BYTES_PER_S = "EVERSTEP_SAVE_BYTES_PER_S"
UNLIMITED = "unlimited"


def save_rate(wanted: float | None, *, environment: Mapping[str, str] = os.environ) -> float | None:
    """Bytes per second; None: as fast as the store takes them. The environment's word overrides the script's.

    Raises `UsageError` for what is no rate.
    """
    said = environment.get(SAVE_BYTES_PER_S)
    if said == UNLIMITED or (not said and wanted is None):
        return None
    try:
        rate = float(said or wanted or 0)
    except (TypeError, ValueError):
        rate = 0.0
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(
            f"{f'{SAVE_BYTES_PER_S}={said!r}' if said else f'Run(save_bytes_per_s={wanted!r})'}: give bytes per second "
            f"of all nodes together, like 2e9; without a limit, None in the script or {UNLIMITED!r} in the environment."
        )
    return rate
