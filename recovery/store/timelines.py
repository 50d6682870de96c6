"""Appends sentences to an incident's timeline: numbered without holes, hash-chained, in the caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable

from recovery.domain.timeline import Entry, EntryKind, chain_hash
from recovery.models import TimelineEntry


def append_entries(incident_id: str, entries: Iterable[Entry]) -> int:
    """Append in order and return the last sequence number.

    The incident's row must have been updated in the same transaction: that serialises writers on every database, and
    the unique constraint on (incident, seq) guards it.
    """
    last = TimelineEntry.objects.filter(incident_id=incident_id).order_by("-seq").first()
    seq, previous = (last.seq, last.hash) if last else (0, "")
    now = time.time()
    for entry in entries:
        seq += 1
        digest = chain_hash(previous=previous, seq=seq, entry=entry)
        TimelineEntry.objects.create(
            incident_id=incident_id,
            seq=seq,
            occurred_at=entry.at,
            recorded_at=now,
            kind=entry.kind.value,
            text=entry.text,
            data=dict(entry.data),
            previous_hash=previous,
            hash=digest,
        )
        previous = digest
    return seq


def first_broken_link(incident_id: str) -> int | None:
    """The sequence number of the first entry whose hash or number does not fit its chain; None if all fit."""
    previous = ""
    for expected, row in enumerate(TimelineEntry.objects.filter(incident_id=incident_id).order_by("seq"), start=1):
        entry = Entry(kind=EntryKind(row.kind), at=row.occurred_at, text=row.text, data=row.data)
        digest = chain_hash(previous=previous, seq=expected, entry=entry)
        if row.seq != expected or row.previous_hash != previous or row.hash != digest:
            return expected
        previous = row.hash
    return None
