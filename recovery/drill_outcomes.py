"""How drills end: the sweep asks of each open one whether its promise is kept, broken, or still to be seen."""

from __future__ import annotations

import logging
import time

from django.db import transaction
from django.db.models import F

from recovery import server_hold
from recovery.domain.drill_kinds import KINDS, PromiseKind, Target
from recovery.domain.drill_promises import DrillOutcome, judge_recovery, judge_unharmed, too_late
from recovery.domain.incident import CauseKind
from recovery.domain.timeline import Entry, EntryKind
from recovery.models import Drill, IncidentRow, Node, Observer
from recovery.store.drills import fault_progress, job_record, recovery_end
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change, push_orders

log = logging.getLogger(__name__)

_OBSERVED_WITHIN_S = 5.0


def settle_drill(drill_id: str) -> None:
    """Take a drill one look further, up to comparing what happened with what was promised."""
    with transaction.atomic():
        drill = Drill.objects.select_related("node", "job").filter(pk=drill_id, ended=False).first()
        if drill is None:
            return
        now = time.time()
        kind = KINDS[drill.kind]
        if kind.target is Target.SERVER:
            _keep_server_down(drill, now)
        incident = drill.incidents.order_by("opened_at").first() or _claim_incident(drill)
        if incident is not None and drill.applied_at is None:
            _applied_by_its_effect(drill, incident)
        fault = fault_progress(drill)
        recovers = kind.promise is PromiseKind.RECOVERED
        outcome = too_late(fault, now=now, needs_incident=recovers, has_incident=incident is not None)
        if outcome is None and recovers:
            outcome = judge_recovery(recovery_end(drill, incident), fault) if incident is not None else None
        elif outcome is None and fault.undone_at is not None:
            outcome = judge_unharmed(job_record(drill), fault, now=now)
        if outcome is not None:
            end_drill(drill, outcome, incident=incident)


def _claim_incident(drill: Drill) -> IncidentRow | None:
    """The incident of a node that a drill took, if it was opened by the death of a rank elsewhere.

    An agent that is killed or frozen in the moment of the fault has not told of it, so that the incident bears no mark.
    """
    if not KINDS[drill.kind].takes_node or drill.node is None:
        return None
    rows = IncidentRow.objects.filter(job=drill.job, drill__isnull=True, opened_at__gte=drill.requested_at)
    for row in rows.order_by("opened_at"):
        cause = row.body.get("cause") or {}
        same = row.body["broken_generation"] == drill.generation_number
        if same and cause.get("kind") == CauseKind.NODE_LOST.value and cause.get("node") == drill.node.name:
            # The version rises, so that a decision that was made without the drill does not wipe it out.
            marked = IncidentRow.objects.filter(pk=row.pk, version=row.version).update(
                drill=drill, body={**row.body, "drill": drill.pk}, version=F("version") + 1
            )
            if not marked:
                return None
            row.refresh_from_db()
            tell(
                drill,
                f"This is a drill ({drill.pk}): {drill.kind} on {drill.node.name}, asked for by {drill.requested_by}.",
            )
            return row
    return None


def _applied_by_its_effect(drill: Drill, incident: IncidentRow) -> None:
    """Its agent cannot say that it applied the fault: the incident says so. A later word of the agent is better."""
    drill.state, drill.applied_at = "applied", max(float(incident.body["fault_at"]), drill.requested_at)
    drill.detail = f"seen by incident {incident.pk}"
    drill.save(update_fields=["state", "applied_at", "detail"])
    announce_change(f"drill:{drill.pk}")


def _keep_server_down(drill: Drill, now: float) -> None:
    """Begin the hold, or see that it is over: a web process that was not there before listens again."""
    if drill.applied_at is None and now <= drill.not_after:
        drill.state, drill.applied_at, drill.detail = "applied", now, "web, worker and beat are held down"
        drill.save(update_fields=["state", "applied_at", "detail"])
        # After the commit: this process may be killed as soon as the file is there.
        transaction.on_commit(lambda: _hold(drill))
        announce_change(f"drill:{drill.pk}")
    elif drill.applied_at is not None and drill.undone_at is None and now > drill.applied_at + drill.duration_s:
        fresh = Observer.objects.exclude(name__in=drill.before["observers"])
        listening = fresh.filter(since__gt=drill.applied_at, beat_at__gt=now - _OBSERVED_WITHIN_S)
        back = listening.order_by("since").first()
        if back is not None:
            drill.state, drill.undone_at, drill.detail = "undone", back.since, "a fresh web process listens"
            drill.save(update_fields=["state", "undone_at", "detail"])
            announce_change(f"drill:{drill.pk}")


def _hold(drill: Drill) -> None:
    until = (drill.applied_at or 0.0) + drill.duration_s
    try:
        server_hold.hold_server(drill=drill.pk, until=until, by=drill.requested_by)
    except OSError as err:
        log.error("drill=%s the server could not be held down: %s", drill.pk, err)
        with transaction.atomic():
            reason = f"The supervisor could not be asked to hold the server down: {err}."
            end_drill(drill, DrillOutcome(state="refused", reasons=(reason,)))


def end_drill(drill: Drill, outcome: DrillOutcome, *, incident: IncidentRow | None = None) -> None:
    """Write how a drill ended, into its row and into its incident. Must run inside a transaction."""
    result = {
        "passed": outcome.passed,
        "reasons": list(outcome.reasons),
        "incident": incident.pk if incident else None,
        **outcome.numbers,
    }
    ended = Drill.objects.filter(pk=drill.pk, ended=False).update(
        state=outcome.state, ended=True, ended_at=time.time(), result=result
    )
    if not ended:
        return
    if drill.node is not None:
        bump_node(drill.node)
    words = "passed: the promise was kept." if outcome.passed else f"{outcome.state}: {' '.join(outcome.reasons)}"
    tell(drill, f"Drill {drill.pk} {words}", data=result)
    announce_change(f"drill:{drill.pk}")


def tell(drill: Drill, text: str, *, at: float | None = None, data: dict[str, object] | None = None) -> None:
    """Write a sentence about a drill into the incident that it caused, if there is one. Inside a transaction."""
    row = drill.incidents.order_by("opened_at").first()
    if row is None:
        return
    IncidentRow.objects.filter(pk=row.pk).update(version=F("version"))  # takes the row, so that seq has no rival
    entry = Entry(kind=EntryKind.DRILL, at=time.time() if at is None else at, text=text, data=data or {})
    announce(f"incident:{row.pk}", append_entries(row.pk, [entry]))


def bump_node(node: Node) -> None:
    """What the node should do has changed. Inside a transaction."""
    Node.objects.filter(pk=node.pk).update(revision=F("revision") + 1)
    push_orders()
