"""The rows: what Everstep remembers. Domain values are made from them in `recovery.store`."""

from recovery.models.access import ApiToken, IdempotencyRecord, JoinToken
from recovery.models.drills import Drill
from recovery.models.fleet import FenceAction, Node, Observer, Probe
from recovery.models.incidents import IncidentRow, TimelineEntry
from recovery.models.jobs import (
    CheckpointRow,
    GenerationRow,
    Job,
    RankRow,
    SaveTrouble,
    ShareRow,
    SnapshotRow,
    Stray,
)
from recovery.models.metrics import StepRow
from recovery.models.work import Claim

__all__ = [
    "ApiToken",
    "CheckpointRow",
    "Claim",
    "Drill",
    "FenceAction",
    "GenerationRow",
    "IdempotencyRecord",
    "IncidentRow",
    "Job",
    "JoinToken",
    "Node",
    "Observer",
    "Probe",
    "RankRow",
    "SaveTrouble",
    "ShareRow",
    "SnapshotRow",
    "StepRow",
    "Stray",
    "TimelineEntry",
]
