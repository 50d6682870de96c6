"""The ledger of a job's samples, as its state stands on them now."""

from __future__ import annotations

from recovery.domain.lineage import lineage_limits
from recovery.domain.sample_ledger import SampleLedger, audit_samples
from recovery.queries.jobs import find_job
from recovery.store.samples import load_ledger
from recovery.store.situations import load_generations


def job_samples(job_id: str) -> SampleLedger:
    """What the job's newest sound generation and its line were trained on. Raises `NotFound`."""
    job = find_job(job_id)
    generations = load_generations(job)
    tip = max(lineage_limits(generations), default=None)
    return audit_samples(()) if tip is None else load_ledger(job, generations, generation=tip)
