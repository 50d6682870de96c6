from __future__ import annotations

from dataclasses import replace

from domain_scenes import fenced, generation, plan
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.plan import CheckpointRef
from recovery.domain.retention import choose_pins
from recovery.domain.trust import UNKNOWN, Health, Integrity, Trust


def ref(number: int, step: int) -> CheckpointRef:
    return CheckpointRef(generation=number, step=step)


CLEAN = Trust(health=Health.CLEAN)
REHASHED = Trust(integrity=Integrity.REHASHED)


def test_the_newest_of_each_class_is_pinned_and_the_newest_of_all_needs_no_pin() -> None:
    trust = {
        ref(1, 10): Trust(integrity=Integrity.TEST_LOADED, health=Health.RESUMED_FROM),
        ref(1, 20): Trust(integrity=Integrity.REHASHED, health=Health.CLEAN),
        ref(1, 30): CLEAN,
        ref(1, 40): REHASHED,
        ref(1, 50): UNKNOWN,
    }
    assert choose_pins(trust, [generation(1)]) == (ref(1, 10), ref(1, 20), ref(1, 30), ref(1, 40))


def test_case_R37_the_last_good_copy_is_pinned_when_the_newest_ones_turn_out_bad() -> None:
    trust = {
        ref(1, 10): Trust(integrity=Integrity.REHASHED, health=Health.CLEAN),
        ref(1, 20): Trust(integrity=Integrity.REHASHED, health=Health.TAINTED),
        ref(1, 30): Trust(integrity=Integrity.DAMAGED),
    }
    assert choose_pins(trust, [generation(1)]) == (ref(1, 10),)


def test_what_the_newest_generation_resumed_from_is_pinned_whatever_is_known_of_it() -> None:
    lines = [fenced(generation(1)), generation(2, of=plan(2, parent=ref(1, 20)))]
    assert choose_pins({ref(1, 20): UNKNOWN, ref(1, 40): CLEAN}, lines) == (ref(1, 20),)


def test_a_good_one_off_the_lineage_is_not_pinned() -> None:
    lines = [fenced(generation(1)), fenced(generation(2, of=plan(2, parent=ref(1, 20))))]
    assert ref(1, 40) not in choose_pins({ref(1, 20): CLEAN, ref(1, 40): CLEAN}, lines)


_trusts = st.builds(Trust, integrity=st.sampled_from(Integrity), health=st.sampled_from(Health))


@given(st.dictionaries(st.integers(0, 9).map(lambda step: ref(1, 10 * step)), _trusts))
def test_whenever_there_is_a_good_copy_the_newest_good_one_is_pinned(trust: dict[CheckpointRef, Trust]) -> None:
    good = [one for one, known in trust.items() if known.good]
    pins = choose_pins(trust, [replace(generation(1))])
    assert not good or max(good) in pins
    assert all(trust[pin].usable for pin in pins)
