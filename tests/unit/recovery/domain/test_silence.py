"""Silence is judged by the server's clock, and only by time in which somebody listened."""

from __future__ import annotations

import pytest
from domain_scenes import NOW
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.silence import OBSERVER_GONE_AFTER_S, Contact, ObserverView, Silence, SilenceLimits, judge_silence


def observer(
    name: str = "web-1", *, since: float = NOW - 1000, beat_at: float = NOW, lag_s: float = 0.0
) -> ObserverView:
    return ObserverView(name=name, since=since, beat_at=beat_at, lag_s=lag_s)


def judge(heard_at: float | None, *observers: ObserverView, by: str = "web-1", now: float = NOW) -> Silence:
    return judge_silence(last_heard_at=heard_at, observer=by, observers=observers or (observer(),), now=now)


@pytest.mark.parametrize(
    ("silent_s", "contact"),
    [
        (0.0, Contact.SEEN),
        (2.9, Contact.SEEN),
        (3.0, Contact.SUSPECT),
        (9.9, Contact.SUSPECT),
        (10.0, Contact.LOST),
        (9999.0, Contact.LOST),
    ],
)
def test_suspect_after_3_s_and_lost_after_10_s(silent_s: float, contact: Contact) -> None:
    found = judge(NOW - silent_s, observer(since=NOW - 1e6))
    assert (found.contact, found.since) == (contact, NOW - silent_s)
    assert found.silent_s == pytest.approx(silent_s)


def test_limits_are_arguments() -> None:
    limits = SilenceLimits(suspect_s=1.0, lost_s=2.0)
    found = judge_silence(last_heard_at=NOW - 2.5, observer="web-1", observers=(observer(),), now=NOW, limits=limits)
    assert found.contact is Contact.LOST


def test_a_node_that_was_never_heard_is_unobserved_not_lost() -> None:
    assert judge(None).contact is Contact.UNOBSERVED


def test_a_silence_is_only_as_long_as_its_observer_saw_it() -> None:
    # The observer's last record is 4 s old: what it has heard since then is not known yet.
    assert judge(NOW - 12, observer(beat_at=NOW - 4)).contact is Contact.SUSPECT


@pytest.mark.parametrize("observers", [(), (observer(beat_at=NOW - OBSERVER_GONE_AFTER_S - 0.1),)])
def test_without_an_observer_nothing_is_known(observers: tuple[ObserverView, ...]) -> None:
    found = judge_silence(last_heard_at=NOW - 600, observer="web-1", observers=observers, now=NOW)
    assert found.contact is Contact.UNOBSERVED


def test_lag_of_the_loop_or_the_database_stretches_every_limit() -> None:
    assert judge(NOW - 12, observer(lag_s=2.5)).contact is Contact.SUSPECT
    assert judge(NOW - 12.5, observer(lag_s=2.5)).contact is Contact.LOST


def test_what_was_before_the_observer_began_counts_for_nothing() -> None:
    assert judge(NOW - 600, observer(since=NOW - 2)).contact is Contact.SEEN
    assert judge(NOW - 600, observer(since=NOW - 10)).contact is Contact.LOST


def test_after_a_restart_of_the_server_no_node_is_lost_before_the_grace() -> None:
    fresh = observer("web-2", since=NOW - 49.0)
    assert judge(NOW - 120, fresh).contact is not Contact.LOST
    fresh = observer("web-2", since=NOW - 50.1)
    assert judge(NOW - 120, fresh).contact is Contact.LOST


def test_a_node_whose_observer_is_gone_is_unobserved_until_it_is_suspect() -> None:
    other = observer("web-2", since=NOW - 1e5)
    assert judge(NOW - 30, other).contact is Contact.UNOBSERVED
    assert judge(NOW - 44, other).contact is Contact.SUSPECT


def test_only_the_observer_that_heard_it_last_counts_while_it_is_there() -> None:
    # Another web process hears nothing of this node and has done so for hours.
    assert judge(NOW - 1, observer("web-1"), observer("web-2", since=NOW - 1e5)).contact is Contact.SEEN
    assert judge(NOW - 11, observer("web-1"), observer("web-2", since=NOW - 1)).contact is Contact.LOST


def test_times_in_the_future_are_no_silence() -> None:
    # The server's clock was put back.
    assert judge(NOW + 3600, observer(since=NOW + 3000, beat_at=NOW + 3601)).contact is Contact.SEEN


_times = st.floats(NOW - 2000, NOW + 50, allow_nan=False)
_observers = st.lists(
    st.builds(
        ObserverView,
        name=st.sampled_from(["web-1", "web-2", "web-3"]),
        since=_times,
        beat_at=_times,
        lag_s=st.floats(0, 30),
    ),
    unique_by=lambda view: view.name,
    max_size=3,
).map(tuple)


@given(heard_at=_times, observers=_observers)
def test_nothing_is_lost_unless_somebody_listened_for_the_whole_limit(
    heard_at: float, observers: tuple[ObserverView, ...]
) -> None:
    found = judge_silence(last_heard_at=heard_at, observer="web-1", observers=observers, now=NOW)
    if found.contact is Contact.LOST:
        listened = max(seen.beat_at - max(seen.since, heard_at) - seen.lag_s for seen in observers)
        assert listened >= 10.0


@given(heard_at=_times, observers=_observers, more_s=st.floats(0, 100))
def test_more_lag_never_makes_a_node_look_more_silent(
    heard_at: float, observers: tuple[ObserverView, ...], more_s: float
) -> None:
    slower = tuple(
        ObserverView(name=seen.name, since=seen.since, beat_at=seen.beat_at, lag_s=seen.lag_s + more_s)
        for seen in observers
    )
    before = judge_silence(last_heard_at=heard_at, observer="web-1", observers=observers, now=NOW)
    after = judge_silence(last_heard_at=heard_at, observer="web-1", observers=slower, now=NOW)
    assert after.silent_s <= before.silent_s
