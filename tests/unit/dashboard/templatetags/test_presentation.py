"""How values are written on the pages."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from agents.protocol.messages import FaultState, Phase, ProbeOutcome, ProofKind
from dashboard.templatetags import presentation
from recovery.domain.awaited_fences import FenceHelp
from recovery.domain.breaker import BreakerState
from recovery.domain.continuity import VerdictKind
from recovery.domain.drill_kinds import KINDS, PromiseKind
from recovery.domain.incident import CauseKind, IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.silence import Contact
from recovery.domain.timeline import EntryKind
from recovery.domain.trust import Health, Integrity
from recovery.domain.witnesses import WitnessKind
from recovery.queries import NodeState

TEMPLATES = Path(__file__).resolve().parents[4] / "templates"


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        ("incident", {*IncidentState, *BreakerState}),
        ("job", JobState),
        ("node", NodeState),
        ("contact", Contact),
        ("proof", ProofKind),
        ("help", FenceHelp),
        ("witness", WitnessKind),
        ("probe", {*ProbeOutcome, ""}),
        ("cause", CauseKind),
        ("phase", Phase),
        ("drill_kind", KINDS),
        ("promise", PromiseKind),
        ("verdict", VerdictKind),
        ("integrity", Integrity),
        ("trust", Health),
    ],
)
def test_every_state_has_a_look_of_its_own(kind: str, states: Iterable[str]) -> None:
    assert {str(state) for state in states} == set(presentation.LOOKS[kind])


def test_every_symbol_that_a_look_names_is_drawn() -> None:
    drawn = set(re.findall(r'<symbol id="i-([a-z]+)"', (TEMPLATES / "_icons.html").read_text()))
    named = {look.icon for looks in presentation.LOOKS.values() for look in looks.values()}
    assert named | set(presentation.ENTRY_ICONS.values()) <= drawn


def test_every_state_of_a_faults_report_has_a_look_as_a_drills_state() -> None:
    assert {state.value for state in FaultState} <= set(presentation.LOOKS["drill"])


def test_every_kind_of_entry_has_a_symbol() -> None:
    assert {kind.value for kind in EntryKind} == set(presentation.ENTRY_ICONS)


def test_badge_shows_icon_and_word_not_colour_alone() -> None:
    shown = presentation.badge("incident", "escalated")
    assert "<svg" in shown
    assert "Needs a human" in shown


def test_mark_shows_icon_and_word_without_being_a_badge() -> None:
    shown = presentation.mark("contact", "lost")
    assert "<svg" in shown
    assert "Lost" in shown
    assert "badge" not in shown


def test_ticking_silence_counts_on_from_what_the_server_counted() -> None:
    since = float(re.findall(r'data-since="([^"]+)"', presentation.ticking(46.0))[0])
    assert time.time() - since == pytest.approx(46.0, abs=1.0)
    assert ">46 s<" in presentation.ticking(46.0)


def test_time_left_never_turns_negative() -> None:
    assert "in 2 min" in presentation.until(time.time() + 150)
    assert "any moment now" in presentation.until(time.time() - 5)


def test_code_between_backticks_is_marked_and_escaped() -> None:
    assert presentation.inline_code("Send `a <b>` & go.") == "Send <code>a &lt;b&gt;</code> &amp; go."


def test_names_with_hyphens_stay_on_one_line_and_are_escaped() -> None:
    told = presentation.unbroken("Moved <llm> to gpu-02, not to eu.west-1a.")
    assert told == (
        'Moved &lt;llm&gt; to <span class="nowrap">gpu-02</span>, not to <span class="nowrap">eu.west-1a</span>.'
    )


def test_words_longer_than_a_name_may_break_at_their_hyphens() -> None:
    long = "a-very-long-word-of-many-hyphens"
    assert presentation.unbroken(long) == long


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
