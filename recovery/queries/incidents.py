"""Incidents as pages and API show them: state, phases with their durations, timeline and receipt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count

from recovery.domain.awaited_fences import FenceHelp, awaited_fences
from recovery.domain.incident import ENDS, IncidentState
from recovery.domain.policy import Policy
from recovery.domain.silence import Contact
from recovery.errors import NotFound
from recovery.fence_providers import configured_provider
from recovery.models import FenceAction, IncidentRow, TimelineEntry
from recovery.queries.jobs import ProofView, proofs_of
from recovery.queries.moment import moment
from recovery.queries.needs_human import NEEDS_HUMAN
from recovery.queries.page import Position
from recovery.store.situations import CONTROL_PLANE, load_fleet, load_generations

WAITS_FOR_FENCES = frozenset(
    {IncidentState.DETECTED.value, IncidentState.STOPPING.value, IncidentState.WAITING_FOR_FENCE.value}
)

LIMITS_S: dict[str, float] = {state.value: limit_s for state, limit_s in Policy().deadlines_s.items()}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One state that the incident stood in; an end state is no phase."""

    state: str
    started_at: float
    ended_at: float | None
    """None for the phase that the incident is in now."""
    seconds: float
    """Until now for the open phase."""
    limit_s: float | None
    """What the policy allows this state; None if it has no limit."""
    over_limit: bool


@dataclass(frozen=True, kw_only=True)
class WaitingFor:
    """A node without proof that the old generation is gone from it, and what would bring one."""

    node: str
    generation: int
    contact: Contact
    last_heard_at: float | None
    silent_s: float
    lease_ends_at: float | None
    """None: no lease proves anything here."""
    helps: tuple[FenceHelp, ...]
    fence_action: str | None
    """State of the newest fence action on the node since the incident began: requested, running, fenced, failed or
    cancelled. None: there was none."""


@dataclass(frozen=True, kw_only=True)
class IncidentSummary:
    id: str
    kind: str
    """job, or control_plane: too many nodes fell silent at once, so that none of it is believed."""
    job: str | None
    """None for one of the control plane."""
    job_name: str
    nodes: tuple[str, ...]
    """Of the control plane: the nodes that fell silent together. Empty for a job's."""
    fleet_size: int | None
    """Of the control plane: how many nodes there were."""
    state: str
    """A job's: see `IncidentState`. The control plane's: breaker_open, contact_restored, rearmed."""
    ended: bool
    needs_human: bool
    drill: str | None
    opened_at: float
    ended_at: float | None
    state_since: float
    deadline_at: float | None
    """When the present state runs out of time; None after the end."""
    cause: dict[str, Any] | None
    """The domain's `Cause` as JSON: kind, rank, node, sentence, tied_with, cascade, witnesses."""
    cause_sentence: str
    reached_step: int | None
    broken_generation: int | None
    """None for one of the control plane."""
    generation: int | None
    """The generation that replaces the broken one, once it is planned."""
    attempt: int
    """The relaunch that this recovery is at, from 1; 0 before one is planned. In the end, as the receipt has it."""
    escalation: str
    verdict: str | None
    """Kind of the receipt's verdict: bit-equal, state-equal, inconclusive, broken; None before the receipt."""
    version: int
    phases: tuple[Phase, ...]
    entries_count: int


@dataclass(frozen=True, kw_only=True)
class TimelineView:
    """One sentence of the story."""

    seq: int
    occurred_at: float
    recorded_at: float
    kind: str
    text: str
    data: dict[str, Any]
    hash: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    items: tuple[TimelineView, ...]
    last_seq: int
    """Seq of the last entry that exists, which may lie beyond these items; 0 if there is none."""


@dataclass(frozen=True, kw_only=True)
class IncidentDetail(IncidentSummary):
    body: dict[str, Any]
    """The domain's `Incident` (or `ControlPlaneIncident`) as JSON."""
    waiting_for: tuple[WaitingFor, ...]
    """Proofs that are missing while it stops the old generation or waits for a fence."""
    fences: tuple[ProofView, ...]
    """The proofs that the next generation stands on, as far as they are there."""
    still_silent: tuple[str, ...]
    """Of the control plane: those of its nodes that are not in contact yet."""
    receipt: dict[str, Any] | None
    """The domain's `Receipt` as JSON."""


