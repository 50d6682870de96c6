"""How templates show values: a state as icon and word, a time with its absolute form, durations, sizes, numbers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()

UNKNOWN = "-"
"""Stands for a value that is not known; never 0."""


@dataclass(frozen=True)
class Look:
    tone: str
    icon: str
    word: str
    meaning: str


_INCIDENT = {
    "detected": Look("warn", "alert", "Detected", "A fault was seen; the job is about to be stopped."),
    "stopping": Look("info", "stop", "Stopping", "Every rank of the old generation is being stopped, with proof."),
    "placing": Look("info", "pin", "Placing", "Healthy nodes and a checkpoint are being chosen and prepared."),
    "launching": Look("info", "play", "Launching", "The new generation is starting."),
    "verifying": Look("info", "shield", "Verifying", "The replayed steps are compared with the lost ones."),
    "awaiting_approval": Look("warn", "hand", "Awaiting approval", "Policy wants a person's yes before going on."),
    "waiting_for_capacity": Look("warn", "clock", "Waiting for capacity", "Too few healthy nodes are free."),
    "waiting_for_checkpoint": Look("warn", "clock", "Waiting for checkpoint", "No trusted checkpoint is there yet."),
    "paused": Look("warn", "pause", "Paused", "An operator has paused this recovery."),
    "escalated": Look("bad", "hand", "Needs a human", "Everstep does not go on by itself here."),
    "recovered": Look("good", "check", "Recovered", "Training goes on."),
    "cancelled": Look("stale", "cross", "Cancelled", "The job was stopped, so that there is nothing to recover."),
    "false_alarm": Look("stale", "check", "False alarm", "Nothing was broken."),
    "closed_by_operator": Look("stale", "cross", "Closed by operator", "A person closed this incident."),
}
_JOB = {
    "pending": Look("stale", "clock", "Pending", "Accepted; not placed yet."),
    "placing": Look("info", "pin", "Placing", "Nodes are being chosen and prepared."),
    "launching": Look("info", "play", "Launching", "The ranks are starting."),
    "running": Look("good", "play", "Running", "All ranks train."),
    "recovering": Look("warn", "refresh", "Recovering", "An incident is open; Everstep brings the job back."),
    "stopping": Look("stale", "stop", "Stopping", "The ranks are being stopped, with proof."),
    "succeeded": Look("good", "check", "Succeeded", "Every rank did its last step and exited with 0."),
    "failed": Look("bad", "cross", "Failed", "The job ended without reaching its last step."),
    "stopped": Look("stale", "stop", "Stopped", "An operator stopped it."),
}
_NODE = {
    "ready": Look("good", "check", "Ready", "In contact, healthy, and free."),
    "busy": Look("info", "play", "In use", "In contact, healthy, and claimed by a job."),
    "cordoned": Look("warn", "pause", "Cordoned", "Taken out of placement by an operator."),
    "unhealthy": Look("bad", "alert", "Unhealthy", "It has a known problem and is given no ranks."),
    "unknown": Look("stale", "question", "Unknown", "We cannot see it; that does not mean that it is dead."),
    "never joined": Look("stale", "question", "Never joined", "Its agent has never connected."),
}
_DRILL = {
    "requested": Look("info", "clock", "Requested", "Stored; not yet with the agent."),
    "armed": Look("info", "clock", "Armed", "The agent holds the fault and waits for its moment."),
    "applied": Look("info", "bolt", "Applied", "The fault is done; recovery is being watched."),
    "passed": Look("good", "check", "Passed", "The promise was kept."),
    "failed": Look("bad", "cross", "Failed", "The promise was not kept."),
    "refused": Look("warn", "hand", "Refused", "A guard or the agent's policy said no; nothing was broken."),
    "expired": Look("stale", "clock", "Expired", "It could not be applied in time; nothing was broken."),
}
_VERDICT = {
    "bit-equal": Look("good", "check", "bit-equal", "Every replayed step is the same, bit by bit."),
    "state-equal": Look("good", "check", "state-equal", "The restored state is what was saved."),
    "inconclusive": Look("warn", "question", "inconclusive", "There is too little to prove it either way."),
    "broken": Look("bad", "cross", "broken", "The training does not go on where it was."),
}
_HEALTH = {
    "ok": Look("good", "check", "OK", ""),
    "late": Look("bad", "alert", "Late", ""),
    "down": Look("bad", "cross", "Away", ""),
    "partial": Look("warn", "alert", "Partial", ""),
    "none": Look("stale", "question", "None yet", ""),
}
LOOKS: dict[str, dict[str, Look]] = {
    "incident": _INCIDENT,
    "job": _JOB,
    "node": _NODE,
    "drill": _DRILL,
    "verdict": _VERDICT,
    "health": _HEALTH,
}

ENTRY_ICONS = {
    "fault": "bolt",
    "state": "step",
    "decision": "scale",
    "order": "send",
    "proof": "shield",
    "fact": "eye",
    "receipt": "receipt",
    "page": "hand",
    "drill": "flask",
    "operator": "person",
}


def look(kind: str, state: str) -> Look:
    """The look of a state; a state of a newer version is shown by its own name."""
    return LOOKS[kind].get(state) or Look("stale", "question", state.replace("_", " ").capitalize(), "")


@register.simple_tag
def badge(kind: str, state: str) -> SafeString:
    """A state as icon and word, its meaning as tooltip."""
    seen = look(kind, str(state))
    return format_html(
        '<span class="badge tone-{}" title="{}">{}<span>{}</span></span>',
        seen.tone,
        seen.meaning,
        icon(seen.icon),
        seen.word,
    )


@register.simple_tag
def state_word(kind: str, state: str) -> str:
    return look(kind, str(state)).word


@register.simple_tag
def state_meaning(kind: str, state: str) -> str:
    return look(kind, str(state)).meaning


@register.simple_tag
def icon(name: str) -> SafeString:
    """A symbol of `_icons.html`, hidden from screen readers: a word always stands beside it."""
    return format_html('<svg class="icon" aria-hidden="true"><use href="#i-{}"></use></svg>', name)


@register.filter
def entry_icon(kind: str) -> str:
    return ENTRY_ICONS.get(kind, "eye")


@register.filter
def ago(at: float | None) -> SafeString | str:
    """Relative time that the page keeps counting, with the absolute one as tooltip."""
    if at is None:
        return UNKNOWN
    return _time(at, "ago", f"{_span(max(0.0, time.time() - at))} ago")


@register.filter
def clock(at: float | None) -> SafeString | str:
    """Time of day with milliseconds, for a story of seconds."""
    if at is None:
        return UNKNOWN
    moment = datetime.fromtimestamp(at, UTC)
    return _time(at, "clock", f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}")


@register.filter
def moment(at: float | None) -> SafeString | str:
    """Date and time."""
    if at is None:
        return UNKNOWN
    return _time(at, "moment", f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC")


def _time(at: float, style: str, text: str) -> SafeString:
    moment_at = datetime.fromtimestamp(at, UTC)
    return format_html(
        '<time datetime="{}" data-at="{}" data-style="{}" title="{} UTC">{}</time>',
        moment_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        f"{at:.3f}",
        style,
        f"{moment_at:%Y-%m-%d %H:%M:%S}",
        text,
    )


@register.filter
def seconds(value: float | None) -> str:
    """A measured duration: `0.21 s`, `14.2 s`, `2 min 05 s`."""
    if value is None:
        return UNKNOWN
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    return _span(value)


@register.filter
def span(value: float | None) -> str:
    """A rough duration: `3 s`, `12 min`, `5 h`."""
    return UNKNOWN if value is None else _span(value)


def _span(value: float) -> str:
    whole = int(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60:02d} s" if whole < 600 else "")
    if whole < 172_800:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60:02d} min" if whole < 36_000 else "")
    return f"{whole // 86_400} d"


@register.filter
def as_json(value: object) -> str:
    """JSON for a `data-` attribute; the template escapes it."""
    return json.dumps(value, separators=(",", ":"))


@register.filter
def milliseconds(value: float) -> str:
    return f"{value * 1000:.1f} ms"


@register.filter
def offset_from(at: float, start: float) -> str:
    """Seconds from a start, with sign: `+2.31 s`."""
    offset = at - start
    return f"{'-' if offset < -0.005 else '+'}{seconds(abs(offset))}"


@register.filter
def plain_moment(at: float) -> str:
    """Date and time for where no markup fits."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


@register.filter
def add_seconds(at: float, amount: float) -> float:
    return at + amount


@register.filter
def subtract(value: float, other: float) -> float:
    return value - other


@register.filter
def size(value: float | None) -> str:
    """Bytes in binary units with three digits."""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


@register.filter
def number(value: float | None) -> str:
    """A whole number with thin thousands, or a real one with six significant digits."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u2009")
    return f"{value:.6g}"


@register.filter
def known(value: object) -> object:
    """The value, or a dash where it is not known."""
    return UNKNOWN if value is None or value == "" else value


@register.filter
def share(part: float | None, whole: float | None) -> int:
    """Percent of a meter, 0 to 100; 0 where it cannot be said."""
    if part is None or not whole:
        return 0
    return round(min(max(part / whole, 0.0), 1.0) * 100)
