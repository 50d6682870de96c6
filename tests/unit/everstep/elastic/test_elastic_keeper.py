"""The keeper's looks, one by one, with real files and no thread: what it writes down and when it gives up."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from everstep.elastic.keeper import LeaseKeeper
from everstep.elastic.lease import NS, Expired
from everstep.elastic.lease_files import LeaseFiles, LeasePaths, boottime_ns
from everstep.errors import LeaseUnusable


def make(directory: Path, *, contact_ns: int, slots: int = 2) -> LeasePaths:
    (directory / "contact").write_bytes(struct.pack("<Q", contact_ns))
    (directory / "progress").write_bytes(bytes(16 * slots))
    (directory / "lease.json").write_text(json.dumps({"setup_s": 60.0}))
    return LeasePaths(contact=directory / "contact", progress=directory / "progress", terms=directory / "lease.json")


def keep(paths: LeasePaths, expiries: list[Expired], *, rank_count: int = 2) -> LeaseKeeper:
    return LeaseKeeper(paths, rank_count=rank_count, ended=frozenset, on_expiry=expiries.append)


def test_first_look_is_written_down_before_any_rank_starts(tmp_path: Path) -> None:
    contact_ns = boottime_ns() - NS
    paths, expiries = make(tmp_path, contact_ns=contact_ns), list[Expired]()
    keep(paths, expiries).start()
    kept = LeaseFiles(paths).kept()
    assert kept is not None and (kept.sign_ns, kept.limit_ns) == (contact_ns, 60 * NS)
    assert expiries == []


def test_runner_that_starts_too_late_does_not_keep_ranks_at_all(tmp_path: Path) -> None:
    expiries: list[Expired] = []
    keep(make(tmp_path, contact_ns=max(1, boottime_ns() - 61 * NS)), expiries).start()
    assert [expired.limit_ns for expired in expiries] == [60 * NS]


@pytest.mark.parametrize("contact_ns", [0, 2**62])
def test_without_a_sensible_contact_the_start_of_the_runner_counts(tmp_path: Path, contact_ns: int) -> None:
    started_ns, expiries = boottime_ns(), list[Expired]()
    paths = make(tmp_path, contact_ns=contact_ns)
    keep(paths, expiries).start()
    kept = LeaseFiles(paths).kept()
    assert kept is not None and started_ns <= kept.sign_ns <= boottime_ns() and expiries == []


def test_refuses_a_progress_file_with_too_few_slots(tmp_path: Path) -> None:
    with pytest.raises(LeaseUnusable, match="too few slots for 3 ranks"):
        keep(make(tmp_path, contact_ns=1), [], rank_count=3)
