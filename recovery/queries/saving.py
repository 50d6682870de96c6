"""How a job's saving goes: the age of its last good checkpoint, its interval and why, what failed, what was asked."""

from __future__ import annotations

from dataclasses import dataclass

from recovery import checkpoints
from recovery.domain.trust import appraise
from recovery.models import Job, SaveTrouble
from recovery.queries.jobs import find_job
from recovery.queries.moment import moment
from recovery.store.save_intervals import job_interval
from recovery.store.situations import load_generations, load_trust

TROUBLES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LastGoodView:
    """What a fault would cost now, while the job trains."""

    saved_at: float | None
    age_s: float
    limit_s: float
    limit_reason: str
    too_old: bool
    paged_at: float | None


@dataclass(frozen=True, kw_only=True)
class IntervalView:
    """Steps between saves: what the next launch is told, and what `auto` is or would be, with its inputs."""

    wanted: int | str | None
    """What the spec says: steps, `auto`, or None where the script decides."""
    steps: int | None
    """By `auto`; None while too little is measured."""
    interval_s: float | None
    reason: str
    save_cost_s: float | None
    step_time_s: float | None
    mtbf_s: float
    nodes: int
    failures: int
    node_hours: float


@dataclass(frozen=True, kw_only=True)
class TroubleView:
    """A save that failed, was left out, or was slow."""

    generation: int
    rank: int
    step: int
    kind: str
    attempt: int
    reason: str
    at: float


@dataclass(frozen=True, kw_only=True)
class SaveRequestView:
    """The newest wish for a checkpoint now."""

    number: int
    at: float
    by: str
    reason: str
    saved_step: int | None
    """The first checkpoint after it; None while there is none."""


@dataclass(frozen=True, kw_only=True)
class JobSaving:
    job: str
    last_good: LastGoodView | None
    """None while the job does not train."""
    interval: IntervalView
    saves_failed: int
    saves_skipped: int
    troubles: tuple[TroubleView, ...]
    """The newest ones, newest first."""
    request: SaveRequestView | None
    pinned: tuple[str, ...]
    """`<generation>:<step>` of what the ranks may not remove."""


def job_saving(job_id: str, *, now: float | None = None) -> JobSaving:
    """How the saving of one job goes. Raises `NotFound`."""
    job = find_job(job_id)
    at = moment(now)
    troubles = SaveTrouble.objects.filter(job=job)[:TROUBLES_SHOWN]
    return JobSaving(
        job=job.pk,
        last_good=_last_good(job, at),
        interval=_interval(job, at),
        saves_failed=job.saves_failed,
        saves_skipped=job.saves_skipped,
        troubles=tuple(
            TroubleView(
                generation=row.generation_number,
                rank=row.rank,
                step=row.step,
                kind=row.kind,
                attempt=row.attempt,
                reason=row.reason,
                at=row.at,
            )
            for row in troubles
        ),
        request=_request(job),
        pinned=tuple(job.pinned),
    )


def _last_good(job: Job, now: float) -> LastGoodView | None:
    generations = load_generations(job)
    trust = appraise(load_trust(job.pk), generations)
    found = checkpoints.last_good(job.pk, generations, trust, job.spec, now=now)
    if found is None:
        return None
    return LastGoodView(
        saved_at=found.saved_at,
        age_s=found.age_s,
        limit_s=found.limit_s,
        limit_reason=found.reason,
        too_old=found.too_old,
        paged_at=job.last_good_paged_at,
    )


def _interval(job: Job, now: float) -> IntervalView:
    choice = job_interval(job, now=now)
    return IntervalView(
        wanted=job.spec.get("save_every"),
        steps=choice.steps,
        interval_s=choice.interval_s,
        reason=choice.reason,
        save_cost_s=choice.inputs.save_cost_s,
        step_time_s=choice.inputs.step_time_s,
        mtbf_s=choice.mtbf_s,
        nodes=choice.inputs.nodes,
        failures=choice.inputs.failures,
        node_hours=choice.inputs.node_hours,
    )


def _request(job: Job) -> SaveRequestView | None:
    if job.save_requested_at is None:
        return None
    return SaveRequestView(
        number=job.save_request,
        at=job.save_requested_at,
        by=job.save_requested_by,
        reason=job.save_request_reason,
        saved_step=checkpoints.saved_since_request(job),
    )