def list_incidents(
    *,
    ended: bool | None = None,
    state: str | None = None,
    kind: str | None = None,
    job: str | None = None,
    limit: int | None = None,
    after: Position | None = None,
    now: float | None = None,
) -> tuple[IncidentSummary, ...]:
    """Incidents, newest first; three queries."""
    rows = IncidentRow.objects.select_related("job").order_by("-opened_at", "-id")
    if ended is not None:
        rows = rows.filter(ended=ended)
    if state is not None:
        rows = rows.filter(state=state)
    if kind is not None:
        rows = rows.filter(kind=kind)
    if job is not None:
        rows = rows.filter(job_id=job)
    if after is not None:
        rows = rows.filter(after.further("opened_at"))
    return summarize_incidents(list(rows[:limit]), now=moment(now))


def get_incident(incident_id: str, *, now: float | None = None) -> IncidentDetail:
    """One incident. Raises `NotFound`."""
    now = moment(now)
    row = _find(incident_id)
    states, counts = _states_and_counts([row.id])
    return IncidentDetail(
        **_summary(row, states[row.id], entries_count=counts.get(row.id, 0), now=now),
        body=row.body,
        waiting_for=_waiting_for(row, now=now),
        fences=_fences(row),
        still_silent=_still_silent(row, now=now),
        receipt=row.receipt,
    )


def _waiting_for(row: IncidentRow, *, now: float) -> tuple[WaitingFor, ...]:
    job = row.job
    if job is None or row.ended or row.state not in WAITS_FOR_FENCES:
        return ()
    awaited = awaited_fences(
        load_generations(job),
        load_fleet(now),
        synchronous=bool(job.spec.get("synchronous", True)),
        provider=configured_provider() is not None,
        except_generation=(row.body.get("plan") or {}).get("generation"),
    )
    actions: dict[str, str] = dict(
        FenceAction.objects.filter(node__name__in=[one.node for one in awaited], requested_at__gte=row.opened_at)
        .order_by("requested_at")
        .values_list("node__name", "state")
    )
    return tuple(
        WaitingFor(
            node=one.node,
            generation=one.generation,
            contact=one.contact,
            last_heard_at=one.last_heard_at,
            silent_s=one.silent_s,
            lease_ends_at=one.lease_ends_at,
            helps=one.helps,
            fence_action=actions.get(one.node),
        )
        for one in awaited
    )


def _fences(row: IncidentRow) -> tuple[ProofView, ...]:
    """Proofs of the generations from the broken one up to the one that replaces it."""
    if row.job_id is None:
        return ()
    planned = (row.body.get("plan") or {}).get("generation")
    proofs = proofs_of(row.job_id, from_generation=int(row.body["broken_generation"]))
    return tuple(proof for proof in proofs if planned is None or proof.generation < planned)


def _still_silent(row: IncidentRow, *, now: float) -> tuple[str, ...]:
    if row.kind != CONTROL_PLANE or row.ended:
        return ()
    seen = {node.name for node in load_fleet(now).nodes if node.contact is Contact.SEEN}
    return tuple(name for name in row.body["nodes"] if name not in seen)


def incident_receipt(incident_id: str) -> dict[str, Any]:
    """The receipt as JSON. Raises `NotFound` for an unknown incident and for one without a receipt yet."""
    row = _find(incident_id)
    if row.receipt is None:
        raise NotFound(f"Incident {incident_id} has no receipt yet: it is {row.state}. The receipt comes with its end.")
    receipt: dict[str, Any] = row.receipt
    return receipt


def incident_timeline(incident_id: str, *, after_seq: int = 0, limit: int | None = None) -> Timeline:
    """The entries after `after_seq`, oldest first. Raises `NotFound`."""
    _find(incident_id)
    entries = TimelineEntry.objects.filter(incident_id=incident_id).order_by("seq")
    items = tuple(
        TimelineView(
            seq=entry.seq,
            occurred_at=entry.occurred_at,
            recorded_at=entry.recorded_at,
            kind=entry.kind,
            text=entry.text,
            data=entry.data,
            hash=entry.hash,
        )
        for entry in entries.filter(seq__gt=after_seq)[:limit]
    )
    last_seq = entries.order_by("-seq").values_list("seq", flat=True).first()
    return Timeline(items=items, last_seq=last_seq or 0)


