"""Spans and checksums from the wire to the receipt: what ranks said of their samples is what the ledger goes by."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agents.protocol.messages import StepReport, StepReports
from recovery import jobs, queries
from recovery.domain.receipt import Receipt
from recovery.models import IncidentRow, Job, StepRow
from recovery.store import from_json
from tests.fakes.told_fleet import ToldFleet
from tests.integration.api_rows import RECEIPT
from tests.integration.test_recovery_pipeline import SPEC, kill_and_fence, replay, running

pytestmark = pytest.mark.django_db(transaction=True)


def recover(fleet: ToldFleet, job: Job) -> IncidentRow:
    kill_and_fence(fleet, job, running(fleet, job))
    return replay(fleet, job)


def checksums(job: Job, generation: int, steps: range, *, rank: int, digest: int, order: int) -> None:
    StepRow.objects.filter(job=job, generation_number=generation, step__in=steps, rank=rank).update(
        indices_digest=f"{digest:016x}", order_digest=f"{order:016x}"
    )


def test_receipt_quotes_the_ledger_of_the_whole_line(job: Job, fleet: ToldFleet) -> None:
    incident = recover(fleet, job)
    samples = incident.receipt["samples"]
    assert (samples["steps"], samples["samples"], samples["replayed"]) == (32, 256, 80)
    assert (samples["skipped"], samples["repeated"], samples["unknown_steps"], samples["findings"]) == (0, 0, 0, [])
    assert (samples["first"], samples["last"]) == ({"epoch": 0, "position": 0}, {"epoch": 0, "position": 256})
    assert samples["sentence"] == (
        "256 samples in 32 steps, from position 0 of epoch 0 to 256 of epoch 0: none skipped and none repeated; "
        "80 were trained on again since their steps were lost."
    )
    receipt = from_json(incident.receipt, Receipt)
    assert receipt.samples is not None and receipt.samples.proven
    assert queries.job_samples(job.id) == receipt.samples


def test_loader_that_lost_one_sample_while_its_spans_went_on_is_told_by_the_checksums(
    job: Job, fleet: ToldFleet
) -> None:
    recover(fleet, job)
    for generation, steps in ((1, range(1, 31)), (2, range(21, 33))):
        for rank in (0, 1):
            checksums(job, generation, steps, rank=rank, digest=2**64 - 1, order=2**64 - 1)
    ledger = queries.job_samples(job.id)
    assert ledger.proven and ledger.checked_steps == 32
    checksums(job, 2, range(25, 33), rank=1, digest=77, order=2**64 - 1)
    ledger = queries.job_samples(job.id)
    assert not ledger.proven and (ledger.skipped, ledger.repeated) == (0, 0)
    assert any(finding.startswith("Step 25: 1 of 2 ranks had other samples") for finding in ledger.findings)
    assert any("Step 25: the batch of generation 2 held other samples" in finding for finding in ledger.findings)
    assert not any("Step 24" in finding for finding in ledger.findings)


def test_checksums_of_another_world_size_are_compared_as_sums(job: Job, fleet: ToldFleet) -> None:
    recover(fleet, job)
    checksums(job, 1, range(1, 31), rank=0, digest=2**64 - 5, order=2**64 - 5)
    checksums(job, 1, range(1, 31), rank=1, digest=12, order=12)
    checksums(job, 2, range(21, 33), rank=0, digest=3, order=3)
    checksums(job, 2, range(21, 33), rank=1, digest=4, order=4)
    assert queries.job_samples(job.id).proven
    StepRow.objects.filter(job=job, generation_number=2, rank=1).update(indices_digest="")
    assert queries.job_samples(job.id).proven, "a rank that did not say leaves nothing to compare"


def test_skips_and_disagreements_are_found_in_the_rows(job: Job, fleet: ToldFleet) -> None:
    recover(fleet, job)
    StepRow.objects.filter(job=job, generation_number=2, step__gt=30).update(span_start=400, span_stop=408)
    StepRow.objects.filter(job=job, generation_number=2, step=22, rank=1).update(span_stop=177)
    ledger = queries.job_samples(job.id)
    assert ledger.skipped == 400 - 240
    assert "Step 22: the ranks named different samples." in ledger.findings


def test_steps_without_a_report_are_unknown_and_not_skipped(job: Job, fleet: ToldFleet) -> None:
    recover(fleet, job)
    StepRow.objects.filter(job=job, generation_number=1, step=5).delete()
    StepRow.objects.filter(job=job, generation_number=1, step=9).update(span_start=None, span_stop=None)
    ledger = queries.job_samples(job.id)
    assert (ledger.unknown_steps, ledger.skipped, ledger.repeated, ledger.proven) == (2, 0, 0, False)


def test_what_a_generation_off_the_line_did_is_no_part_of_the_ledger(job: Job, fleet: ToldFleet) -> None:
    recover(fleet, job)
    assert queries.job_samples(job.id).samples == 256
    other = jobs.submit_job({**SPEC, "name": "other"}, owner="tests")
    assert queries.job_samples(other.id).sentence.startswith("No rank reported")


def test_receipt_of_an_earlier_release_is_read_without_a_ledger() -> None:
    assert "samples" not in RECEIPT
    assert from_json(RECEIPT, Receipt).samples is None


def test_all_that_a_step_says_is_stored_and_shown(job: Job, fleet: ToldFleet) -> None:
    running(fleet, job)
    said: dict[str, Any] = {
        "samples": 4, "tokens": 4096, "parameter_norm": 31.5, "data_s": 0.01, "forward_backward_s": 0.2,
        "optimizer_s": 0.03, "wait_s": 0.04, "checkpoint_s": 0.5, "memory_bytes": 2**40, "gpu_memory_bytes": 2**37,
    }  # fmt: skip
    hidden: dict[str, Any] = {"epoch_size": 2**40, "indices_digest": "f" * 16, "order_digest": "0" * 16}
    step = StepReport(rank=0, step=31, at=time.time(), loss=1.0, **said, **hidden)
    fleet.nodes["gpu-01"].tell(StepReports(job=job.id, generation=1, steps=[step]))
    point = queries.job_metrics(job.id).points[-1]
    assert point.step == 31 and {name: getattr(point, name) for name in said} == said
    row = StepRow.objects.get(step=31)
    assert {name: getattr(row, name) for name in hidden} == hidden
    split = queries.step_time_split(job.id)
    assert split is None, "no step told how long it took"
    StepRow.objects.filter(job=job).update(step_time_s=0.3)
    split = queries.step_time_split(job.id)
    assert split is not None and (split.steps, split.memory_bytes) == (31, 2**40)
    parts = {part.name: part for part in split.parts}
    assert list(parts) == ["data", "forward_backward", "optimizer", "wait", "checkpoint", "other"]
    assert abs(split.seconds - (0.3 + 0.5 / 31)) < 1e-9
    assert abs(parts["optimizer"].seconds - 0.03 / 31) < 1e-9
    assert abs(sum(part.percent for part in split.parts) - 100) < 0.1
    before = queries.job_metrics(job.id).points[0]
    assert all(getattr(before, name) is None for name in said), "unknown, not zero"
