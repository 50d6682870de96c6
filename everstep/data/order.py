"""The order of an epoch: a pure function of (seed, epoch, position), the same everywhere. `ReplayableSampler` asks.

Integers only, and no state: whoever knows the three numbers knows the sample.
"""

from __future__ import annotations

import functools

from everstep.errors import UsageError

MASK_64 = (1 << 64) - 1
_ROUNDS = 6
"""Rounds of the Feistel network; four are enough for a pseudo-random permutation, two more cost a microsecond."""


def mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def permute(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Where `position` of the epoch's order lies in a dataset of `size` samples: a permutation of range(size).

    A Feistel network over the smallest even number of bits that holds `size`, walked until it falls inside (fewer than
    four rounds on average). Integers only, so that each platform gets the same order.
    """
    if not 0 <= position < size:
        raise UsageError(f"Position {position} is outside of a dataset of {size} samples.")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half) - 1
    keys = _round_keys(seed, epoch)
    value = position
    while True:
        left, right = value >> half, value & half_mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & half_mask)
        value = (left << half) | right
        if value < size:
            return value


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    epoch_key = mix(mix(seed & MASK_64) ^ (epoch & MASK_64))
    return tuple(mix(epoch_key ^ number) for number in range(_ROUNDS))
