"""What this node remembers of drills: written before a fault is armed and again before it is applied.

So a fault comes at most once per drill, and never after its deadline, whatever happens to agent and server in between.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from agents.durable import read_json, write_json
from agents.errors import StateUnusable
from agents.protocol.messages import FaultKind, Message

_KEPT = 1000
_FORGET_AFTER_S = 7 * 86400.0


class DrillStep(StrEnum):
    """How far a drill has come on this node."""

    ARMED = "armed"
    APPLYING = "applying"
    """On disk just before the fault; if the agent dies here, the fault is never tried again."""
    APPLIED = "applied"
    UNDONE = "undone"
    REFUSED = "refused"
    EXPIRED = "expired"


class DrillRecord(Message, frozen=True):
    drill: str
    job: str
    generation: int
    rank: int
    not_after: float
    """Unix seconds on the server's clock."""
    steps_after_save: int
    step: DrillStep
    at: float
    """Unix seconds on this node's clock, when it took this step."""
    detail: str = ""
    kind: FaultKind = FaultKind.KILL_RANK
    duration_s: float = 0.0
    boot_id: str = ""
    undo_at_ns: int = 0
    """CLOCK_BOOTTIME of that boot, for what the agent itself undoes."""
    applied_at: float = 0.0
    applied_detail: str = ""

    @property
    def ended(self) -> bool:
        """Nothing will be done or undone for it any more."""
        final = DrillStep.APPLIED if self.kind is FaultKind.KILL_RANK else DrillStep.UNDONE
        return self.step in (final, DrillStep.REFUSED, DrillStep.EXPIRED)


class DrillStore:
    """Keeps a `DrillRecord` per drill in `drills.json`."""

    def __init__(self, state_directory: Path) -> None:
        self._path = state_directory / "drills.json"
        self._drills: dict[str, DrillRecord] = {}
        self._armed: list[DrillRecord] = []
        self._open: list[DrillRecord] = []

    def load(self) -> None:
        """Read what an earlier life knew. Raises `StateUnusable`: without it, a fault could come twice."""
        try:
            records = msgspec.convert(read_json(self._path) or [], list[DrillRecord])
        except msgspec.ValidationError as err:
            raise StateUnusable(
                f"{self._path} is damaged ({err}). Stop what runs on this node, then remove it."
            ) from err
        self._keep({record.drill: record for record in records})

    def get(self, drill: str) -> DrillRecord | None:
        return self._drills.get(drill)

    def put(self, record: DrillRecord) -> None:
        """On disk when this returns. Raises `StateUnusable`."""
        drills = {**self._drills, record.drill: record}
        if len(drills) > _KEPT:
            # Only what its own deadline forbids anyway may be forgotten.
            drills = {
                name: known
                for name, known in drills.items()
                if not known.ended or record.at - known.not_after < _FORGET_AFTER_S
            }
        write_json(self._path, [msgspec.to_builtins(known) for known in drills.values()])
        self._keep(drills)

    @property
    def armed(self) -> list[DrillRecord]:
        """Drills that wait for their moment; looked at with each step of a rank."""
        return self._armed

    @property
    def open(self) -> list[DrillRecord]:
        """Drills whose fault has begun, perhaps in an earlier life of the agent, and is not over."""
        return self._open

    def _keep(self, drills: dict[str, DrillRecord]) -> None:
        self._drills = drills
        self._armed = [record for record in drills.values() if record.step is DrillStep.ARMED]
        self._open = [record for record in drills.values() if record.step is not DrillStep.ARMED and not record.ended]
