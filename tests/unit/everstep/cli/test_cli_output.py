"""How values become text."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest

from everstep.cli import output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.421, "0.42 s"),
        (12.34, "12.3 s"),
        (245, "4 min 05 s"),
        (11_220, "3 h 07 min"),
        (187_200, "2 d 04 h"),
    ],
)
def test_duration_takes_the_unit_that_reads_well(seconds: float | None, text: str) -> None:
    assert output.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(None, "-"), (999, "999 B"), (1_200_000, "1.2 MB"), (8e10, "80.0 GB")])
def test_size_takes_decimal_units(count: int | None, text: str) -> None:
    assert output.size(count) == text


def test_columns_are_as_wide_as_their_widest_cell_and_unknown_is_a_dash() -> None:
    lines = output.table(("ID", "STATE"), [("job_long", "running"), ("j", None)])
    assert lines == ["ID        STATE", "job_long  running", "j         -"]


def test_colour_does_not_move_columns() -> None:
    plain = output.table(("STATE", "N"), [("ready", 1), ("unknown", 2)])
    painted = output.table(("STATE", "N"), [("ready", 1), ("unknown", 2)], colour=True)
    assert [
        line.replace("\x1b[32m", "").replace("\x1b[33m", "").replace("\x1b[1m", "").replace("\x1b[0m", "")
        for line in painted
    ] == plain
    assert "\x1b[32mready" in painted[1]


def test_colour_is_wanted_on_terminals_only_and_never_with_no_color() -> None:
    assert output.wants_colour(Terminal(), {"TERM": "xterm"})
    assert not output.wants_colour(io.StringIO(), {"TERM": "xterm"})
    assert not output.wants_colour(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert not output.wants_colour(Terminal(), {"TERM": "dumb"})


def test_control_characters_of_a_job_never_reach_the_terminal() -> None:
    assert output.cell("a\x1b[2Jb\nc") == "a [2Jb c"


def test_moments_are_shown_in_utc_and_as_age() -> None:
    at = "2030-03-17T17:46:40.250000Z"
    assert (output.moment(at), output.clock(at)) == ("2030-03-17 17:46:40Z", "17:46:40.2Z")
    assert output.ago(at, now=datetime(2030, 3, 17, 17, 46, 44, 250_000, tzinfo=UTC)) == "4.00 s ago"
    assert output.ago(None) == "never"


@pytest.mark.parametrize(
    ("last", "total", "text"), [(None, None, "-"), (None, 10, "0 / 10"), (3, None, "3"), (3, 10, "3 / 10")]
)
def test_steps_say_how_far(last: int | None, total: int | None, text: str) -> None:
    assert output.steps({"last_step": last, "total_steps": total}) == text
