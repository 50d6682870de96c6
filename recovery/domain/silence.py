"""Whether a node is silent: judged by the server's clock alone, and only by time in which somebody listened.

The web processes that hold the agents' sockets are the observers. Each writes whom it heard together with its own beat,
so that a silence is as long as an observer saw it last, and a slow or absent observer makes no node look dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

RULE_VERSION = "silence-1"

OBSERVER_GONE_AFTER_S = 5.0
"""An observer beats each second; without a beat for this long it is gone, or its database is."""


class Contact(StrEnum):
    """What the server knows of its contact with a node's agent."""

    SEEN = "seen"
    SUSPECT = "suspect"
    LOST = "lost"
    UNOBSERVED = "unobserved"
    """Nobody listens, or too shortly: nothing is known, least of all that the node is gone."""


@dataclass(frozen=True, kw_only=True)
class SilenceLimits:
    """Seconds of silence, on the server's clock."""

    suspect_s: float = 3.0
    lost_s: float = 10.0
    return_grace_s: float = 40.0
    """After an observer was lost or started: until its agents are back; their longest pause between tries is 30 s."""


@dataclass(frozen=True, kw_only=True)
class ObserverView:
    """One web process that hears agents."""

    name: str
    since: float
    """It has listened without a break since then."""
    beat_at: float
    lag_s: float = 0.0
    """By how much its loop or the database held it up lately: subtracted from each silence."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """The judgement on one node."""

    contact: Contact
    since: float | None = None
    """When the node was last heard; None if it never was."""
    silent_s: float = 0.0
    """Seconds of the silence that count."""


def judge_silence(
    *,
    last_heard_at: float | None,
    observer: str,
    observers: Sequence[ObserverView],
    now: float,
    limits: SilenceLimits | None = None,
) -> Silence:
    """Judge one node. `observer` is the web process that heard it last."""
    limits = limits or SilenceLimits()
    listening = [seen for seen in observers if now - seen.beat_at <= OBSERVER_GONE_AFTER_S]
    if last_heard_at is None or not listening:
        return Silence(contact=Contact.UNOBSERVED, since=last_heard_at)
    own = next((seen for seen in listening if seen.name == observer), None)
    if own is not None:
        counted_from = max(last_heard_at, own.since)
        watched_until = own.beat_at
        lag_s = own.lag_s
    else:
        # Its socket went with the process that held it: it needs time to come back to one that is there.
        counted_from = max(last_heard_at, min(seen.since for seen in listening)) + limits.return_grace_s
        watched_until = max(seen.beat_at for seen in listening)
        lag_s = max(seen.lag_s for seen in listening)
    silent_s = max(0.0, watched_until - counted_from - lag_s)
    if silent_s >= limits.lost_s:
        contact = Contact.LOST
    elif silent_s >= limits.suspect_s:
        contact = Contact.SUSPECT
    else:
        # Heard by a process that is gone, and not yet by one that is there: it may be back in a moment, or be dead.
        contact = Contact.UNOBSERVED if own is None else Contact.SEEN
    return Silence(contact=contact, since=last_heard_at, silent_s=silent_s)
