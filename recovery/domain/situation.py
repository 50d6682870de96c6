"""All that a decision about one job may look at, frozen at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from recovery.domain.continuity import Verdict
from recovery.domain.fleet import FleetSnapshot
from recovery.domain.generations import GenerationView
from recovery.domain.instructions import JobState
from recovery.domain.plan import CheckpointRef, LeaseLimits
from recovery.domain.policy import Policy
from recovery.domain.sample_ledger import SampleLedger
from recovery.domain.snapshots import SnapshotPart
from recovery.domain.trust import Trust
from recovery.domain.witnesses import ProbeView


class Command(StrEnum):
    """What an operator may ask of an open incident."""

    PAUSE = "pause"
    RESUME = "resume"
    RETRY = "retry"
    CLOSE = "close"


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The job, as far as decisions need it."""

    id: str
    name: str
    state: JobState
    node_count: int
    """Nodes that it wants: the most it can use."""
    ranks_per_node: int
    min_nodes: int | None = None
    """It may go on with this many; None: only with `node_count`."""
    multiple_of: int = 1
    """Its number of nodes is always a multiple of this."""
    synchronous: bool = True
    """No rank finishes a step without all others."""
    lease: LeaseLimits = field(default_factory=LeaseLimits)
    """Terms that its next generation begins with."""
    save_every: str = ""
    """What its next generation is told of saving: steps, `auto`, or nothing where the script decides."""
    stop_wanted: bool = False
    launch_attempts: int = 0
    state_since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FreshIds:
    """Identifiers drawn by the shell, used only if a plan is made."""

    plan_id: str
    run_id: str
    generation: int
    """One above every generation number that the job, or any agent, has ever seen."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the engine froze for one decision about one job."""

    job: JobView
    fleet: FleetSnapshot
    generations: tuple[GenerationView, ...]
    """All generations of the job, oldest first."""
    checkpoints: tuple[CheckpointRef, ...]
    trust: Mapping[CheckpointRef, Trust]
    """How far each of them may be trusted, as of now."""
    fresh: FreshIds
    snapshots: tuple[SnapshotPart, ...] = ()
    """What nodes have said to hold in memory."""
    policy: Policy = field(default_factory=Policy)
    verdict: Verdict | None = None
    """Computed by the shell with `continuity.judge` while a new generation trains."""
    caught_up_at: float | None = None
    samples: SampleLedger | None = None
    """The ledger of the new generation's line, once it has caught up, has ended, or is judged broken."""
    command: Command | None = None
    probes: tuple[ProbeView, ...] = ()
    """The newest answered look at each silent node by another node's agent."""

    def generation(self, number: int) -> GenerationView | None:
        return next((generation for generation in self.generations if generation.number == number), None)

    def unfenced_before(self, number: int) -> tuple[GenerationView, ...]:
        """Older generations that may still have a process somewhere."""
        return tuple(g for g in self.generations if g.number < number and not g.fenced)
