from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol import messages
from everstep.elastic.lease import NS, Expired, Held, Phase, Progress, Terms, judge, longest_limit_ns

TERMS = Terms(setup_s=100.0, compile_s=300.0, step_s=10.0, save_s=20.0, evaluation_s=30.0)


def slot(at_s: float, phase: Phase = Phase.STEP, steps: int = 9) -> Progress:
    return Progress(at_ns=int(at_s * NS), phase=phase, steps=steps)


def held(sign_s: float, limit_s: float = 10.0) -> Held:
    return Held(sign_ns=int(sign_s * NS), limit_ns=int(limit_s * NS))


def verdict(
    before: Held, *ranks: Progress, contact_s: float = 0.0, now_s: float, terms: Terms = TERMS
) -> Held | Expired:
    return judge(before, contact_ns=int(contact_s * NS), ranks=ranks, terms=terms, now_ns=int(now_s * NS))


@pytest.mark.parametrize(
    ("phase", "steps", "limit_s"),
    [
        (Phase.SETUP, 0, 100.0),
        (Phase.COMPILE, 0, 300.0),
        (Phase.COMPILE, 1, 100.0),
        (Phase.STEP, 2, 100.0),
        (Phase.SAVE, 0, 100.0),
        (Phase.STEP, 3, 10.0),
        (Phase.SAVE, 3, 20.0),
        (Phase.EVALUATION, 3, 30.0),
        (Phase.COMPILE, 3, 10.0),
    ],
)
def test_limit_is_that_of_the_phase_and_of_the_setup_until_the_pace_is_known(
    phase: Phase, steps: int, limit_s: float
) -> None:
    assert longest_limit_ns([slot(1, phase, steps)], TERMS) == limit_s * NS


def test_ranks_wait_for_each_other_so_that_the_longest_limit_holds() -> None:
    assert longest_limit_ns([slot(1), slot(1, Phase.EVALUATION), slot(1, Phase.SAVE)], TERMS) == 30 * NS


def test_node_without_a_living_rank_has_the_limit_of_the_setup() -> None:
    assert longest_limit_ns([], TERMS) == 100 * NS


def test_phase_that_this_release_does_not_know_has_the_limit_of_a_step() -> None:
    assert longest_limit_ns([Progress(at_ns=0, phase=77, steps=3)], TERMS) == 10 * NS


def test_progress_alone_and_contact_alone_prolong_it() -> None:
    assert verdict(held(100), slot(109), now_s=118) == held(109)
    assert verdict(held(100), slot(100), contact_s=109, now_s=118) == held(109)


def test_silence_beyond_the_limit_ends_it() -> None:
    assert verdict(held(100), slot(100), now_s=110) == held(100)
    assert verdict(held(100), slot(100), now_s=110.5) == Expired(int(10.5 * NS), 10 * NS, "step")


def test_case_R43_save_is_judged_by_its_own_limit_and_it_is_named_whose_limit_ended_a_lease() -> None:
    """A save of four times what a step may take; and what is said when it takes longer than a save may, too."""
    terms = Terms(step_s=5.0, save_s=30.0, evaluation_s=60.0)
    saving = slot(100, Phase.SAVE)
    assert verdict(held(100), saving, now_s=120, terms=terms) == held(100, limit_s=30.0)
    expired = verdict(held(100), saving, now_s=131, terms=terms)
    assert str(expired).endswith("no progress for 31.0 s; 30.0 s are allowed in phase save")
    late = verdict(held(100), slot(131, Phase.STEP), now_s=131, terms=terms)
    assert str(late).endswith("10.0 s are allowed"), "a limit from earlier terms has no name any more"
    late = verdict(held(100, limit_s=30.0), slot(131, Phase.STEP), now_s=131, terms=terms)
    assert str(late).endswith("30.0 s are allowed in phase save"), "seen when the next step had begun"
    both = Terms(save_s=30.0, evaluation_s=30.0)
    assert "in phase save or evaluation" in str(verdict(held(100, 30.0), slot(131), now_s=131, terms=both))
    assert str(verdict(held(100), saving, now_s=131, terms=both)).endswith("in phase save")


@pytest.mark.parametrize("contact_s", [111.0, 150.0])
def test_contact_that_comes_after_the_gap_does_not_bring_it_back(contact_s: float) -> None:
    assert isinstance(verdict(held(100), slot(100), contact_s=contact_s, now_s=150), Expired)


def test_progress_that_comes_after_the_gap_does_not_bring_it_back() -> None:
    assert isinstance(verdict(held(100), slot(149), now_s=150), Expired)


