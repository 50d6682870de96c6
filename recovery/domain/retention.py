"""Which checkpoints the ranks may not remove, whatever their own count of newest ones says.

The sweep asks, the order carries the answer (`Assignment.keep`), rank 0 obeys (`everstep/checkpoint/retention.py`).
The newest ones need no pin: the ranks keep those by themselves. A pin matters when the newest ones turn out bad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from recovery.domain.generations import GenerationView
from recovery.domain.lineage import lineage_limits
from recovery.domain.plan import CheckpointRef
from recovery.domain.trust import Health, Integrity, Trust

RULE_VERSION = "retention-1"

_CLASSES: tuple[Callable[[Trust], bool], ...] = (
    lambda trust: trust.integrity in (Integrity.REHASHED, Integrity.TEST_LOADED),
    lambda trust: trust.integrity is Integrity.TEST_LOADED,
    lambda trust: trust.good,
    lambda trust: trust.health is Health.RESUMED_FROM,
    lambda trust: trust.good and trust.integrity in (Integrity.REHASHED, Integrity.TEST_LOADED),
)


def choose_pins(
    trust: Mapping[CheckpointRef, Trust], generations: Sequence[GenerationView]
) -> tuple[CheckpointRef, ...]:
    """The newest usable checkpoint of each class on the job's lineage, and what the newest generation resumed from."""
    limits = lineage_limits(generations)
    line = sorted(
        (
            ref
            for ref, known in trust.items()
            if known.usable
            and ref.generation in limits
            and ((limit := limits[ref.generation]) is None or ref.step <= limit)
        ),
        key=lambda ref: (ref.step, ref.generation),
        reverse=True,
    )
    pins = {ref for belongs in _CLASSES if (ref := next((r for r in line if belongs(trust[r])), None)) is not None}
    newest = max(generations, key=lambda generation: generation.number, default=None)
    if newest is not None and newest.plan.parent is not None:
        pins.add(newest.plan.parent)
    return tuple(sorted(pins))
