"""Open, join and command incidents: called by ingest and by the pages and API."""

from __future__ import annotations

import time

from django.db import transaction
from django.db.models import F

from recovery.domain.drill_kinds import KINDS, Target
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.domain.policy import Policy
from recovery.domain.situation import Command
from recovery.domain.timeline import Entry, EntryKind
from recovery.errors import CommandRefused, NotFound
from recovery.ids import fresh_id
from recovery.models import Drill, IncidentRow, Job
from recovery.store import to_json
from recovery.store.timelines import append_entries
from recovery.wakeup import announce, announce_change, ask_to_advance


def open_or_join(
    job: Job,
    *,
    generation: int,
    rank: int | None,
    sentence: str,
    fault_at: float,
    node: str | None = None,
    lost: str = "",
) -> IncidentRow | None:
    """Open the job's incident, or add the fact to the one that is open. Must run inside a transaction.

    A thousand copies of one fault become one incident: the database allows one open incident per job. None: the job
    has ended meanwhile, and has nothing to lose any more.
    """
    now = time.time()
    row = IncidentRow.objects.filter(job=job, ended=False).first()
    drill = _drill_behind(job, generation=generation, rank=rank, node=node)
    if row is not None:
        _add_fact(row, Entry(kind=EntryKind.FACT, at=fault_at, text=sentence, data={"rank": rank}))
        if drill is not None:
            _mark_as_drill(row, drill)
        return row
    # Taken before it is looked at. The version rises, so that a decision about the job that was made before this
    # incident is not saved after it.
    Job.objects.filter(pk=job.pk).update(version=F("version") + 1)
    job.refresh_from_db()
    if job.state in {state.value for state in JOB_ENDS}:
        return None
    lost = lost or node or ("a runner" if rank is None else f"rank {rank}")
    incident = Incident(
        id=fresh_id("inc"),
        job=job.id,
        broken_generation=generation,
        state=IncidentState.DETECTED,
        opened_at=now,
        fault_at=min(fault_at, now),
        state_since=now,
        deadline_at=Policy().deadline(IncidentState.DETECTED, now=now),
        drill=drill.id if drill else None,
    )
    row = IncidentRow.objects.create(
        id=incident.id,
        job=job,
        state=incident.state.value,
        opened_at=now,
        deadline_at=incident.deadline_at,
        drill=drill,
        body=to_json(incident),
    )
    entries = [
        Entry(
            kind=EntryKind.STATE,
            at=now,
            text=f"Opened: generation {generation} of job {job.name} lost {lost}.",
            data={"to": IncidentState.DETECTED.value, "generation": generation, "rank": rank, "node": node},
        )
    ]
    if node is not None:
        entries.append(Entry(kind=EntryKind.FACT, at=now, text=sentence, data={"node": node}))
    if drill is not None:
        entries.append(_drill_entry(drill, now))
    seq = append_entries(row.pk, entries)
    # One that is to be stopped stays so: the incident is about its stop.
    Job.objects.filter(pk=job.pk).exclude(state=JobState.STOPPING.value).update(
        state=JobState.RECOVERING.value, state_since=now, reason=""
    )
    announce(f"incident:{row.pk}", seq)
    announce_change(f"job:{job.pk}")
    return row


def _drill_behind(job: Job, *, generation: int, rank: int | None, node: str | None) -> Drill | None:
    """The drill that asked for the death of this rank, or that broke a whole node.

    A drill that takes a node is behind all that the job loses meanwhile; another one only behind what it hit.
    """
    told = []
    for drill in Drill.objects.filter(job=job, generation_number=generation, ended=False).select_related("node"):
        kind = KINDS[drill.kind]
        hit = drill.node is not None and drill.node.name == node
        if kind.takes_node:
            # An agent that was killed cannot say that it applied the fault: its silence says so.
            if drill.state != "requested" or hit:
                told.append(drill)
        elif drill.state != "requested" and (hit or (rank is not None and drill.rank == rank)):
            told.append(drill)
    return next(iter(told), None)


