"""What a long command says of its progress, and when it says nothing."""

from __future__ import annotations

import io
import time

import pytest

from everstep.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_terminal_gets_one_line_that_is_written_over_and_cleared(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(4_000_000, stream=stream)
    progress.begin("1:60")
    for _ in range(4):
        clock[0] += 1.0
        progress.advance(1_000_000)
    progress.end()
    assert stream.getvalue().count("\n") == 0
    assert "1:60: 25 % of 4.0 MB, 1.0 MB/s, 3.00 s left" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_what_is_done_within_a_second_says_nothing(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(100, stream=stream)
    clock[0] += 0.9
    progress.advance(100)
    progress.end()
    assert stream.getvalue() == ""


def test_log_gets_a_line_every_ten_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(100, stream=stream)
    progress.begin("1:60")
    for _ in range(25):
        clock[0] += 1.0
        progress.advance(4)
    progress.end()
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "1:60: 40 % of 100 B",
        "1:60: 80 % of 100 B",
    ]


def test_more_than_was_announced_is_no_more_than_all(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(0, stream=stream)
    clock[0] += 2.0
    progress.advance(10)
    assert "100 % of 0 B, 5 B/s, little left" in stream.getvalue()