def test_contact_bridges_the_time_until_a_late_step() -> None:
    assert verdict(held(100), slot(118), contact_s=109, now_s=119) == held(118)
    assert isinstance(verdict(held(100), slot(120), contact_s=109, now_s=120.1), Expired)


def test_phase_that_was_just_left_still_counts_for_the_silence_before() -> None:
    """A save of 18 seconds without contact, seen again when the next step has already begun."""
    assert verdict(held(100, limit_s=20), slot(118), now_s=118.2) == held(118)
    assert isinstance(verdict(held(100, limit_s=10), slot(118), now_s=118.2), Expired)


def test_limit_of_the_setup_ends_with_the_progress_that_ends_it() -> None:
    """Frozen just after the third step: renewed contact must not profit from the long limit before."""
    frozen = slot(101, Phase.STEP, 3)
    assert isinstance(verdict(held(100, limit_s=100), frozen, contact_s=150, now_s=150.1), Expired)
    assert verdict(held(100, limit_s=100), frozen, contact_s=110, now_s=119) == held(110)


def test_sign_from_the_future_counts_for_nothing() -> None:
    assert isinstance(verdict(held(100), slot(100), contact_s=500, now_s=111), Expired)
    assert isinstance(verdict(held(100), slot(500), now_s=111), Expired)


def test_raised_terms_hold_from_the_next_look_on() -> None:
    raised = TERMS.raised_to(TERMS._replace(step_s=60.0, save_s=1.0))
    assert raised == TERMS._replace(step_s=60.0)
    assert verdict(held(100), slot(100), now_s=150, terms=raised) == held(100, limit_s=60)


def test_of_two_signs_between_looks_only_the_last_is_seen_and_that_costs_nobody_his_life() -> None:
    assert verdict(held(100), slot(110.2), now_s=110.25) == held(110.2)


@given(
    gaps_s=st.lists(st.tuples(st.floats(0.01, 9.99), st.booleans()), min_size=1, max_size=40),
    look_every_s=st.floats(0.05, 0.5),
)
def test_whoever_always_gives_a_sign_in_time_is_never_ended(
    gaps_s: list[tuple[float, bool]], look_every_s: float
) -> None:
    now, contact, progress, state, next_look = 1000.0, 1000.0, 1000.0, held(1000), 1000.0
    for gap_s, by_contact in gaps_s:
        until = now + gap_s
        while next_look < until:
            result = verdict(state, slot(progress), contact_s=contact, now_s=next_look)
            assert isinstance(result, Held)
            state, next_look = result, next_look + look_every_s
        now = until
        contact, progress = (now, progress) if by_contact else (contact, now)


@given(
    silence_s=st.floats(10.51, 1000),
    contact_first=st.booleans(),
    between_s=st.floats(0, 0.5),
    stopped_between_looks_s=st.floats(0, 0.25),
)
def test_silence_over_the_limit_ends_it_whoever_is_woken_first(
    silence_s: float, contact_first: bool, between_s: float, stopped_between_looks_s: float
) -> None:
    """All of a node is frozen, and thawed in any order, with a last look up to 0.25 s before the freeze."""
    frozen_at = 1000 + stopped_between_looks_s
    first, second = frozen_at + silence_s, frozen_at + silence_s + between_s
    contact, progress = (first, second) if contact_first else (second, first)
    result = verdict(held(1000), slot(progress), contact_s=contact, now_s=second + 0.01)
    assert isinstance(result, Expired)


def test_terms_default_to_those_of_the_wire() -> None:
    wire = messages.LeaseTerms()
    assert Terms()._asdict() == {name: getattr(wire, name) for name in wire.__struct_fields__}
    assert Terms.parse(b'{"step_s": 3, "something_new": 1}') == Terms(step_s=3.0)


@pytest.mark.parametrize(
    "content", ["[]", "{", json.dumps({"step_s": 0}), json.dumps({"step_s": "x"}), '{"save_s":NaN}']
)
def test_refuses_terms_that_are_none(content: str) -> None:
    with pytest.raises(ValueError):
        Terms.parse(content.encode())


def test_phases_are_numbered_as_in_the_progress_file_and_named_as_on_the_wire() -> None:
    assert {phase.word: int(phase) for phase in Phase} == {
        "setup": 0,
        "compile": 1,
        "step": 2,
        "save": 3,
        "evaluation": 4,
    }
    assert {phase.word for phase in Phase} == {phase.value for phase in messages.Phase}
