"""Time in which nobody looked or listened counts for nothing: after such an absence deadlines move by its length.

The sweep and the tasks say that they are there before they decide anything; without a web process that hears agents the
sweep does not look. Without this, the first look after an outage would find every limit overdue and stop launches that
went well, while what the agents have to tell is on its way.
"""

from __future__ import annotations

import logging
import time

from django.db import transaction
from django.db.models import F, Value
from django.db.models.functions import Least

from recovery.domain.instructions import JobState
from recovery.models import Claim, Drill, IncidentRow, Job, Observer

log = logging.getLogger(__name__)

AWAY_AFTER_S = 30.0
"""Without a look for this long; a sweep comes every two seconds."""
RECONNECT_S = 40.0
"""Until the agents are back and have told what they could not tell: their longest pause between tries is 30 s."""
_NOTED_EVERY_S = 1.0
DEAF_AFTER_S = 15.0
"""Web processes beat each second. Longer than silence is judged by: nothing is decided at all then."""


def somebody_listens() -> bool:
    """Whether a web process hears agents. If none does, orders reach nobody and limits run out unseen."""
    return Observer.objects.filter(beat_at__gt=time.time() - DEAF_AFTER_S).exists()


def note_presence() -> None:
    """Remember that somebody looks now; if nobody did for a while, give that time back to all that has a limit."""
    now = time.time()
    presence, _ = Claim.objects.get_or_create(
        name="presence", defaults={"holder": "", "until": 0.0, "last_done_at": now}
    )
    seen_at = presence.last_done_at or now
    away_s = now - seen_at
    if 0.0 <= away_s < _NOTED_EVERY_S:
        return
    with transaction.atomic():
        first = Claim.objects.filter(name="presence", last_done_at=seen_at).update(last_done_at=now)
        if first and away_s >= AWAY_AFTER_S:
            log.warning("nobody has looked for %.0f s: deadlines are moved", away_s)
            _move_deadlines(away_s + RECONNECT_S, now)


def _move_deadlines(by_s: float, now: float) -> None:
    limited_incidents = IncidentRow.objects.filter(ended=False, deadline_at__isnull=False)
    limited_incidents.update(version=F("version"))  # taken before they are read: facts come in meanwhile
    for row in limited_incidents:
        deadline_at = (row.deadline_at or now) + by_s
        IncidentRow.objects.filter(pk=row.pk).update(
            body={**row.body, "deadline_at": deadline_at}, deadline_at=deadline_at, version=F("version") + 1
        )
    limited = (JobState.PENDING.value, JobState.PLACING.value, JobState.LAUNCHING.value)
    Job.objects.filter(state__in=limited).update(
        state_since=Least(F("state_since") + by_s, Value(now)), version=F("version") + 1
    )
    Drill.objects.filter(ended=False).update(away_s=F("away_s") + by_s)
