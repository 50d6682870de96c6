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


def refuse(there: Room, *, part: int = 100, copies: int = 1, borrowed: int = 0, untouched: int = 0) -> str:
    return refuse_budget(
        there,
        part_bytes=part * MIB,
        copies=copies,
        borrowed_bytes=borrowed * MIB,
        untouched_bytes=untouched * MIB,
    )


def test_three_snapshots_that_leave_a_tenth_free_fit() -> None:
    assert refuse(room(), part=300) == ""
    assert refuse(room(), part=301) != ""


def test_two_of_the_partners_parts_count_as_well() -> None:
    assert refuse(room(), part=180, copies=2) == ""
    assert "3 snapshots of 181 MiB and 2 of the partner node need 905 MiB" in refuse(room(), part=181, copies=2)


def test_what_a_resume_reads_of_other_nodes_has_to_fit_beside_what_is_kept() -> None:
    """Eight nodes under data parallelism: each writes an eighth, and loads all."""
    assert refuse(room(), part=100, borrowed=700) == ""
    said = refuse(room(), part=101, borrowed=707)
    assert "2 snapshots of 101 MiB, and 707 MiB of other nodes' parts at a resume, need 909 MiB in" in said


def test_small_tmpfs_is_named_with_its_numbers() -> None:
    said = refuse(room(tmpfs=64))
    assert "3 snapshots of 100 MiB need 300 MiB in /dev/shm/x, where 64 MiB are free" in said


def test_memory_that_saving_has_reserved_is_not_free() -> None:
    assert refuse(room(memory=400)) == ""
    said = refuse(room(memory=400), untouched=110)
    assert "need 300 MiB of memory, and 400 MiB are free, of which the copy for saving takes 110 MiB" in said


def test_unknown_memory_is_no_reason_to_refuse() -> None:
    assert refuse(room(memory=None)) == ""
