"""Where each live topic stands, read from the rows: the live feed's snapshot, and its stand-in while Redis is away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Count, Max, Sum

from recovery.models import Drill, FenceAction, IncidentRow, Job, Node, TimelineEntry
from recovery.queries.moment import moment
from recovery.store.situations import load_fleet

FLEET = "fleet"


@dataclass(frozen=True, kw_only=True)
class TopicPosition:
    """Two equal positions mean that nothing to show has changed between them."""

    seq: int
    """Last timeline seq of an incident, last step of a job; otherwise a number that does not fall."""
    mark: str
    """Changes with what the seq does not count, such as the state."""


def topic_positions(topics: Iterable[str], *, now: float | None = None) -> dict[str, TopicPosition]:
    """Positions of `fleet`, `job:<id>`, `incident:<id>`, `drill:<id>`, and `job:*` and the like for all of a kind.

    A topic of something that does not exist is left out. A fixed number of queries per kind of topic.
    """
    wanted = set(topics)
    positions: dict[str, TopicPosition] = {}
    if FLEET in wanted:
        positions[FLEET] = _fleet(moment(now))
    for kind, single, every in (
        ("incident", _incidents, _all_incidents),
        ("job", _jobs, _all_jobs),
        ("drill", _drills, _all_drills),
    ):
        if f"{kind}:*" in wanted:
            positions[f"{kind}:*"] = every()
        ids = [topic.partition(":")[2] for topic in wanted if topic.startswith(f"{kind}:") and topic != f"{kind}:*"]
        if ids:
            positions |= {f"{kind}:{name}": position for name, position in single(ids).items()}
    return positions


def _fleet(now: float) -> TopicPosition:
    nodes = Node.objects.order_by("name").values_list(
        "name", "session", "gpus_at", "revision", "unhealthy_reason", "quarantine_reason", "cordoned", "claimed_by",
        "revoked",
    )  # fmt: skip
    fences = FenceAction.objects.values_list("id", "state", "attempts", "contradicted_at")[:50]
    contacts = [(node.name, node.contact.value, node.unconfirmed) for node in load_fleet(now).nodes]
    return TopicPosition(seq=int(now * 1000), mark=repr([list(nodes), contacts, list(fences)]))


def _incidents(ids: list[str]) -> dict[str, TopicPosition]:
    rows = IncidentRow.objects.filter(pk__in=ids).annotate(last=Max("entries__seq"))
    return {row.id: TopicPosition(seq=row.last or 0, mark=f"{row.state} {row.version} {row.command}") for row in rows}


def _all_incidents() -> TopicPosition:
    rows = IncidentRow.objects.aggregate(count=Count("pk"), versions=Sum("version"))
    last = TimelineEntry.objects.aggregate(last=Max("pk"))["last"] or 0
    return TopicPosition(seq=last, mark=f"{rows['count']} {rows['versions']}")


def _jobs(ids: list[str]) -> dict[str, TopicPosition]:
    return {
        job.id: TopicPosition(
            seq=job.last_step or 0, mark=f"{job.state} {job.version} {job.generation} {job.stop_wanted} {job.reason}"
        )
        for job in Job.objects.filter(pk__in=ids)
    }


def _all_jobs() -> TopicPosition:
    rows = Job.objects.values_list("pk", "state", "version", "generation", "last_step").order_by("pk")
    return TopicPosition(seq=sum(row[4] or 0 for row in rows), mark=repr([row[:4] for row in rows]))


def _drills(ids: list[str]) -> dict[str, TopicPosition]:
    return {
        drill.id: TopicPosition(seq=int(_newest(drill) * 1000), mark=f"{drill.state} {drill.detail}")
        for drill in Drill.objects.filter(pk__in=ids)
    }


def _all_drills() -> TopicPosition:
    drills = list(Drill.objects.order_by("-requested_at")[:50])
    newest = max((_newest(drill) for drill in drills), default=0.0)
    return TopicPosition(seq=int(newest * 1000), mark=repr([(drill.id, drill.state) for drill in drills]))


def _newest(drill: Drill) -> float:
    return max(drill.requested_at, drill.applied_at or 0.0, drill.ended_at or 0.0)
