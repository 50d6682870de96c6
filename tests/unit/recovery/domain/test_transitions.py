"""The table of states: every state is reachable, has an exit, and has a deadline or pages."""

from __future__ import annotations

import itertools

import pytest

from recovery.domain.incident import ENDS, MAIN_LINE, TRANSITIONS, IncidentState
from recovery.domain.policy import Policy

S = IncidentState


def test_names_every_state() -> None:
    assert set(TRANSITIONS) == set(S)


@pytest.mark.parametrize("state", sorted(ENDS))
def test_ends_have_no_exit(state: IncidentState) -> None:
    assert TRANSITIONS[state] == frozenset()


@pytest.mark.parametrize("state", sorted(set(S) - ENDS))
def test_every_open_state_can_reach_an_end(state: IncidentState) -> None:
    assert _reachable(state) & ENDS


@pytest.mark.parametrize("state", sorted(set(S) - {S.DETECTED}))
def test_every_state_can_be_reached_from_detected(state: IncidentState) -> None:
    assert state in _reachable(S.DETECTED)


@pytest.mark.parametrize("state", sorted(set(S) - ENDS))
def test_an_operator_can_always_close_and_the_owner_can_always_cancel(state: IncidentState) -> None:
    assert {S.CLOSED_BY_OPERATOR, S.CANCELLED} <= TRANSITIONS[state]


@pytest.mark.parametrize("state", sorted(set(S) - ENDS - {S.ESCALATED}))
def test_every_open_state_has_a_deadline_and_may_escalate(state: IncidentState) -> None:
    assert Policy().deadline(state, now=10.0) is not None
    assert S.ESCALATED in TRANSITIONS[state]


def test_escalated_waits_for_a_human_without_a_deadline() -> None:
    assert Policy().deadline(S.ESCALATED, now=10.0) is None


def test_the_main_line_is_a_path() -> None:
    for before, after in itertools.pairwise(MAIN_LINE):
        assert after in TRANSITIONS[before]


def test_no_state_leads_to_itself() -> None:
    assert all(state not in after for state, after in TRANSITIONS.items())


def _reachable(start: IncidentState) -> set[IncidentState]:
    seen: set[IncidentState] = set()
    todo = [start]
    while todo:
        for state in TRANSITIONS[todo.pop()]:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return seen
