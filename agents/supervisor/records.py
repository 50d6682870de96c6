"""What the agent itself writes down about each run, beside the run's directory and out of its job's reach.

`runs/<job>/<generation>.json` is the record, `runs/<job>/<generation>/` the directory that runner and ranks use. A
record is written before anything is started, so that a restarted agent finds all that could be alive.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agents.durable import read_json, write_json
from agents.errors import StateUnusable
from agents.policy import Account
from agents.protocol.messages import LaunchSpec, LeaseTerms, Message, StopProof


class RunRecord(Message, frozen=True):
    """One run that was started, or was about to be."""

    job: str
    generation: int
    plan_id: str
    mark: str
    launch: LaunchSpec
    boot_id: str
    uid: int
    """Account of its ranks."""
    cgroup: str | None = None
    pid: int | None = None
    """The runner; None from just before its start to just after."""
    start_time: int | None = None
    proof: StopProof | None = None
    """Set when nothing of it is left."""
    detail: str = ""
    reason: str = ""
    protocol: int = 1
    """Of the runner; releases that knew no other wrote none."""
    lease: LeaseTerms | None = None
    """Terms of the lease that the runner keeps; None if it keeps none."""
    killed_at: float | None = None
    """When it was killed on order: what died from then on was no news."""


@dataclass(frozen=True)
class RunFiles:
    """Where the files of one run are."""

    record: Path
    directory: Path

    @property
    def launch(self) -> Path:
        return self.directory / "launch.json"

    @property
    def events(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def runner_log(self) -> Path:
        """What the runner prints; beside the directory, so that the agent never opens what its owner could swap."""
        return self.record.with_suffix(".log")

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.jsonl"

    def create(self, account: Account, launch: dict[str, Any]) -> None:
        """Make the directory, owned by the ranks' account and by nobody else readable. Raises `OSError`."""
        self.directory.mkdir(mode=0o700)
        self.logs.mkdir(mode=0o700)
        write_json(self.launch, launch)
        if account.uid != os.geteuid():
            for path in (self.launch, self.logs, self.directory):
                os.chown(path, account.uid, account.gid)


class RunRecords:
    """All runs of this node, by the files in its state directory."""

    def __init__(self, state_directory: Path) -> None:
        self._root = state_directory / "runs"

    def prepare(self) -> None:
        # Ranks of other accounts pass through; they cannot list.
        self._root.mkdir(mode=0o711, exist_ok=True)

    def files(self, job: str, generation: int) -> RunFiles:
        """The caller has checked that the job's name is safe in a path."""
        job_directory = self._root / job
        return RunFiles(record=job_directory / f"{generation}.json", directory=job_directory / str(generation))

    def write(self, record: RunRecord) -> None:
        """On disk when this returns. Raises `StateUnusable`."""
        path = self.files(record.job, record.generation).record
        path.parent.mkdir(mode=0o711, exist_ok=True)
        write_json(path, msgspec.to_builtins(record))

    def read(self, job: str, generation: int) -> RunRecord | None:
        return self._read(self.files(job, generation).record)

    def all(self) -> list[RunRecord]:
        """Every run that is remembered, oldest generation first."""
        found = [self._read(path) for path in self._root.glob("*/*.json") if not path.name.startswith(".")]
        records = [record for record in found if record is not None]
        return sorted(records, key=lambda record: (record.job, record.generation))

    @staticmethod
    def _read(path: Path) -> RunRecord | None:
        value = read_json(path)
        if value is None:
            return None
        try:
            return msgspec.convert(value, RunRecord)
        except msgspec.ValidationError as err:
            raise StateUnusable(f"{path} is damaged ({err}). Stop what runs on this node, then remove it.") from err
