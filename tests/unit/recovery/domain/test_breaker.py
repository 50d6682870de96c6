"""Too many silences at once are the control plane's fault: one incident, nothing believed, re-armed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import NOW, lost, node
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.breaker import (
    AT_LEAST,
    SHARE,
    WINDOW_S,
    BreakerOutcome,
    BreakerState,
    ControlPlaneIncident,
    absence_is_credible,
    rearm,
    step_breaker,
    too_many_at_once,
)
from recovery.domain.fleet import FleetSnapshot, NodeView
from recovery.domain.silence import Contact
from recovery.domain.timeline import EntryKind


def fleet_of(count: int, *silent: NodeView, **changes: object) -> FleetSnapshot:
    """A fleet of that size, of which some nodes are silent; the others are seen."""
    names = {view.name for view in silent}
    seen = [node(f"gpu-{number:02d}") for number in range(1, count + 1)]
    return FleetSnapshot(nodes=(*silent, *(view for view in seen if view.name not in names)), **changes)  # type: ignore[arg-type]


def silent_ones(count: int, *, contact: Contact = Contact.LOST, apart_s: float = 0.0) -> tuple[NodeView, ...]:
    return tuple(
        lost(f"gpu-{number:02d}", heard_at=NOW - 12 + apart_s * (number - 1), contact=contact)
        for number in range(1, count + 1)
    )


def look(current: ControlPlaneIncident | None, fleet: FleetSnapshot, *, now: float = NOW) -> BreakerOutcome:
    return step_breaker(current, fleet, fresh_id="inc-9", now=now)


def opened(count: int = 20, silent: int = 20) -> ControlPlaneIncident:
    incident = look(None, fleet_of(count, *silent_ones(silent))).incident
    assert incident is not None
    return incident


@pytest.mark.parametrize(("count", "silent"), [(20, 20), (20, 6), (10, 3), (3, 3), (9, 3), (7, 3), (32, 30)])
def test_opens_one_incident_when_too_many_fall_silent_together(count: int, silent: int) -> None:
    outcome = look(None, fleet_of(count, *silent_ones(silent)))
    assert outcome.incident is not None
    assert (outcome.incident.state, len(outcome.incident.nodes)) == (BreakerState.OPEN, silent)
    assert outcome.page
    assert f"{silent} of {count} nodes" in outcome.entries[0].text
    assert "No job is stopped" in outcome.entries[0].text
    assert not absence_is_credible(fleet_of(count, *silent_ones(silent)))


@pytest.mark.parametrize(("count", "silent"), [(20, 3), (20, 5), (11, 3), (2, 2), (3, 2), (1, 1)])
def test_few_silences_are_believed(count: int, silent: int) -> None:
    fleet = fleet_of(count, *silent_ones(silent))
    assert look(None, fleet) == BreakerOutcome(incident=None)
    assert absence_is_credible(fleet)


def test_a_suspect_counts_before_it_is_lost_so_that_the_first_of_many_is_not_acted_on() -> None:
    first, *rest = silent_ones(6, apart_s=1.5)
    fleet = fleet_of(20, first, *(replace(view, contact=Contact.SUSPECT) for view in rest))
    assert not absence_is_credible(fleet)
    assert look(None, fleet).incident is not None


def test_a_stall_that_makes_only_suspects_wakes_nobody_though_nothing_is_concluded_meanwhile() -> None:
    fleet = fleet_of(20, *silent_ones(20, contact=Contact.SUSPECT))
    assert look(None, fleet) == BreakerOutcome(incident=None)
    assert not absence_is_credible(fleet)


def test_silences_that_began_far_apart_are_not_one_event() -> None:
    apart = tuple(lost(f"gpu-{number:02d}", heard_at=NOW - 20 - number * (WINDOW_S + 1)) for number in range(1, 7))
    assert absence_is_credible(fleet_of(20, *apart))


def test_nodes_that_were_silent_long_before_are_no_part_of_the_fleet_that_counts() -> None:
    # 12 of 20 are switched off since yesterday; 3 of the 8 that are left fall silent at once.
    off = tuple(lost(f"gpu-{number:02d}", heard_at=NOW - 86400 - number * 1000) for number in range(9, 21))
    assert len(too_many_at_once(fleet_of(20, *silent_ones(3), *off))) == 3


def test_nobody_looking_is_not_many_nodes_silent() -> None:
    assert absence_is_credible(fleet_of(20, *silent_ones(20, contact=Contact.UNOBSERVED)))


def test_stays_open_and_grows_without_a_second_page() -> None:
    incident = opened(20, 6)
    again = look(incident, fleet_of(20, *silent_ones(6)))
    assert again == BreakerOutcome(incident=incident)
    more = look(incident, fleet_of(20, *silent_ones(9)))
    assert more.incident is not None
    assert (more.incident.id, len(more.incident.nodes), more.page) == (incident.id, 9, "")
    assert "fell silent too" in more.entries[0].text


def test_contact_that_is_back_is_told_and_the_breaker_still_waits_for_a_human() -> None:
    incident = opened()
    half = look(incident, fleet_of(20, *silent_ones(2)))
    assert half.incident == incident
    back = look(incident, fleet_of(20))
    assert back.incident is not None
    assert back.incident.state is BreakerState.CONTACT_RESTORED
    assert not back.incident.ended
    assert "until an operator re-arms it" in back.entries[0].text
    assert look(back.incident, fleet_of(20)) == BreakerOutcome(incident=back.incident)


def test_contact_is_not_called_restored_while_nobody_can_see() -> None:
    incident = opened()
    assert look(incident, fleet_of(20, *silent_ones(20, contact=Contact.UNOBSERVED))).incident == incident


def test_a_second_silence_of_the_same_nodes_is_told() -> None:
    restored = replace(opened(), state=BreakerState.CONTACT_RESTORED)
    again = look(restored, fleet_of(20, *silent_ones(20)))
    assert again.incident is not None
    assert again.incident.state is BreakerState.OPEN
    assert "once more" in again.entries[0].text


def test_an_open_breaker_forbids_to_believe_in_any_absence() -> None:
    assert not absence_is_credible(fleet_of(20, *silent_ones(1), breaker_open=True))


def test_after_rearming_the_silences_that_were_looked_at_are_believed_and_new_ones_open_it_again() -> None:
    outcome = rearm(opened(), by="ana", now=NOW)
    assert outcome.incident is not None
    assert outcome.incident.ended
    assert (outcome.incident.rearmed_by, outcome.incident.rearmed_at) == ("ana", NOW)
    assert outcome.entries[0].kind is EntryKind.OPERATOR
    known = fleet_of(20, *silent_ones(20), rearmed_at=NOW)
    assert absence_is_credible(known)
    assert look(None, known) == BreakerOutcome(incident=None)
    fresh = tuple(replace(view, last_heard_at=NOW + 5) for view in silent_ones(20))
    assert not absence_is_credible(fleet_of(20, *fresh, rearmed_at=NOW))


_silences = st.lists(
    st.tuples(st.sampled_from([Contact.SEEN, Contact.SUSPECT, Contact.LOST, Contact.UNOBSERVED]), st.floats(0, 200)),
    min_size=1,
    max_size=25,
)


@given(silences=_silences, turned=st.booleans())
def test_opens_exactly_when_some_window_holds_at_least_3_and_30_percent(
    silences: list[tuple[Contact, float]], turned: bool
) -> None:
    views = tuple(
        node(f"gpu-{number}", contact=contact, last_heard_at=NOW - ago)
        for number, (contact, ago) in enumerate(silences)
    )
    found = too_many_at_once(FleetSnapshot(nodes=views[::-1] if turned else views))
    silent = [view for view in views if view.contact in (Contact.SUSPECT, Contact.LOST)]
    heard = {view.name: view.last_heard_at or 0.0 for view in views}

    def is_too_many(began: float) -> bool:
        together = [view for view in silent if began <= heard[view.name] <= began + WINDOW_S]
        fleet = [view for view in views if view.contact is Contact.SEEN or heard[view.name] >= began]
        return len(together) >= max(AT_LEAST, SHARE * len(fleet))

    assert bool(found) == any(is_too_many(heard[view.name]) for view in silent)
