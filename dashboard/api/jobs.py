"""Jobs: submit, list, show, stop; their curves and checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Query, Router
from pydantic import Discriminator, Field, Tag

from dashboard.api.callers import caller
from dashboard.api.idempotency import once
from dashboard.api.paging import Cursor, Limit, Page, number_position, page, position
from dashboard.api.values import Document, Moment, ProofDocument, Request
from recovery import checkpoints, jobs, queries
from recovery.domain.instructions import JobState
from recovery.domain.sample_ledger import SampleLedger
from recovery.domain.silence import Contact
from recovery.domain.trust import Health, Integrity
from recovery.errors import CommandRefused
from recovery.queries import JobDetail, JobMetrics, JobSaving

router = Router(tags=["jobs"])


class NodeRange(Request):
    """A job that can go on with fewer nodes."""

    min: int = Field(ge=1, le=10_000)
    max: int = Field(ge=1, le=10_000)
    multiple_of: int = Field(default=1, ge=1, le=10_000)


class PhaseLimits(Request):
    """Seconds without contact to the server and without progress after which ranks are killed on their node."""

    setup_s: float | None = Field(default=None, ge=2, le=86_400)
    compile_s: float | None = Field(default=None, ge=2, le=86_400)
    step_s: float | None = Field(default=None, ge=2, le=86_400)
    save_s: float | None = Field(default=None, ge=2, le=86_400)
    evaluation_s: float | None = Field(default=None, ge=2, le=86_400)


class JobRequest(Request):
    """What to train and how. Captured once: later launches use exactly this."""

    name: str = Field(min_length=1, max_length=200)
    argv: list[str] = Field(min_length=1, max_length=1000, description="Command line; argv[0] is the interpreter.")
    working_directory: str = Field(min_length=1, max_length=4000)
    checkpoint_directory: str = Field(min_length=1, max_length=4000)
    environment: dict[str, str] = Field(default_factory=dict)
    nodes: Annotated[
        Annotated[int, Field(ge=1, le=10_000), Tag("number")] | Annotated[NodeRange, Tag("range")],
        Discriminator(lambda value: "range" if isinstance(value, dict | NodeRange) else "number"),
    ] = Field(default=2, description="A number, or a range within which it may shrink.")
    ranks_per_node: int = Field(default=1, ge=1, le=1024)
    total_steps: int | None = Field(default=None, ge=1)
    user: str = Field(default="", max_length=100, description="Account to run as; empty: the agents' own.")
    stop_limit_s: float = Field(default=30.0, gt=0, le=3600)
    synchronous: bool = Field(default=True, description="No rank finishes a step without all others.")
    phase_limits_s: PhaseLimits = Field(default_factory=PhaseLimits)
    save_every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default=None, description="Steps between saves; `auto`: what costs least; null: the script decides."
    )
    memory_every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default=None,
        description="Steps between snapshots in the nodes' memory; `auto`: as often as they hold training up for less "
        "than 1 %; null: the script decides.",
    )
    memory_partner: bool = Field(default=False, description="Each node's snapshots are kept on another node as well.")
    last_good_limit_s: float | None = Field(
        default=None, gt=0, le=86_400, description="Age of the last good checkpoint at which a human is told."
    )


class JobActionRequest(Request):
    """`checkpoint` saves now; `absolve` says that a tainted checkpoint, named by generation and step, is sound."""

    kind: Literal["stop", "checkpoint", "absolve"]
    reason: str = Field(default="", max_length=400, pattern=r"^[^\x00]*$", description="Of a checkpoint now.")
    generation: int | None = Field(default=None, ge=1, le=2**31 - 1)
    step: int | None = Field(default=None, ge=0, le=2**31 - 1)


class UnseenNodeDocument(Document):
    """A node of the running generation that is not in contact."""

    node: str
    contact: Contact
    since: Moment | None = Field(description="When it was last heard.")
    silent_s: float
    trains_on: bool = Field(description="Its ranks are known to step on, by the progress of their peers.")


class JobDocument(Document):
    id: str
    name: str
    owner: str
    state: str
    state_since: Moment
    reason: str
    generation: int
    last_step: int | None
    total_steps: int | None
    nodes: list[str]
    nodes_min: int
    nodes_max: int
    multiple_of: int
    unseen: list[UnseenNodeDocument]
    behind_since: Moment | None = Field(description="Set while agents know a newer generation than the database.")
    ranks_per_node: int
    submitted_at: Moment
    started_at: Moment | None
    ended_at: Moment | None
    stop_wanted: bool
    open_incident: str | None
    last_checkpoint_step: int | None


class GenerationDocument(Document):
    number: int
    plan_id: str
    wanted: str
    nodes: list[str]
    ranks_per_node: int
    world_size: int
    parent_generation: int | None
    parent_step: int | None
    parent_reason: str
    placement_reason: str
    created_at: Moment
    run_ordered_at: Moment | None
    first_step_at: Moment | None
    stop_ordered_at: Moment | None
    fenced_at: Moment | None
    reached_step: int | None
    broken_continuity: bool
    adopted: bool = Field(description="Not ordered by this database but found running.")
    lease: dict[str, float] | None = Field(description="Seconds by phase; null: its runners keep no lease.")
    proofs: list[ProofDocument]


class CheckpointDocument(Document):
    generation: int
    step: int
    directory: str
    size_bytes: int
    world_size: int
    parent_generation: int | None
    parent_step: int | None
    saved_at: Moment
    save_time_s: float | None
    after_fence: bool = Field(description="Written by a generation that was fenced already: never resumed from.")
    blocked_s: float | None = Field(description="How long training stood still for it; null: for the whole save.")
    integrity: Integrity
    integrity_reason: str
    health: Health = Field(description="A tainted one is never loaded.")
    health_reason: str
    pinned: bool = Field(description="The ranks may not remove it.")


class LastGoodDocument(Document):
    """What a fault would cost now, while the job trains."""

    saved_at: Moment | None
    age_s: float
    limit_s: float
    limit_reason: str
    too_old: bool
    paged_at: Moment | None


class IntervalDocument(Document):
    """Steps between saves: what the spec says, and what `auto` is or would be, with its inputs."""

    wanted: int | str | None
    steps: int | None = Field(description="By `auto`; null while too little is measured.")
    interval_s: float | None
    reason: str
    save_cost_s: float | None
    step_time_s: float | None
    mtbf_s: float
    nodes: int
    failures: int
    node_hours: float


class SaveTroubleDocument(Document):
    generation: int
    rank: int
    step: int
    kind: Literal["failed", "skipped", "slow"]
    attempt: int
    reason: str
    at: Moment


class SaveRequestDocument(Document):
    """The newest wish for a checkpoint now."""

    number: int
    at: Moment
    by: str
    reason: str
    saved_step: int | None


class SavingDocument(Document):
    job: str
    last_good: LastGoodDocument | None = Field(description="Null while the job does not train.")
    interval: IntervalDocument
    saves_failed: int
    saves_skipped: int
    troubles: list[SaveTroubleDocument] = Field(description="The newest ones, newest first.")
    request: SaveRequestDocument | None
    pinned: list[str]


class JobDetailDocument(JobDocument):
    argv: list[str]
    working_directory: str
    checkpoint_directory: str
    synchronous: bool
    phase_limits_s: dict[str, float]
    last_checkpoint: CheckpointDocument | None
    generations: list[GenerationDocument]
    incidents_count: int


class PointDocument(Document):
    """One finished step of one rank; `loss_text` says `nan` or the like where the loss is no number."""

    generation: int
    step: int
    at: Moment
    loss: float | None
    loss_text: str
    learning_rate: float | None
    grad_norm: float | None
    epoch: int
    span_start: int | None
    span_stop: int | None
    step_time_s: float | None
    samples: int | None = Field(description="This rank's, as are tokens.")
    tokens: int | None
    parameter_norm: float | None
    data_s: float | None = Field(description="Part of the step that it waited for its batch; null: not measured.")
    forward_backward_s: float | None = Field(description="What no other part of the step claims.")
    optimizer_s: float | None
    wait_s: float | None = Field(description="Part of the step that the script says it waited for others.")
    checkpoint_s: float | None = Field(description="A save just before this step; no part of step_time_s.")
    memory_bytes: int | None
    gpu_memory_bytes: int | None


class SeriesDocument(Document):
    generation: int
    rank: int
    parent_generation: int | None
    parent_step: int | None
    points: list[PointDocument]


class MetricsDocument(Document):
    """One series per generation. `more`: ask again after the last point; `every`: n if thinned to each n-th step."""

    job: str
    rank: int
    canonical: bool
    series: list[SeriesDocument]
    more: bool
    every: int


def _document(job_id: str) -> JobDetailDocument:
    return JobDetailDocument.model_validate(queries.get_job(job_id))


@router.post("", response={201: JobDetailDocument}, operation_id="submit_job")
def submit_job(request: HttpRequest, body: JobRequest) -> JsonResponse:
    """Submit a job; it is launched as soon as enough nodes are ready."""
    owner = caller(request).get_username()
    spec = {**body.model_dump(), "phase_limits_s": body.phase_limits_s.model_dump(exclude_none=True)}
    return once(request, lambda: _document(jobs.submit_job(spec, owner=owner).id), status=201)


@router.get("", response=Page[JobDocument], operation_id="list_jobs")
def list_jobs(
    request: HttpRequest, response: HttpResponse, limit: Limit, cursor: Cursor, state: JobState | None = None
) -> dict[str, Any]:
    """Jobs, newest first; `state` keeps those in one state."""
    found = queries.list_jobs(state=state, limit=limit + 1, after=position(cursor))
    return page(request, response, found, limit=limit, key=lambda job: [job.submitted_at, job.id])


@router.get("/{job_id}", response=JobDetailDocument, operation_id="get_job")
def get_job(request: HttpRequest, job_id: str) -> JobDetail:
    """One job with its generations."""
    return queries.get_job(job_id)


@router.get("/{job_id}/metrics", response=MetricsDocument, operation_id="get_job_metrics")
def get_metrics(
    request: HttpRequest,
    job_id: str,
    generation: Annotated[int | None, Query(None, ge=1)],
    rank: Annotated[int | None, Query(None, ge=0, description="Rank 0 if none is named.")],
    after_step: Annotated[int | None, Query(None, ge=0)],
    limit: Annotated[int, Query(10_000, ge=1, le=10_000)],
    max_points: Annotated[int | None, Query(None, ge=10, description="Thin evenly to about this number.")],
    canonical: Annotated[bool, Query(False, description="Each step once, from the newest generation.")],
) -> JobMetrics:
    """Training curves: one series per generation, as they were made or cut to the canonical curve."""
    return queries.job_metrics(
        job_id,
        generation=generation,
        rank=rank,
        after_step=after_step,
        limit=limit,
        max_points=max_points,
        canonical=canonical,
    )


@router.get("/{job_id}/samples", response=SampleLedger, operation_id="get_job_samples")
def get_samples(request: HttpRequest, job_id: str) -> SampleLedger:
    """The ledger of samples: what the job's present state was trained on; none skipped and none repeated, or which."""
    return queries.job_samples(job_id)


