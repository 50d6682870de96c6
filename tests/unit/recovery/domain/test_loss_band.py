"""The band that losses are held to is known before the replay, and as wide as the old curve is noisy."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from domain_scenes import record

from recovery.domain.loss_band import ORDER_OF_SUMS, WIDEST, noise_band
from recovery.domain.step_records import Records


def noisy(deviation: float, *, steps: int = 60, ranks: int = 2, seed: int = 1) -> Records:
    """A falling curve with relative Gaussian noise."""
    rng = random.Random(seed)
    return {
        (rank, step): record(rank, step, (2.0 - 0.01 * step) * (1 + rng.gauss(0.0, deviation)))
        for rank in range(ranks)
        for step in range(1, steps + 1)
    }


@pytest.mark.parametrize("deviation", [1e-4, 1e-3, 5e-3])
@pytest.mark.parametrize("seed", range(20))
def test_band_is_six_deviations_of_the_difference_of_two_noisy_losses(deviation: float, seed: int) -> None:
    band = noise_band(noisy(deviation, seed=seed))
    assert band == pytest.approx(6 * math.sqrt(2) * deviation, rel=0.5)


@pytest.mark.parametrize("deviation", [0.05, 0.5])
def test_band_is_never_as_wide_as_the_jumps_that_are_known_as_faults(deviation: float) -> None:
    assert noise_band(noisy(deviation)) == WIDEST < 0.2


def test_smooth_curve_leaves_room_for_another_order_of_sums() -> None:
    assert noise_band(noisy(0.0)) == ORDER_OF_SUMS


def test_trend_of_the_loss_is_no_noise() -> None:
    steep = {(0, step): record(0, step, 100.0 - step) for step in range(1, 60)}
    assert noise_band(steep) == ORDER_OF_SUMS


def test_few_outliers_do_not_widen_the_band() -> None:
    records = dict(noisy(1e-4))
    for step in (20, 40):
        records[0, step] = replace(records[0, step], loss=50.0)
    assert noise_band(records) < 3e-3


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_too_few_steps_tell_nothing_so_that_the_band_is_the_widest(steps: int) -> None:
    assert noise_band(noisy(1e-4, steps=steps)) == WIDEST


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, 0.0])
def test_losses_that_say_nothing_are_left_out(loss: float | None) -> None:
    assert noise_band({(0, step): record(0, step, loss) for step in range(1, 60)}) == WIDEST
