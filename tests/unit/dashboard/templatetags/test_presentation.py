"""How values are written on the pages."""

from __future__ import annotations

import pytest

from dashboard.templatetags import presentation
from recovery.domain.continuity import VerdictKind
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.timeline import EntryKind
from recovery.queries import NodeState


@pytest.mark.parametrize(
    ("kind", "states"),
    [("incident", IncidentState), ("job", JobState), ("node", NodeState), ("verdict", VerdictKind)],
)
def test_every_state_has_a_look_of_its_own(kind: str, states: type) -> None:
    assert {state.value for state in states} == set(presentation.LOOKS[kind])


def test_every_kind_of_entry_has_a_symbol() -> None:
    assert {kind.value for kind in EntryKind} == set(presentation.ENTRY_ICONS)


def test_badge_shows_icon_and_word_not_colour_alone() -> None:
    shown = presentation.badge("incident", "escalated")
    assert "<svg" in shown
    assert "Needs a human" in shown


def test_state_of_a_newer_version_is_shown_by_its_name() -> None:
    assert "Being moved" in presentation.badge("job", "being_moved")


@pytest.mark.parametrize(
    ("value", "written"),
    [(None, "-"), (0.213, "0.21 s"), (9.996, "10.0 s"), (14.24, "14.2 s"), (100.0, "100 s"), (151, "2 min 31 s")],
)
def test_durations_have_three_digits(value: float | None, written: str) -> None:
    assert presentation.seconds(value) == written


@pytest.mark.parametrize(
    ("value", "written"), [(None, "-"), (512, "512 B"), (38_412_288, "36.6 MiB"), (141 * 1024**3, "141 GiB")]
)
def test_sizes_are_binary(value: float | None, written: str) -> None:
    assert presentation.size(value) == written


def test_unknown_values_are_dashes_never_zero() -> None:
    assert presentation.number(None) == presentation.known("") == presentation.ago(None) == "-"
    assert presentation.number(0) == "0"


def test_offsets_carry_their_sign() -> None:
    assert presentation.offset_from(102.5, 100.0) == "+2.50 s"
    assert presentation.offset_from(99.81, 100.0) == "-0.19 s"


def test_time_carries_its_absolute_form() -> None:
    assert 'datetime="2031-05-04T03:02:01.250Z"' in presentation.clock(1935630121.25)
    assert 'title="2031-05-04 03:02:01 UTC"' in presentation.clock(1935630121.25)


@pytest.mark.parametrize(("part", "whole", "percent"), [(None, 10, 0), (3, None, 0), (5, 10, 50), (12, 10, 100)])
def test_meter_stays_within_its_bounds(part: float | None, whole: float | None, percent: int) -> None:
    assert presentation.share(part, whole) == percent