def _drill_entry(drill: Drill, now: float) -> Entry:
    where = f"rank {drill.rank}"
    if drill.node is not None and KINDS[drill.kind].target is Target.NODE:
        where = drill.node.name
    text = f"This is a drill ({drill.id}): {drill.kind} on {where}, asked for by {drill.requested_by}."
    return Entry(kind=EntryKind.DRILL, at=now, text=text, data={"drill": drill.id})


def _mark_as_drill(row: IncidentRow, drill: Drill) -> None:
    """A rank that only died of the drill's may be heard of first, from another node, and have opened the incident."""
    row.refresh_from_db()  # the fact that was just added holds the row
    if row.ended or row.drill_id is not None or row.body["broken_generation"] != drill.generation_number:
        return
    IncidentRow.objects.filter(pk=row.pk).update(drill=drill, body={**row.body, "drill": drill.id})
    announce(f"incident:{row.pk}", append_entries(row.pk, [_drill_entry(drill, time.time())]))


def _add_fact(row: IncidentRow, entry: Entry) -> None:
    """Tell it, and void decisions made without it. If the incident has just ended, the sweep opens another."""
    if not IncidentRow.objects.filter(pk=row.pk, ended=False).update(version=F("version") + 1):
        return
    announce(f"incident:{row.pk}", append_entries(row.pk, [entry]))


def command_incident(incident_id: str, *, kind: str, by: str) -> IncidentRow:
    """Ask an open incident to pause, resume, retry or close; the next step obeys it.

    Raises `NotFound`, or `CommandRefused` if the action does not fit the present state.
    """
    try:
        command = Command(kind)
    except ValueError as err:
        raise CommandRefused(f"{kind!r} is no action; known are {', '.join(Command)}.") from err
    with transaction.atomic():
        row = IncidentRow.objects.filter(pk=incident_id).first()
        if row is None:
            raise NotFound(f"There is no incident {incident_id}.")
        if row.job_id is None:
            raise CommandRefused(f"Incident {incident_id} is of the control plane: all that can be asked is `rearm`.")
        if row.ended:
            raise CommandRefused(f"Incident {incident_id} has ended as {row.state}: nothing can be asked of it.")
        fitting = fitting_commands(IncidentState(row.state), stop_ordered=bool(row.body.get("stop_ordered")))
        if not fitting:
            raise CommandRefused(
                f"Incident {incident_id} waits for a sign of a job that may be healthy: attest that its node is "
                "powered off, have it fenced, or stop the job."
            )
        if command not in fitting:
            raise CommandRefused(
                f"Incident {incident_id} is {row.state}: {command.value} does not fit; "
                f"possible are {', '.join(sorted(fitting))}."
            )
        # The version rises, so that a step that was decided without the command cannot wipe it out.
        asked = IncidentRow.objects.filter(pk=incident_id, state=row.state, ended=False)
        if not asked.update(command=command.value, version=F("version") + 1):
            raise CommandRefused(f"Incident {incident_id} has moved on from {row.state} meanwhile: look and ask again.")
        entry = Entry(
            kind=EntryKind.OPERATOR,
            at=time.time(),
            text=f"{by} asked to {command.value} this incident.",
            data={"by": by, "command": command.value},
        )
        announce(f"incident:{incident_id}", append_entries(incident_id, [entry]))
        ask_to_advance(incident=incident_id)
    row.refresh_from_db()
    return row


def fitting_commands(state: IncidentState, *, stop_ordered: bool) -> frozenset[Command]:
    """What may be asked in a state. Of one that only waits for a sign of a job that may be healthy: nothing."""
    if state is IncidentState.WAITING_FOR_FENCE and not stop_ordered:
        return frozenset()
    return _FITTING_COMMANDS.get(state, _ALWAYS)


_ALWAYS = frozenset({Command.PAUSE, Command.CLOSE})
_FITTING_COMMANDS = {
    IncidentState.PAUSED: frozenset({Command.RESUME, Command.RETRY, Command.CLOSE}),
    IncidentState.ESCALATED: frozenset({Command.RETRY, Command.CLOSE}),
    IncidentState.WAITING_FOR_FENCE: frozenset({Command.CLOSE}),
}
"""Actions that fit a state; in all others an incident may be paused or closed."""