@router.get("/{job_id}/checkpoints", response=Page[CheckpointDocument], operation_id="list_job_checkpoints")
def list_checkpoints(
    request: HttpRequest, response: HttpResponse, job_id: str, limit: Limit, cursor: Cursor
) -> dict[str, Any]:
    """Complete checkpoints, newest generation and step first."""
    found = queries.job_checkpoints(job_id, limit=limit + 1, after=number_position(cursor))
    return page(request, response, found, limit=limit, key=lambda one: [one.generation, one.step])


@router.get("/{job_id}/saving", response=SavingDocument, operation_id="get_job_saving")
def get_saving(request: HttpRequest, job_id: str) -> JobSaving:
    """The age of the last good checkpoint, the interval and why, saves that failed, and what was asked for."""
    return queries.job_saving(job_id)


@router.post("/{job_id}/actions", response={202: JobDetailDocument}, operation_id="act_on_job")
def act(request: HttpRequest, job_id: str, body: JobActionRequest) -> JsonResponse:
    """Stop a job: its ranks are killed and it is not recovered; or have it save now; or absolve a checkpoint.

    The answer shows the job as it stands now.
    """
    by = caller(request).get_username()

    def effect() -> JobDetailDocument:
        match body.kind:
            case "stop":
                jobs.stop_job(job_id, by=by)
            case "checkpoint":
                checkpoints.request_save(job_id, by=by, reason=body.reason)
            case "absolve":
                if body.generation is None or body.step is None:
                    raise CommandRefused("Name the checkpoint to absolve by its generation and step.")
                checkpoints.absolve(job_id, generation=body.generation, step=body.step, by=by)
        return _document(job_id)

    return once(request, effect, status=202)
