"""How templates show values: a state as icon and word, a time with its absolute form, durations, sizes, numbers."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from django import template
from django.utils.html import conditional_escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

register = template.Library()

UNKNOWN = "-"
"""Stands for a value that is not known; never 0."""

LONGEST_UNBROKEN = 24
_HYPHENATED = re.compile(r"(?<![\w.])\w[\w.]*(?:-[\w.]*\w)+")


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
    "waiting_for_fence": Look(
        "bad",
        "fence",
        "Waiting for a fence",
        "A node cannot be seen, and nothing proves yet that its ranks cannot act: nothing is relaunched until then.",
    ),
    "paused": Look("warn", "pause", "Paused", "An operator has paused this recovery."),
    "escalated": Look("bad", "hand", "Needs a human", "Everstep does not go on by itself here."),
    "recovered": Look("good", "check", "Recovered", "Training goes on."),
    "cancelled": Look(
        "stale", "cross", "Cancelled", "Nothing is recovered any more: the job was stopped, or found running."
    ),
    "false_alarm": Look("stale", "check", "False alarm", "Nothing was broken."),
    "closed_by_operator": Look("stale", "cross", "Closed by operator", "A person closed this incident."),
    # Where an incident of the control plane stands.
    "breaker_open": Look("bad", "breaker", "Breaker open", "Many nodes are silent at once; absence is not acted upon."),
    "contact_restored": Look(
        "warn", "breaker", "Contact restored", "The nodes are back; the breaker stays open until it is re-armed."
    ),
    "rearmed": Look("good", "check", "Re-armed", "An operator looked; a silent node is acted upon again."),
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
    "held": Look("warn", "clock", "Held", "In contact, but not used before its agent has had its say."),
    "cordoned": Look("warn", "pause", "Cordoned", "Taken out of placement by an operator."),
    "unhealthy": Look("bad", "alert", "Unhealthy", "It has a known problem and is given no ranks."),
    "unknown": Look("stale", "question", "Unknown", "We cannot see it; that does not mean that it is dead."),
    "never joined": Look("stale", "question", "Never joined", "Its agent has never connected."),
}
_CONTACT = {
    "seen": Look("good", "eye", "In contact", "Its agent is heard."),
    "suspect": Look("warn", "clock", "Suspect", "Its agent has missed heartbeats; nothing follows from that yet."),
    "lost": Look(
        "bad", "unlinked", "Lost", "Its agent is silent. That alone stops no job: a second witness is needed."
    ),
    "unobserved": Look(
        "stale", "question", "Unobserved", "Nobody has listened for long enough: nothing is known of its contact."
    ),
}
_FENCE = {
    "requested": Look("info", "clock", "Requested", "Stored; a worker is about to do it."),
    "running": Look("info", "refresh", "Running", "The fence provider is being asked."),
    "fenced": Look("good", "fence", "Fenced", "The node counts as off: what it held is proven gone."),
    "failed": Look("bad", "cross", "Failed", "Nothing was proven; the node counts as before."),
    "cancelled": Look("stale", "cross", "Cancelled", "It was not needed any more, and nothing was done."),
    "contradicted": Look("bad", "alert", "Contradicted", "The node was heard again in the same boot: it was not off."),
}
_FENCE_KIND = {
    "provider": Look("info", "plug", "Fence provider", "The site's own power control switched it off."),
    "attestation": Look("info", "person", "Attestation", "An operator's word that it is powered off."),
}
_PROOF = {
    "cgroup_empty": Look("good", "shield", "Control group empty", "Its control group held no process any more."),
    "proc_scan_empty": Look("good", "shield", "No process left", "No process carried the generation's mark any more."),
    "never_started": Look("good", "shield", "Never started", "No process of it was ever started there."),
    "unkillable": Look(
        "warn", "shield", "Stuck in the kernel", "What is left is being killed and never returns to user mode."
    ),
    "boot_changed": Look("good", "refresh", "Rebooted", "The node has booted since; nothing of before is left."),
    "lease_expired": Look(
        "good", "clock", "Lease ran out", "Its runner has killed its ranks by now, and a stopped peer kept them still."
    ),
    "provider": Look("good", "plug", "Fence provider", "The site's power control says that the node is off."),
    "attestation": Look("good", "person", "Attestation", "An operator attests that the node is powered off."),
}
_HELP = {
    "stop": Look("info", "stop", "Its own agent", "It is in contact: it stops what is left and proves it."),
    "lease": Look("info", "clock", "Its lease", "It runs out by itself, and its runner kills its ranks before."),
    "return": Look("stale", "refresh", "Its return", "Its agent comes back and proves it, or the node has rebooted."),
    "provider": Look("info", "plug", "Fence provider", "The site's own power control switches the node off."),
    "attestation": Look("warn", "person", "Your attestation", "You say that it is powered off, and how you know."),
}
_WITNESS = {
    "heartbeat": Look("warn", "eye", "Heartbeat", "Its agent is silent."),
    "peer_failed": Look("warn", "bolt", "Peers failed", "Ranks on other nodes died of a broken collective."),
    "peer_stalled": Look("warn", "pause", "Peers stand still", "Ranks on other nodes make no progress."),
    "probe": Look("warn", "send", "Probe", "Another node's agent gets no answer from it."),
    "engine": Look("warn", "plug", "Engine", "A fence provider or an engine says that it is off."),
}
_PROBE = {
    "reachable": Look(
        "good", "check", "Answers", "Its kernel answered on the network; that says nothing of its agent."
    ),
    "unreachable": Look("bad", "unlinked", "No answer", "Its kernel did not answer within the limit."),
    "failed": Look("stale", "question", "Not done", "The look itself did not work; it says nothing about the node."),
    "": Look("info", "clock", "Asked", "The other node has not answered yet."),
}
_CAUSE = {
    "rank_killed": Look("bad", "bolt", "Rank killed", "A rank was ended by a signal."),
    "rank_failed": Look("bad", "cross", "Rank failed", "A rank exited with an error of its own."),
    "early_exit": Look("bad", "stop", "Early exit", "A rank exited with code 0 before its last step."),
    "launch_failed": Look("bad", "play", "Launch failed", "A generation could not be started."),
    "loss_not_finite": Look(
        "bad", "cross", "Loss not finite", "No rank died, but the loss has been NaN or infinite for several steps."
    ),
    "runner_lost": Look("bad", "question", "Runner gone", "A node's runner ended; no end of a rank is known."),
    "node_lost": Look("bad", "unlinked", "Node lost", "A node is silent, and a second witness misses it too."),
    "node_silent": Look("warn", "question", "Out of sight", "None of the job's nodes can be seen."),
}
_PHASE = {
    "setup": Look("info", "clock", "Setting up", "Until it has finished a few steps."),
    "compile": Look("info", "clock", "Compiling", "Before its first finished step."),
    "step": Look("info", "step", "Stepping", "It makes a training step."),
    "save": Look("info", "receipt", "Saving", "It writes a checkpoint."),
    "evaluation": Look("info", "eye", "Evaluating", "It evaluates, and makes no training step meanwhile."),
}
_SPLIT = {
    "data": Look("info", "clock", "Data", "It waits for its next batch."),
    "forward_backward": Look("info", "play", "Forward and backward", "What no other part claims."),
    "optimizer": Look("info", "step", "Optimizer", "The optimizer's step."),
    "wait": Look("info", "pause", "Waiting", "The script says that it waits for other ranks."),
    "checkpoint": Look("info", "receipt", "Checkpoint", "Training stands still for a save."),
    "other": Look("stale", "question", "Not measured", "No measured part claims it."),
}
_DRILL = {
    "requested": Look("info", "clock", "Requested", "Stored; not yet with the agent."),
    "armed": Look("info", "clock", "Armed", "The agent holds the fault and waits for its moment."),
    "applied": Look("info", "bolt", "Applied", "The fault is done; recovery is being watched."),
    "undone": Look("info", "refresh", "Undone", "The fault is taken back; what was promised is being watched."),
    "passed": Look("good", "check", "Passed", "The promise was kept."),
    "failed": Look("bad", "cross", "Failed", "The promise was not kept."),
    "refused": Look("warn", "hand", "Refused", "A guard or the agent's policy said no; nothing was broken."),
    "expired": Look("stale", "clock", "Expired", "It could not be applied in time; nothing was broken."),
    "cancelled": Look(
        "stale", "stop", "Cancelled", "Its incident was cancelled before it had recovered: nothing was shown."
    ),
}
_DRILL_KIND = {
    "kill-rank": Look("info", "bolt", "Kill a rank", "One rank ends by SIGKILL."),
    "kill-agent": Look("info", "plug", "Kill agent and ranks", "A node loses all that Everstep runs on it."),
    "restart-agent": Look("info", "refresh", "Restart the agent", "Training must not notice."),
    "freeze-node": Look("info", "pause", "Freeze a node", "A true silent loss: nothing died, nothing speaks."),
    "partition": Look("info", "unlinked", "Cut the agent off", "Its ranks still meet those of other nodes."),
    "isolate-node": Look("info", "fence", "Isolate a node", "Neither the server nor other ranks reach it."),
    "server-down": Look("info", "stop", "Take the server down", "Training must not notice."),
}
_PROMISE = {
    "recovered": Look(
        "info", "shield", "Promises recovery", "The job is back within the time, and its continuity is proven."
    ),
    "unharmed": Look("good", "check", "Promises no harm", "The job does not notice: nothing is lost, and no incident."),
}
_VERDICT = {
    "bit-equal": Look("good", "check", "bit-equal", "Every replayed step is the same, bit by bit."),
    "state-equal": Look("good", "check", "state-equal", "The restored state is what was saved."),
    "inconclusive": Look("warn", "question", "inconclusive", "There is too little to prove it either way."),
    "broken": Look("bad", "cross", "broken", "The training does not go on where it was."),
}
_INTEGRITY = {
    "complete": Look("stale", "clock", "Complete", "Its manifest is in place; its files were not read again yet."),
    "rehashed": Look("good", "check", "Rehashed", "Every file was read again after the save, and is what was written."),
    "test_loaded": Look("good", "shield", "Loaded", "Every rank of a generation has loaded it, with equal digests."),
    "damaged": Look("bad", "cross", "Damaged", "Its files are not what was written: it is never loaded."),
}
_TRUST = {
    "unknown": Look("stale", "question", "Not known yet", "Too few steps were made since."),
    "clean": Look("good", "check", "Clean", "Training went on sanely after it was saved."),
    "resumed_from": Look("good", "shield", "Proven", "A generation went on from it sanely."),
    "tainted": Look("bad", "alert", "Tainted", "Training went wrong before it or soon after it was loaded: not used."),
}
_HEALTH = {
    "ok": Look("good", "check", "OK", ""),
    "late": Look("bad", "alert", "Late", ""),
    "down": Look("bad", "cross", "Away", ""),
    "partial": Look("warn", "alert", "Partial", ""),
    "slow": Look("warn", "clock", "Slow", ""),
    "none": Look("stale", "question", "None yet", ""),
}
LOOKS: dict[str, dict[str, Look]] = {
    "incident": _INCIDENT,
    "job": _JOB,
    "node": _NODE,
    "contact": _CONTACT,
    "fence": _FENCE,
    "fence_kind": _FENCE_KIND,
    "proof": _PROOF,
    "help": _HELP,
    "witness": _WITNESS,
    "probe": _PROBE,
    "cause": _CAUSE,
    "phase": _PHASE,
    "split": _SPLIT,
    "drill": _DRILL,
    "drill_kind": _DRILL_KIND,
    "promise": _PROMISE,
    "verdict": _VERDICT,
    "integrity": _INTEGRITY,
    "trust": _TRUST,
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
def mark(kind: str, state: str) -> SafeString:
    """A second word beside a badge: icon and word without a ground of their own."""
    seen = look(kind, str(state))
    return format_html(
        '<span class="mark-word tone-{}" title="{}">{}<span>{}</span></span>',
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
def look_icon(kind: str, state: str) -> SafeString:
    """The symbol of a state alone: its word stands beside it."""
    return icon(look(kind, str(state)).icon)


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
def ticking(counted: float) -> SafeString:
    """Seconds that the page counts on, from what has been counted already: `46 s`."""
    since = time.time() - counted
    return format_html(
        '<span class="ticks" data-since="{}" data-style="span">{}</span>', f"{since:.3f}", _span(counted)
    )


@register.filter
def unheard_at(counted: float, limit_s: float) -> str:
    """When a silence that has been counted so far reaches a limit, if this page hears nothing new until then."""
    return f"{time.time() - counted + limit_s:.3f}"


@register.filter
def until(at: float) -> SafeString:
    """Seconds that are left, which the page counts down: `in 24 s`."""
    left = at - time.time()
    shown = f"in {_span(left)}" if left > 0 else "any moment now"
    return format_html('<span class="ticks" data-until="{}">{}</span>', f"{at:.3f}", shown)


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
def inline_code(text: str) -> SafeString:
    """A sentence in which what stands between backticks is code."""
    parts = text.split("`")
    told = ((format_html("<code>{}</code>", part) if at % 2 else part,) for at, part in enumerate(parts))
    return format_html_join("", "{}", told)


@register.filter
def unbroken(told: str) -> SafeString:
    """Text in which no line ends within a name such as `gpu-02`; what is longer than a name usually is may break."""
    return mark_safe(_HYPHENATED.sub(_unbroken_name, conditional_escape(told)))  # noqa: S308 (escaped right here)


def _unbroken_name(found: re.Match[str]) -> str:
    name = found[0]  # escaped already
    return f'<span class="nowrap">{name}</span>' if len(name) <= LONGEST_UNBROKEN else name


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
