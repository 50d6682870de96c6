"""The receipt that ends an incident: what happened, in numbers, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.domain.continuity import Verdict
from recovery.domain.generations import FenceProof
from recovery.domain.incident import Cause
from recovery.domain.plan import CheckpointRef
from recovery.domain.sample_ledger import SampleLedger

RECEIPT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """All `_s` values are seconds since the fault, on the server's clock."""

    incident: str
    job: str
    state: str
    verdict: Verdict
    cause: Cause | None
    drill: str | None
    broken_generation: int
    generation: int
    old_nodes: tuple[str, ...]
    new_nodes: tuple[str, ...]
    parent: CheckpointRef | None
    reached_step: int | None
    detect_s: float
    stop_s: float | None
    """Until the last node of the old generation was proven empty."""
    launch_s: float | None
    """Until `run` was ordered."""
    first_step_s: float | None
    """Until every rank had completed a step of the new generation."""
    caught_up_s: float | None
    """Until every rank had completed a step beyond the old generation's last."""
    total_s: float
    attempts: int
    """Relaunches that this recovery took: 1 if the first one held."""
    fences: tuple[FenceProof, ...]
    issued_at: float
    parent_in_memory: bool = False
    """It went on from what its nodes held in memory."""
    samples: SampleLedger | None = None
    """None: issued before there was a ledger."""
    receipt_version: int = RECEIPT_VERSION
