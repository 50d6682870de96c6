"""Whether what ranks would keep in memory fits."""

from __future__ import annotations

from everstep.checkpoint.memory_budget import Room, refuse_budget

MIB = 1 << 20


def room(*, tmpfs: int = 1000, memory: int | None = 1000) -> Room:
    return Room(
        place="/dev/shm/x",
        tmpfs_bytes=tmpfs * MIB,
        memory_bytes=None if memory is None else memory * MIB,
    )


def refuse(there: Room, *, part: int = 100, copies: int = 1, untouched: int = 0) -> str:
    return refuse_budget(there, part_bytes=part * MIB, copies=copies, untouched_bytes=untouched * MIB)


def test_two_snapshots_that_leave_a_tenth_free_fit() -> None:
    assert refuse(room(), part=450) == ""
    assert refuse(room(), part=451) != ""


def test_partners_parts_count_as_much_again() -> None:
    assert refuse(room(), part=225, copies=2) == ""
    assert "and as much for the partner node need 904 MiB" in refuse(room(), part=226, copies=2)


def test_small_tmpfs_is_named_with_its_numbers() -> None:
    said = refuse(room(tmpfs=64))
    assert "2 snapshots of 100 MiB need 200 MiB in /dev/shm/x, where 64 MiB are free" in said


def test_memory_that_saving_has_reserved_is_not_free() -> None:
    assert refuse(room(memory=300)) == ""
    said = refuse(room(memory=300), untouched=110)
    assert "need 200 MiB of memory, and 300 MiB are free, of which the copy for saving takes 110 MiB" in said


def test_unknown_memory_is_no_reason_to_refuse() -> None:
    assert refuse(room(memory=None)) == ""
