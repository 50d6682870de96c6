"""The newest plan per job that this node has heard of, and the newest generation that it was told to stop; on disk.

Both are written before they are acted on, so that a late order meets the same answer after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agents.durable import read_json, write_json
from agents.errors import StateUnusable
from agents.protocol.messages import HighestGeneration

_JOBS_KEPT = 1000
"""The jobs that changed last; a hello with all of them stays far below the frame limit."""


@dataclass(frozen=True, kw_only=True)
class HighWater:
    """What a node remembers of one job."""

    generation: int
    plan_id: str
    stopped: int = 0
    """No generation up to this one may run here again; 0 if none was stopped."""


class HighestStore:
    """Keeps a `HighWater` per job in `highest.json`."""

    def __init__(self, state_directory: Path) -> None:
        self._path = state_directory / "highest.json"
        self._jobs: dict[str, HighWater] = {}

    def load(self) -> None:
        """Read what an earlier life knew. Raises `StateUnusable`: without it, an old generation could run again."""
        value = read_json(self._path) or {}
        try:
            self._jobs = {str(job): HighWater(**known) for job, known in value.items()}
        except (TypeError, AttributeError) as err:
            raise StateUnusable(
                f"{self._path} is damaged ({err}). Stop what runs on this node, then remove it."
            ) from err

    @property
    def jobs(self) -> dict[str, HighWater]:
        """A copy of all that is known."""
        return dict(self._jobs)

    def merge(self, changed: dict[str, HighWater]) -> None:
        """Take over risen values; on disk when this returns. Nothing ever falls."""
        risen = {job: known for job, known in changed.items() if self._rises(job, known)}
        if not risen:
            return
        jobs = {job: known for job, known in self._jobs.items() if job not in risen} | risen
        jobs = dict(list(jobs.items())[-_JOBS_KEPT:])
        write_json(
            self._path,
            {
                job: {"generation": known.generation, "plan_id": known.plan_id, "stopped": known.stopped}
                for job, known in jobs.items()
            },
        )
        self._jobs = jobs  # only now: what is not on disk must not count as recorded

    def for_hello(self) -> list[HighestGeneration]:
        return [
            HighestGeneration(job=job, generation=known.generation, plan_id=known.plan_id)
            for job, known in self._jobs.items()
        ]

    def _rises(self, job: str, new: HighWater) -> bool:
        old = self._jobs.get(job)
        return old is None or (new.generation, new.stopped) > (old.generation, old.stopped)
