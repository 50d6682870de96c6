from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.timeline import Entry, EntryKind, chain_hash, join_names

ENTRY = Entry(
    kind=EntryKind.DECISION, at=12.5, text="Moved job llm-7 to gpu-02.", data={"nodes": ["gpu-02"], "step": 3}
)


def chain(entries: list[Entry]) -> list[str]:
    hashes: list[str] = []
    for seq, entry in enumerate(entries, start=1):
        hashes.append(chain_hash(previous=hashes[-1] if hashes else "", seq=seq, entry=entry))
    return hashes


@pytest.mark.parametrize(
    "edited",
    [
        replace(ENTRY, text="Moved job llm-7 to gpu-03."),
        replace(ENTRY, at=12.6),
        replace(ENTRY, kind=EntryKind.FACT),
        replace(ENTRY, data={"nodes": ["gpu-02"], "step": 4}),
    ],
)
def test_an_edited_entry_breaks_its_own_and_every_later_hash(edited: Entry) -> None:
    before = chain([ENTRY, ENTRY, ENTRY])
    after = chain([ENTRY, edited, ENTRY])
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert before[2] != after[2]


def test_a_dropped_or_moved_entry_breaks_the_chain() -> None:
    first, second = ENTRY, replace(ENTRY, text="Then this.")
    assert chain([first, second])[-1] != chain([second])[-1]
    assert chain([first, second])[-1] != chain([second, first])[-1]


def test_equal_entries_have_different_hashes_at_different_places() -> None:
    assert len(set(chain([ENTRY] * 4))) == 4


def test_hash_does_not_depend_on_the_order_of_keys() -> None:
    turned = replace(ENTRY, data={"step": 3, "nodes": ["gpu-02"]})
    assert chain_hash(previous="", seq=1, entry=ENTRY) == chain_hash(previous="", seq=1, entry=turned)


@given(texts=st.lists(st.text(max_size=20), min_size=2, max_size=6, unique=True), place=st.integers(0, 5))
def test_any_edit_is_seen_in_the_last_hash(texts: list[str], place: int) -> None:
    entries = [replace(ENTRY, text=text) for text in texts]
    edited = list(entries)
    edited[place % len(edited)] = replace(ENTRY, text=texts[place % len(texts)] + "!")
    assert chain(entries)[-1] != chain(edited)[-1]


@pytest.mark.parametrize(
    ("names", "words"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (("a", "b", "c"), "a, b and c")]
)
def test_names_are_joined_as_in_a_sentence(names: list[str], words: str) -> None:
    assert join_names(names) == words
