"""The files of a lease: contact never falls and never follows a link, terms only rise."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from agents.policy import Account
from agents.protocol.messages import LeaseTerms
from agents.supervisor.lease import Lease, longest_terms

ME = Account(name="me", uid=os.geteuid(), gid=os.getegid(), home="/")
TERMS = LeaseTerms(setup_s=100.0, compile_s=200.0, step_s=5.0, save_s=10.0, evaluation_s=20.0)


def contact(directory: Path) -> int:
    return int(struct.unpack("<Q", (directory / "contact").read_bytes())[0])


def created(directory: Path, contact_ns: int = 1000) -> Lease:
    return Lease.create(directory, account=ME, ranks=3, terms=TERMS, contact_ns=contact_ns)


def test_makes_all_files_before_the_runner_starts(tmp_path: Path) -> None:
    created(tmp_path).close()
    assert contact(tmp_path) == 1000
    assert (tmp_path / "progress").read_bytes() == bytes(48)
    assert json.loads((tmp_path / "lease.json").read_text()) == {
        "setup_s": 100.0,
        "compile_s": 200.0,
        "step_s": 5.0,
        "save_s": 10.0,
        "evaluation_s": 20.0,
    }


def test_contact_never_falls(tmp_path: Path) -> None:
    lease = created(tmp_path)
    lease.note_contact(2000)
    lease.note_contact(1500)
    assert contact(tmp_path) == 2000
    lease.close()
    again = Lease.open(tmp_path, uid=ME.uid, terms=TERMS)
    again.note_contact(1999)
    assert contact(tmp_path) == 2000
    again.note_contact(2001)
    assert contact(tmp_path) == 2001
    again.close()


def test_a_contact_of_the_future_was_written_by_the_job_and_does_not_count(tmp_path: Path) -> None:
    created(tmp_path, contact_ns=2**63).close()
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    lease = Lease.open(tmp_path, uid=ME.uid, terms=TERMS)
    lease.note_contact(now_ns)
    assert contact(tmp_path) == now_ns
    lease.close()


def test_terms_rise_one_by_one_and_are_replaced_as_a_whole(tmp_path: Path) -> None:
    lease = created(tmp_path)
    assert lease.raise_terms(LeaseTerms(setup_s=1.0, compile_s=1.0, step_s=50.0, save_s=1.0, evaluation_s=21.0))
    raised = json.loads((tmp_path / "lease.json").read_text())
    assert (raised["setup_s"], raised["step_s"], raised["save_s"], raised["evaluation_s"]) == (100.0, 50.0, 10.0, 21.0)
    assert not lease.raise_terms(TERMS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contact", "lease.json", "progress"]
    lease.close()


def test_terms_that_cannot_be_written_are_not_believed(tmp_path: Path) -> None:
    lease = created(tmp_path)
    (tmp_path / "lease.json").unlink()
    (tmp_path / "lease.json").mkdir()
    with pytest.raises(OSError, match=r"lease\.json"):
        lease.raise_terms(LeaseTerms(step_s=50.0))
    assert lease.terms == TERMS
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".lease")]
    lease.close()


def test_opens_nothing_but_a_plain_file_of_the_ranks_account(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    run = tmp_path / "run"
    run.mkdir()
    created(run).close()
    (run / "contact").unlink()
    (run / "contact").symlink_to(precious)
    with pytest.raises(OSError, match="contact"):
        Lease.open(run, uid=ME.uid, terms=TERMS)
    (run / "contact").unlink()
    os.link(precious, run / "contact")
    with pytest.raises(PermissionError):
        Lease.open(run, uid=ME.uid, terms=TERMS)
    (run / "contact").unlink()
    os.mkfifo(run / "contact")
    with pytest.raises(OSError, match="contact"):
        Lease.open(run, uid=ME.uid, terms=TERMS)
    (run / "contact").unlink()
    (run / "contact").write_bytes(bytes(8))
    with pytest.raises(PermissionError):
        Lease.open(run, uid=ME.uid + 1, terms=TERMS)
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(OSError, match="link"):
        Lease.open(tmp_path / "link", uid=ME.uid, terms=TERMS)
    assert precious.read_bytes() == b"precious"


def test_does_not_take_over_files_that_somebody_put_there(tmp_path: Path) -> None:
    (tmp_path / "contact").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        created(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_the_longer_limit_counts_for_each_phase() -> None:
    assert longest_terms(TERMS, LeaseTerms(setup_s=1.0, compile_s=1.0, step_s=9.0, save_s=1.0, evaluation_s=1.0)) == (
        LeaseTerms(setup_s=100.0, compile_s=200.0, step_s=9.0, save_s=10.0, evaluation_s=20.0)
    )
