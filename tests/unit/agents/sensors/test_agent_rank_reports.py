"""Datagrams of ranks are checked field by field, since ranks are not trusted."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.sensors.rank_reports import (
    MAX_REPORT_BYTES,
    FinishedSaid,
    PhaseSaid,
    PokeSaid,
    ProbeSaid,
    ResumedSaid,
    SavedSaid,
    StepSaid,
    parse_log_line,
    parse_report,
)

GOOD = {"kind": "step", "job": "j", "generation": 1, "rank": 0, "pid": 7, "at": 1.5, "step": 3, "loss": 0.25}


def said(**changes: object) -> object:
    fields = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    return parse_report(json.dumps(fields).encode())


def test_reads_every_kind() -> None:
    assert said() == StepSaid(job="j", generation=1, rank=0, at=1.5, step=3, loss=0.25)
    probed = said(probe={"digests": {"model": "aa"}, "unmoved": ["model"]})
    assert isinstance(probed, StepSaid) and probed.probe == ProbeSaid(digests={"model": "aa"}, unmoved=["model"])
    assert said(probe={"digests": {"model": 3}}) is None
    assert said(probe={"digests": {}, "unmoved": ["part"] * 65}) is None
    assert isinstance(said(kind="resumed", saved_digest={"model": "aa"}, live_digest={}), ResumedSaid)
    assert isinstance(said(kind="saved", directory="d", size_bytes=1, world_size=2), SavedSaid)
    assert isinstance(said(kind="finished"), FinishedSaid)
    assert isinstance(said(kind="phase", phase="evaluation"), PhaseSaid)
    assert isinstance(said(kind="poke"), PokeSaid)


def test_takes_a_loss_that_is_no_number() -> None:
    report = said(loss=float("nan"))
    assert isinstance(report, StepSaid)
    assert report.loss is not None
    assert math.isnan(report.loss)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "shell"},
        {"kind": "phase", "phase": "holiday"},
        {"kind": "phase"},
        {"kind": ...},
        {"job": 3},
        {"job": ""},
        {"job": "x" * 201},
        {"generation": 0},
        {"generation": True},
        {"generation": "1"},
        {"rank": -1},
        {"rank": None},
        {"step": 0},
        {"step": 1.5},
        {"step": 2**70},
        {"at": "now"},
        {"at": float("nan")},
        {"at": float("inf")},
        {"loss": "low"},
        {"kind": "saved", "directory": "d" * 5000, "size_bytes": 1, "world_size": 1},
        {"kind": "saved", "directory": "d", "size_bytes": -1, "world_size": 1},
        {"kind": "resumed", "live_digest": {"model": 3}},
        {"kind": "resumed", "live_digest": {str(number): "a" for number in range(100)}},
    ],
)
def test_drops_what_is_malformed(changes: dict[str, object]) -> None:
    assert said(**changes) is None


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 50_000, b" " * (MAX_REPORT_BYTES + 1)]
)
def test_drops_what_is_no_report_at_all(raw: bytes) -> None:
    assert parse_report(raw) is None
    assert parse_log_line(raw, job="j") is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_never_raises(value: object) -> None:
    parse_report(json.dumps(value).encode())
    parse_report(json.dumps({**GOOD, "loss": value, "epoch": value}).encode())


def test_log_lines_need_no_job_and_other_lines_are_passed_over() -> None:
    line = {name: value for name, value in GOOD.items() if name != "job"}
    assert parse_log_line(json.dumps({**line, "loss_hex": "0x1p-2"}).encode(), job="mine") == StepSaid(
        job="mine", generation=1, rank=0, at=1.5, step=3, loss=0.25
    )
    assert parse_log_line(json.dumps({**line, "kind": "start", "cmd": "x"}).encode(), job="mine") is None


NUMBERS = {
    "epoch_size": 60, "indices_digest": "00ffee1234567890", "order_digest": "00ffee1234567890", "samples": 4,
    "tokens": 4096, "parameter_norm": 31.5, "data_s": 0.01, "forward_backward_s": 0.2, "optimizer_s": 0.03,
    "wait_s": 0.04, "checkpoint_s": 0.5, "memory_bytes": 2**40, "gpu_memory_bytes": 2**37,
}  # fmt: skip


def test_step_brings_its_samples_its_split_and_its_memory_and_may_leave_them_out() -> None:
    report = said(**NUMBERS)
    assert isinstance(report, StepSaid)
    assert {name: getattr(report, name) for name in NUMBERS} == NUMBERS
    older = said()
    assert isinstance(older, StepSaid)
    assert all(getattr(older, name) is None for name in NUMBERS)


@pytest.mark.parametrize("digest", ["", "00FFEE1234567890", "0" * 15, "0" * 17, 7, "zz00000000000000"])
def test_checksum_that_is_none_is_dropped_with_its_report(digest: object) -> None:
    assert said(indices_digest=digest) is None
