"""A slice of `make silence`: no living node is lost, and dead ones are found, though messages and looks are."""

from __future__ import annotations

import pytest
import silence
from silence import DETECT_P99_LIMIT_S, percentile, simulate

from recovery.domain import breaker


def test_no_node_is_falsely_lost_and_real_silences_are_found_in_time() -> None:
    tally = simulate(seed=7, nodes=24, days=0.2)
    assert tally.false_lost == 0
    assert tally.missed == 0
    assert len(tally.found_after_s) > 20
    assert percentile(tally.found_after_s, 0.99) <= DETECT_P99_LIMIT_S


def test_the_simulation_finds_a_rule_without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    real = silence.judge_silence
    impatient = silence.SilenceLimits(lost_s=3.0, return_grace_s=0.0)
    monkeypatch.setattr(silence, "judge_silence", lambda **known: real(**known, limits=impatient))
    assert simulate(seed=7, nodes=24, days=0.2).false_lost > 0


def test_breaker_stays_shut_however_many_messages_are_lost() -> None:
    assert simulate(seed=3, nodes=6, days=0.2).openings == 0


def test_breaker_that_counted_a_single_silence_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "AT_LEAST", 1)
    monkeypatch.setattr(breaker, "SHARE", 0.0)
    tally = simulate(seed=3, nodes=6, days=0.2)
    assert tally.openings > 0
    assert not tally.passed
