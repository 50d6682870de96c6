"""How far a replayed loss may be from the old one: a two-sided relative band that is fixed before the replay is seen.

Continuity asks. There are three cases, by what was promised: equal bits; equal up to the order of sums, where the
script is deterministic but its ranks are placed elsewhere; nothing, so that the lost curve's own noise is the measure.
"""

from __future__ import annotations

import math
from statistics import median

from recovery.domain.step_records import Records

ORDER_OF_SUMS = 1e-5
"""Source: a resume at another world size stayed within 2.4e-6 over 60 steps; 1e-5 leaves a margin of four."""

WIDEST = 0.1
"""However noisy the old curve is: a jump of the loss by a fifth, up or down, is one of the ways in which a resume is
known to go wrong, and half of it leaves room for the noise on top."""

LOOK_BACK_STEPS = 64
"""Steps before the parent checkpoint that tell the old curve's noise, too."""

_LEAST_SAMPLES = 8
_DEVIATIONS = 6.0
"""Of a difference of two losses that are both as noisy as the old curve: one in 5e8 where the noise is Gaussian."""
_SECOND_DIFFERENCE = math.sqrt(6.0)
"""A second difference of white noise has six times its variance (1 + 4 + 1); a trend drops out of it."""
_MEDIAN_TO_DEVIATION = 1.4826
"""Standard deviation over the median of absolute values, for Gaussian noise; outliers leave it alone."""


def noise_band(reference: Records) -> float:
    """Band for losses of a script that promises nothing, from the records of the lost generation alone.

    The scatter of the old curve from step to step holds the batches' own and that of the arithmetic. A replay has the
    same batches, so that it differs by the second kind only: the estimate errs on the side of patience, and the state
    digests are what finds a small fault. Between `ORDER_OF_SUMS` and `WIDEST`; `WIDEST` where too little is known.
    """
    scatter = []
    for (rank, step), middle in reference.items():
        before, after = reference.get((rank, step - 1)), reference.get((rank, step + 1))
        losses = [None if record is None else record.loss for record in (before, middle, after)]
        known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        if len(known) == 3 and known[1] != 0.0:
            scatter.append(abs(known[0] - 2 * known[1] + known[2]) / abs(known[1]) / _SECOND_DIFFERENCE)
    if len(scatter) < _LEAST_SAMPLES:
        return WIDEST
    deviation = median(scatter) * _MEDIAN_TO_DEVIATION
    return min(WIDEST, max(ORDER_OF_SUMS, _DEVIATIONS * math.sqrt(2.0) * deviation))
