"""The outbox on real disks: ends of any kind, damage, and disks that are full, limited, read-only or gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.outbox import OUTBOX_FILE, DiskOutbox
from agents.protocol.codec import agent_frames
from agents.protocol.messages import Message, OutboxGap, RankStarted, StepReport, StepReports

PROJECT = Path(__file__).resolve().parents[2]
MS_NOSUID, MS_RDONLY, MS_REMOUNT, MNT_DETACH = 2, 1, 32, 2


def fact(number: int, job: str = "j") -> RankStarted:
    return RankStarted(job=job, generation=1, rank=0, pid=number, at=0.0)


def opened(directory: Path, **limits: int) -> DiskOutbox:
    outbox = DiskOutbox(directory, **limits)
    outbox.open()
    return outbox


def waiting(outbox: DiskOutbox) -> list[tuple[int, Message]]:
    decoder = agent_frames()
    return [decoder.decode(frame) for _, frame in outbox.frames(after=0, through=10**9, max_bytes=10**9)]


def pids(outbox: DiskOutbox) -> list[int]:
    return [message.pid for _, message in waiting(outbox) if isinstance(message, RankStarted)]


def gaps(outbox: DiskOutbox) -> list[str]:
    return [message.reason for _, message in waiting(outbox) if isinstance(message, OutboxGap)]


@contextlib.contextmanager
def small_disk(place: Path, *, size: str) -> Iterator[Path]:
    """A file system of its own, so that it can really be full."""
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", bytes(place), b"tmpfs", MS_NOSUID, f"size={size}".encode()) != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield place
    finally:
        libc.umount2(bytes(place), MNT_DETACH)


# --- Lives ---


def test_goes_on_after_any_end_with_the_same_name_and_numbers(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for number in (1, 2, 3):
        first.add(fact(number))
    # Not closed: an agent that is killed closes nothing.
    second = opened(tmp_path)
    assert second.outbox_id == first.outbox_id
    assert waiting(second) == [(number, fact(number)) for number in (1, 2, 3)]
    assert second.add(fact(4)) == 4
    assert second.told.of("j", 1).started == {0: 4}


def test_survives_sigkill_in_the_midst_of_adding(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agents.outbox import DiskOutbox\n"
        "from agents.protocol.messages import RankStarted\n"
        "outbox = DiskOutbox(Path(sys.argv[1])); outbox.open()\n"
        "for number in range(1, 10**9):\n"
        "    outbox.add(RankStarted(job='j', generation=1, rank=0, pid=number, at=0.0))\n"
        "    print(number, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=PROJECT)
    assert process.stdout is not None
    for _ in range(500):
        process.stdout.readline()
    process.kill()
    said = 500 + len(process.stdout.read().splitlines())
    process.wait()
    found = pids(opened(tmp_path))
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= said - 1, "what was said to be added is there"


def test_acknowledged_messages_leave_the_disk(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    for number in range(1, 2001):
        outbox.add(fact(number, job="j" * 200))
        if number % 50 == 0:
            outbox.acknowledge(number - 10)
    for number in range(2001, 8001):
        outbox.add(fact(number, job="j" * 200))
        outbox.acknowledge(number)
    assert (tmp_path / OUTBOX_FILE).stat().st_size < 1_100_000
    again = opened(tmp_path)
    again.begin(8000)
    assert waiting(again) == []
    assert again.add(fact(1)) == 8001


def test_bounds_hold_on_disk_and_over_lives(tmp_path: Path) -> None:
    outbox = opened(tmp_path, limit=50)
    for number in range(1, 501):
        outbox.add(StepReports(job="j", generation=1, steps=[StepReport(rank=0, step=number, at=0.0)]))
    again = opened(tmp_path, limit=50)
    assert waiting(again) == waiting(outbox)
    assert len(again) <= 50
    assert gaps(again)
    assert again.told.of("j", 1).step == {0: 500}


def test_the_file_is_private(tmp_path: Path) -> None:
    opened(tmp_path).add(fact(1))
    assert (tmp_path / OUTBOX_FILE).stat().st_mode & 0o777 == 0o600


# --- Damage ---


@pytest.mark.parametrize("where", ["magic", "record", "order", "empty", "version", "directory"])
def test_damaged_file_is_set_aside_and_told(tmp_path: Path, where: str) -> None:
    first = opened(tmp_path)
    for number in (1, 2, 3):
        first.add(fact(number))
    path = tmp_path / OUTBOX_FILE
    raw = bytearray(path.read_bytes())
    match where:
        case "magic":
            raw[0] ^= 1
        case "record":
            raw[len(raw) // 2] ^= 0x10
        case "order":
            end = raw.rindex(b"rank_started") - len(raw)
            raw += raw[end - 60 :]
        case "empty":
            raw.clear()
        case "version":
            raw[raw.index(b"1")] = ord("7")
    path.write_bytes(raw)
    if where == "directory":
        path.unlink()
        path.mkdir()
    second = opened(tmp_path)
    assert second.outbox_id != first.outbox_id
    assert pids(second) == []
    (gap,) = gaps(second)
    assert "damaged" in gap
    assert second.add(fact(9)) == 2
    assert second.on_disk
    if where != "directory":
        assert (tmp_path / "outbox.damaged").read_bytes() == raw
    third = opened(tmp_path)
    assert (third.outbox_id, waiting(third)) == (second.outbox_id, waiting(second))


def test_last_message_that_was_half_written_is_told_as_lost(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for number in (1, 2, 3):
        first.add(fact(number))
    path = tmp_path / OUTBOX_FILE
    path.write_bytes(path.read_bytes()[:-5])
    second = opened(tmp_path)
    assert second.outbox_id == first.outbox_id
    assert pids(second) == [1, 2]
    assert len(gaps(second)) == 1
    assert second.add(fact(4)) == 4
    assert waiting(opened(tmp_path)) == waiting(second)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / OUTBOX_FILE).symlink_to(precious)
    outbox = opened(tmp_path)
    outbox.add(fact(1))
    assert precious.read_text() == "precious"
    assert len(gaps(outbox)) == 1


# --- Disks in trouble ---


def test_full_disk_costs_no_message_and_is_told_at_once(tmp_path: Path) -> None:
    clock = [0.0]
    with small_disk(tmp_path / "disk", size="64k") as disk:
        outbox = DiskOutbox(disk, now=lambda: clock[0])
        outbox.open()
        outbox.add(fact(1))
        (disk / "filler").write_bytes(bytes(40 << 10))
        number = 1
        while outbox.on_disk:
            number += 1
            outbox.add(fact(number, job="j" * 150))
            assert number < 1000
        outbox.add(fact(number + 1))
        assert pids(outbox) == list(range(1, number + 2)), "everything is still there"
        (gap,) = gaps(outbox)
        assert "No space left" in gap
        # The next life learns that the memory of this one held more, though the disk was full when it ended.
        after = opened(disk)
        assert after.outbox_id == outbox.outbox_id
        assert any("ended while" in reason for reason in gaps(after))
        # This one comes back to its disk by itself.
        (disk / "filler").unlink()
        outbox.look()
        assert not outbox.on_disk
        clock[0] = 11.0
        outbox.look()
        assert outbox.on_disk
        assert waiting(opened(disk)) == waiting(outbox)


def test_disk_that_is_full_from_the_start_is_told(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="16k") as disk:
        with contextlib.suppress(OSError):
            (disk / "filler").write_bytes(bytes(16 << 10))
        outbox = opened(disk)
        outbox.add(fact(1))
        assert not outbox.on_disk
        assert pids(outbox) == [1]
        assert len(gaps(outbox)) == 1


def test_read_only_disk_still_gives_what_it_holds(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with small_disk(tmp_path / "disk", size="64k") as disk:
        first = opened(disk)
        first.add(fact(1))
        first.close()
        assert libc.mount(None, bytes(disk), None, MS_REMOUNT | MS_RDONLY | MS_NOSUID, None) == 0
        second = opened(disk)
        assert second.outbox_id == first.outbox_id
        second.add(fact(2))
        assert pids(second) == [1, 2]
        (gap,) = gaps(second)
        assert "Read-only" in gap


def test_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        number = 0
        while outbox.on_disk and number < 1000:
            number += 1
            outbox.add(fact(number, job="j" * 100))
        outbox.add(fact(number + 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not outbox.on_disk
    assert pids(outbox) == list(range(1, number + 2))
    assert "File too large" in gaps(outbox)[0]
    again = opened(tmp_path)
    assert pids(again) == list(range(1, number)), "the record that did not fit left nothing behind"


def test_directory_that_vanishes_is_survived(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    outbox = opened(state)
    outbox.add(fact(1))
    outbox.look()
    assert gaps(outbox) == []
    (state / OUTBOX_FILE).unlink()
    outbox.look()
    assert pids(opened(state)) == [1], "the file is there again"
    (state / OUTBOX_FILE).unlink()
    state.rmdir()
    outbox.look()
    outbox.add(fact(2))
    assert not outbox.on_disk
    assert "No such file" in gaps(outbox)[0]
    assert pids(outbox) == [1, 2]


def test_a_server_that_holds_more_than_the_disk_does_not_swallow_new_messages(tmp_path: Path) -> None:
    opened(tmp_path).add(fact(1))
    after = opened(tmp_path)
    after.add(fact(2))
    after.begin(5)
    assert pids(after) == [2]
    assert [seq for seq, _ in waiting(after)] == [6, 7]
    assert waiting(opened(tmp_path)) == waiting(after)


def test_loss_outside_the_outbox_is_told_after_the_end_of_the_agent_too(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    outbox.add(fact(1))
    outbox.tell_gap("rank 0 said more than can be read again")
    outbox.close()
    again = opened(tmp_path)
    assert gaps(again) == ["rank 0 said more than can be read again"]
    assert pids(again) == [1]
    again.close()
