"""Hints to a broker that does not answer cost a moment once, not each time."""

from __future__ import annotations

import pytest

from recovery import wakeup


def test_after_a_hint_that_failed_none_is_tried_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def hang() -> None:
        tried.append(1)
        raise TimeoutError

    monkeypatch.setattr(wakeup, "_away_until", 0.0)
    wakeup._quietly(hang)
    wakeup._quietly(hang)
    assert len(tried) == 1
    monkeypatch.setattr(wakeup, "_away_until", 0.0)
    wakeup._quietly(hang)
    assert len(tried) == 2
