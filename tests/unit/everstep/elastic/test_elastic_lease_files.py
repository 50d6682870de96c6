from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from everstep.elastic.lease import Held, Progress, Terms
from everstep.elastic.lease_files import LeaseFiles, LeasePaths, boottime_ns
from everstep.errors import LeaseUnusable


@pytest.fixture
def paths(tmp_path: Path) -> LeasePaths:
    (tmp_path / "contact").write_bytes(struct.pack("<Q", 5))
    (tmp_path / "progress").write_bytes(bytes(2 * 16))
    (tmp_path / "lease.json").write_text(json.dumps({"step_s": 2.0}))
    return LeasePaths(contact=tmp_path / "contact", progress=tmp_path / "progress", terms=tmp_path / "lease.json")


def replace_terms(paths: LeasePaths, text: str) -> None:
    aside = paths.terms.with_suffix(".tmp")
    aside.write_text(text)
    aside.rename(paths.terms)


def test_slots_are_laid_out_as_agents_and_audits_read_them(paths: LeasePaths) -> None:
    files = LeaseFiles(paths)
    files.write_progress(1, Progress(at_ns=7, phase=4, steps=3))
    assert paths.progress.read_bytes() == bytes(16) + struct.pack("<QII", 7, 4, 3)
    assert LeaseFiles(paths).ranks() == [Progress(0, 0, 0), Progress(7, 4, 3)]


def test_contact_is_read_again_each_time(paths: LeasePaths) -> None:
    files = LeaseFiles(paths)
    assert files.contact_ns() == 5
    fd = os.open(paths.contact, os.O_WRONLY)
    os.pwrite(fd, struct.pack("<Q", 2**63 + 1), 0)
    os.close(fd)
    assert files.contact_ns() == 2**63 + 1


def test_file_that_was_cut_short_is_no_news_and_kills_nobody(paths: LeasePaths) -> None:
    files = LeaseFiles(paths)
    files.write_progress(0, Progress(9, 2, 5))
    before = files.ranks()
    paths.contact.write_bytes(b"")
    os.truncate(paths.progress, 3)
    assert files.contact_ns() == 0
    assert files.ranks() == before


def test_ranks_read_what_the_runner_has_judged(paths: LeasePaths) -> None:
    rank, runner = LeaseFiles(paths), LeaseFiles(paths)
    assert rank.kept() is None
    runner.write_kept(Held(sign_ns=11, limit_ns=12))
    assert rank.kept() == Held(sign_ns=11, limit_ns=12)


def test_terms_that_rise_are_taken_over_and_others_are_not(paths: LeasePaths) -> None:
    files = LeaseFiles(paths)
    assert files.terms == Terms(step_s=2.0) and not files.take_raised_terms()
    replace_terms(paths, '{"step_s": 8, "save_s": 1}')
    assert files.take_raised_terms() and files.terms == Terms(step_s=8.0)
    for text in ('{"step_s": 1}', "{", "[]"):
        replace_terms(paths, text)
        assert not files.take_raised_terms() and files.terms == Terms(step_s=8.0)
    paths.terms.unlink()
    assert not files.take_raised_terms()


def test_paths_survive_the_environment_and_half_a_lease_is_refused(paths: LeasePaths) -> None:
    environment = paths.as_environment()
    assert LeasePaths.from_environment(environment) == paths
    assert LeasePaths.from_environment({"PATH": "/bin"}) is None
    for name in environment:
        with pytest.raises(LeaseUnusable, match="all of them, or none"):
            LeasePaths.from_environment({**environment, name: ""})


@pytest.mark.parametrize("missing", ["contact", "progress", "lease.json"])
def test_refuses_a_lease_with_a_file_missing(paths: LeasePaths, missing: str) -> None:
    (paths.terms.parent / missing).unlink()
    with pytest.raises(LeaseUnusable, match=missing):
        LeaseFiles(paths)


def test_clock_counts_on() -> None:
    assert 0 < boottime_ns() <= boottime_ns()