def summarize_incidents(rows: Sequence[IncidentRow], *, now: float) -> tuple[IncidentSummary, ...]:
    """Summaries of rows that were loaded with their jobs; two queries for all of them."""
    states, counts = _states_and_counts([row.id for row in rows])
    return tuple(
        IncidentSummary(**_summary(row, states[row.id], entries_count=counts.get(row.id, 0), now=now)) for row in rows
    )


def phases_of(changes: Iterable[tuple[str, float]], *, now: float) -> tuple[Phase, ...]:
    """Phases from (state entered, when) in order. Clocks of facts may disagree: no phase is shorter than 0 s."""
    phases: list[Phase] = []
    entered = list(changes)
    for index, (state, started_at) in enumerate(entered):
        if state in ENDS or not state:  # an incident of the control plane has no phases
            continue
        ended_at = entered[index + 1][1] if index + 1 < len(entered) else None
        until = now if ended_at is None else ended_at
        seconds = max(0.0, until - started_at)
        limit_s = LIMITS_S.get(state)
        phases.append(
            Phase(
                state=state,
                started_at=started_at,
                ended_at=ended_at,
                seconds=seconds,
                limit_s=limit_s,
                over_limit=limit_s is not None and seconds > limit_s,
            )
        )
    return tuple(phases)


def _find(incident_id: str) -> IncidentRow:
    row = IncidentRow.objects.select_related("job").filter(pk=incident_id).first()
    if row is None:
        raise NotFound(f"There is no incident {incident_id}.")
    return row


def _states_and_counts(ids: Sequence[str]) -> tuple[dict[str, list[tuple[str, float]]], dict[str, int]]:
    states: dict[str, list[tuple[str, float]]] = defaultdict(list)
    if not ids:
        return states, {}
    entries = TimelineEntry.objects.filter(incident__in=ids)
    for incident, at, data in (
        entries.filter(kind="state").order_by("incident", "seq").values_list("incident_id", "occurred_at", "data")
    ):
        states[incident].append((str(data.get("to", "")), at))
    counted = entries.order_by().values_list("incident_id").annotate(count=Count("pk"))
    return states, dict(counted)


def _summary(
    row: IncidentRow, states: Sequence[tuple[str, float]], *, entries_count: int, now: float
) -> dict[str, Any]:
    body: dict[str, Any] = row.body
    cause = body.get("cause")
    control_plane = row.kind == CONTROL_PLANE
    return {
        "id": row.id,
        "kind": row.kind,
        "job": row.job_id,
        "job_name": row.job.name if row.job else "",
        "nodes": tuple(body["nodes"]) if control_plane else (),
        "fleet_size": int(body["fleet_size"]) if control_plane else None,
        "state": row.state,
        "ended": row.ended,
        "needs_human": row.state in NEEDS_HUMAN,
        "drill": row.drill_id,
        "opened_at": row.opened_at,
        "ended_at": row.ended_at,
        "state_since": float(body.get("state_since", row.opened_at)),
        "deadline_at": None if row.ended else row.deadline_at,
        "cause": cause,
        "cause_sentence": _many_silent(body) if control_plane else str(cause["sentence"]) if cause else "",
        "reached_step": body.get("reached_step"),
        "broken_generation": None if control_plane else int(body.get("broken_generation", 0)),
        "generation": (body.get("plan") or {}).get("generation"),
        "attempt": _attempt(body),
        "escalation": str(body.get("escalation", "")),
        "verdict": row.receipt["verdict"]["kind"] if row.receipt else None,
        "version": row.version,
        "phases": phases_of(states, now=now if row.ended_at is None else row.ended_at),
        "entries_count": entries_count,
    }


def _attempt(body: dict[str, Any]) -> int:
    """The domain counts the relaunches that failed; the one that is under way, or held, comes after them."""
    if not body.get("plan") and not body.get("plans_made"):
        return 0
    return min(int(body.get("attempt", 0)) + 1, Policy().max_attempts)


def _many_silent(body: dict[str, Any]) -> str:
    return f"{len(body['nodes'])} of {body['fleet_size']} nodes fell silent at once; no job is stopped for it."
