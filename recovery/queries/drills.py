"""Drills as pages and API show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recovery.domain.drill_promises import CANCELLED
from recovery.errors import NotFound
from recovery.models import Drill, IncidentRow
from recovery.queries.page import Position


@dataclass(frozen=True, kw_only=True)
class DrillView:
    id: str
    kind: str
    job: str
    job_name: str
    node: str
    """Empty where the server itself is what was broken."""
    rank: int | None
    """None where a drill is not about one rank."""
    generation: int
    steps_after_save: int
    state: str
    ended: bool
    detail: str
    duration_s: float
    """After this long the fault is undone; 0 where nothing lasts."""
    promise: dict[str, Any]
    """{"kind": "recovered", "recovered_within_s": seconds, "continuity": "proven"} or {"kind": "unharmed"}; with
    "allow_waiting": true if the asker knew that the job might wait."""
    requested_by: str
    requested_at: float
    not_after: float
    applied_at: float | None
    undone_at: float | None
    ended_at: float | None
    incident: str | None
    result: dict[str, Any]
    """{"passed": bool, "reasons": [...], "incident": id or None, and numbers} once the drill has ended, else empty."""

    @property
    def standing(self) -> str:
        """The state, or `cancelled` where the incident was before anybody could say whether the promise held."""
        return "cancelled" if self.result.get("reasons") == [CANCELLED] else self.state


def list_drills(
    *,
    job: str | None = None,
    state: str | None = None,
    limit: int | None = None,
    after: Position | None = None,
) -> tuple[DrillView, ...]:
    """Drills, newest first; two queries."""
    rows = Drill.objects.select_related("job", "node").order_by("-requested_at", "-id")
    if job is not None:
        rows = rows.filter(job_id=job)
    if state is not None:
        rows = rows.filter(state=state)
    if after is not None:
        rows = rows.filter(after.further("requested_at"))
    return _views(list(rows[:limit]))


def get_drill(drill_id: str) -> DrillView:
    """One drill. Raises `NotFound`."""
    row = Drill.objects.select_related("job", "node").filter(pk=drill_id).first()
    if row is None:
        raise NotFound(f"There is no drill {drill_id}.")
    (view,) = _views([row])
    return view


def _views(rows: Sequence[Drill]) -> tuple[DrillView, ...]:
    ids = [row.id for row in rows]
    incidents: dict[str | None, str] = dict(
        IncidentRow.objects.filter(drill__in=ids).order_by("opened_at").values_list("drill_id", "id")
    )
    return tuple(
        DrillView(
            id=row.id,
            kind=row.kind,
            job=row.job_id,
            job_name=row.job.name,
            node=row.node.name if row.node else "",
            rank=row.rank,
            generation=row.generation_number,
            steps_after_save=row.steps_after_save,
            state=row.state,
            ended=row.ended,
            detail=row.detail,
            duration_s=row.duration_s,
            promise=row.promise,
            requested_by=row.requested_by,
            requested_at=row.requested_at,
            not_after=row.not_after,
            applied_at=row.applied_at,
            undone_at=row.undone_at,
            ended_at=row.ended_at,
            incident=incidents.get(row.id),
            result=row.result,
        )
        for row in rows
    )
