"""Does a save take far longer than the job's saves used to? Then storage is slow: no hang, and no node's fault.

Ingest asks with each checkpoint (`recovery/checkpoints.py`). Training is not held up by it, so nothing is done about
it but to say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

RULE_VERSION = "slow-saves-1"

SLOWER = 10.0
"""Times the usual: what public reports of a slow storage target speak of."""
AT_LEAST_S = 5.0
"""A shorter save is nobody's trouble, however short the others were."""
COMPARED = 10
"""The job's newest saves before it."""
_FEWEST = 3


def judge_save_time(save_time_s: float, *, before: Sequence[float]) -> str:
    """Why a save of this time is slow, for the timeline; "" where it is not, or where too little is known.

    before: seconds of the job's saves before this one, in any order.
    """
    if len(before) < _FEWEST or save_time_s < AT_LEAST_S:
        return ""
    usual_s = statistics.median(before)
    if save_time_s < SLOWER * usual_s:
        return ""
    return (
        f"it took {save_time_s:.1f} s until it was on disk, the median of the {len(before)} saves before is "
        f"{usual_s:.1f} s: storage is slow. Training went on meanwhile and no node is to blame; look at the storage "
        "target that holds the checkpoint directory"
    )
