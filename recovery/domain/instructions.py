"""What the machine wants done. The engine turns these into rows in the transaction that saves the new state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from recovery.domain.plan import FenceProof, RecoveryPlan
from recovery.domain.receipt import Receipt


class JobState(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    PLACING = "placing"
    LAUNCHING = "launching"
    RUNNING = "running"
    RECOVERING = "recovering"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


JOB_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})


@dataclass(frozen=True, kw_only=True)
class StopGeneration:
    """Want a generation gone from each of its nodes, with proof."""

    job: str
    generation: int


@dataclass(frozen=True, kw_only=True)
class RecordProof:
    """Keep a proof that the server found itself; the node's agent goes on being told to stop until it says so too."""

    job: str
    generation: int
    proof: FenceProof


@dataclass(frozen=True, kw_only=True)
class PreparePlan:
    """Create a generation from the plan, claim its nodes, and order `prepare` on each."""

    plan: RecoveryPlan


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Order `run`. Only ever given when every older generation is fenced on every node."""

    job: str
    generation: int
    master_port: int
    fences: tuple[FenceProof, ...] = ()
    """What it stands on: a proof for each node of each older generation that ever ran; kept with the plan."""


@dataclass(frozen=True, kw_only=True)
class MarkJob:
    """Set a job's state and the reason that is shown beside it."""

    job: str
    state: JobState
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ReleaseNodes:
    """Give up the job's claims, except on the named nodes."""

    job: str
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MarkContinuityBroken:
    """Never resume from what this generation saved."""

    job: str
    generation: int


@dataclass(frozen=True, kw_only=True)
class IssueReceipt:
    """Keep the receipt with its incident."""

    receipt: Receipt


@dataclass(frozen=True, kw_only=True)
class PageOperator:
    """Tell a human, with the reason."""

    reason: str


Instruction = (
    StopGeneration
    | RecordProof
    | PreparePlan
    | RunPlan
    | MarkJob
    | ReleaseNodes
    | MarkContinuityBroken
    | IssueReceipt
    | PageOperator
)
