"""All reads for pages, the REST API and the live feed, as functions that return frozen values.

`dashboard` calls these and nothing else to read; no row leaves this package. Times are Unix seconds on the server's
clock, durations carry `_s`. Functions that look for one thing raise `recovery.errors.NotFound`. The number of database
queries of each function does not grow with the number of rows it returns.
"""

from recovery.queries.drills import DrillView, get_drill, list_drills
from recovery.queries.incidents import (
    IncidentDetail,
    IncidentSummary,
    Phase,
    Timeline,
    TimelineView,
    WaitingFor,
    get_incident,
    incident_receipt,
    incident_timeline,
    list_incidents,
)
from recovery.queries.jobs import (
    CheckpointView,
    GenerationSummary,
    JobDetail,
    JobSummary,
    ProofView,
    UnseenNode,
    get_job,
    job_checkpoints,
    list_jobs,
)
from recovery.queries.metrics import JobMetrics, MetricPoint, MetricSeries, canonical_cuts, job_metrics
from recovery.queries.nodes import (
    FenceActionView,
    GpuView,
    NodeDetail,
    NodeState,
    NodeSummary,
    ProbeLook,
    ShareView,
    get_fence_action,
    get_node,
    list_nodes,
)
from recovery.queries.overview import ControlPlane, Overview, overview
from recovery.queries.page import Position
from recovery.queries.samples import job_samples
from recovery.queries.saving import JobSaving, job_saving
from recovery.queries.step_split import SplitPart, StepTimeSplit, step_time_split

__all__ = [
    "CheckpointView",
    "ControlPlane",
    "DrillView",
    "FenceActionView",
    "GenerationSummary",
    "GpuView",
    "IncidentDetail",
    "IncidentSummary",
    "JobDetail",
    "JobMetrics",
    "JobSaving",
    "JobSummary",
    "MetricPoint",
    "MetricSeries",
    "NodeDetail",
    "NodeState",
    "NodeSummary",
    "Overview",
    "Phase",
    "Position",
    "ProbeLook",
    "ProofView",
    "ShareView",
    "SplitPart",
    "StepTimeSplit",
    "Timeline",
    "TimelineView",
    "UnseenNode",
    "WaitingFor",
    "canonical_cuts",
    "get_drill",
    "get_fence_action",
    "get_incident",
    "get_job",
    "get_node",
    "incident_receipt",
    "incident_timeline",
    "job_checkpoints",
    "job_metrics",
    "job_samples",
    "job_saving",
    "list_drills",
    "list_incidents",
    "list_jobs",
    "list_nodes",
    "overview",
    "step_time_split",
]
