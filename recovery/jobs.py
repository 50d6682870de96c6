"""Submit and stop jobs: called by the REST API, the pages and the demo."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from django.db import transaction
from django.db.models import F

from recovery.domain.instructions import JOB_ENDS, JobState
from recovery.domain.plan import LeaseLimits
from recovery.errors import CommandRefused, JobRefused, NotFound
from recovery.ids import fresh_id
from recovery.models import Job, Node
from recovery.store.save_intervals import AUTO
from recovery.wakeup import announce_change, ask_to_advance

MAX_SPEC_TEXT = 4000
MAX_SPEC_BYTES = 64 * 1024
"""A node gets all that it should run in one frame of 1 MiB: what does not fit could not be stopped either."""


def submit_job(spec: Mapping[str, Any], *, owner: str) -> Job:
    """Capture a spec once and have the job launched. Raises `JobRefused` with what to change."""
    captured = capture_spec(spec)
    now = time.time()
    with transaction.atomic():
        job = Job.objects.create(
            id=fresh_id("job"),
            name=captured["name"],
            owner=owner,
            spec=captured,
            state=JobState.PENDING.value,
            total_steps=captured["total_steps"],
            submitted_at=now,
            state_since=now,
        )
        ask_to_advance(job=job.id)
        announce_change(f"job:{job.id}")
    return job


def stop_job(job_id: str, *, by: str) -> Job:
    """Want a job stopped. Its ranks are killed; an open incident ends as cancelled."""
    with transaction.atomic():
        job = Job.objects.filter(pk=job_id).first()
        if job is None:
            raise NotFound(f"There is no job {job_id}.")
        if job.state in {state.value for state in JOB_ENDS}:
            raise CommandRefused(f"Job {job.name} has already ended ({job.state}): there is nothing to stop.")
        Job.objects.filter(pk=job_id).update(stop_wanted=True, reason=f"stop asked for by {by}")
        # What agents run of it that is not known here (see `strays`) has to go too.
        Node.objects.filter(strays__job=job).update(revision=F("revision") + 1)
        incident = job.incidents.filter(ended=False).first()
        if incident is not None:
            ask_to_advance(incident=incident.pk)
        else:
            ask_to_advance(job=job_id)
        announce_change(f"job:{job_id}")
    job.refresh_from_db()
    return job


def capture_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Check a spec and fill in its defaults. Raises `JobRefused` naming the field and what it should be."""
    known = {
        "name", "argv", "working_directory", "environment", "nodes", "ranks_per_node", "total_steps",
        "checkpoint_directory", "user", "stop_limit_s", "synchronous", "phase_limits_s", "save_every",
        "last_good_limit_s", "memory_every", "memory_partner",
    }  # fmt: skip
    unknown = sorted(set(spec) - known)
    if unknown:
        raise JobRefused(f"The spec has unknown fields {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
    captured = {
        "name": _text(spec, "name"),
        "argv": _argv(spec),
        "working_directory": _absolute(spec, "working_directory"),
        "environment": _environment(spec),
        "nodes": _nodes(spec),
        "ranks_per_node": _count(spec, "ranks_per_node", default=1, most=64),
        "total_steps": None
        if spec.get("total_steps") is None
        else _count(spec, "total_steps", default=1, most=2**31 - 1),
        "checkpoint_directory": _absolute(spec, "checkpoint_directory"),
        "user": "" if not spec.get("user") else _text(spec, "user"),
        "stop_limit_s": _seconds(spec, "stop_limit_s", default=30.0),
        "synchronous": _flag(spec, "synchronous", default=True),
        "phase_limits_s": _phase_limits(spec),
        "save_every": _interval(spec, "save_every"),
        "memory_every": _interval(spec, "memory_every"),
        "memory_partner": _flag(spec, "memory_partner", default=False),
        "last_good_limit_s": None
        if spec.get("last_good_limit_s") is None
        else _seconds(spec, "last_good_limit_s", default=0.0),
    }
    _check_size(captured)
    return captured


def _check_size(captured: Mapping[str, Any]) -> None:
    try:
        size_bytes = len(json.dumps(captured, ensure_ascii=False).encode())
    except UnicodeEncodeError as err:
        raise JobRefused(f"The spec holds a character that is half of a pair and cannot be sent ({err}).") from err
    if size_bytes > MAX_SPEC_BYTES:
        raise JobRefused(
            f"The spec has {size_bytes} bytes, at most {MAX_SPEC_BYTES} are taken: "
            "pass long arguments and environments in a file that every node sees."
        )


def _text(spec: Mapping[str, Any], field: str) -> str:
    value = spec.get(field)
    if not isinstance(value, str) or not value.strip() or len(value) > 200 or not value.isprintable():
        raise JobRefused(f"{field} must be 1 to 200 printable characters, not {value!r:.60}.")
    return value


def _argv(spec: Mapping[str, Any]) -> list[str]:
    argv = spec.get("argv")
    if not isinstance(argv, list | tuple) or not argv or not all(isinstance(part, str) for part in argv):
        raise JobRefused(
            'argv must be a list of strings, for example ["/usr/bin/python3", "train.py", "--steps", "100"].'
        )
    if any("\0" in part or len(part) > MAX_SPEC_TEXT for part in argv) or len(argv) > 500:
        raise JobRefused(f"argv holds a NUL character, or is over 500 arguments of {MAX_SPEC_TEXT} characters.")
    if not argv[0].startswith("/"):
        raise JobRefused(f"argv[0] must be the absolute path of the interpreter, not {argv[0]!r:.60}.")
    return list(argv)


def _absolute(spec: Mapping[str, Any], field: str) -> str:
    value = spec.get(field)
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or len(value) > MAX_SPEC_TEXT:
        raise JobRefused(f"{field} must be an absolute path that every node sees, not {value!r:.60}.")
    return value


def _environment(spec: Mapping[str, Any]) -> dict[str, str]:
    value = spec.get("environment") or {}
    if not isinstance(value, Mapping):
        raise JobRefused("environment must be an object of names and texts.")
    for name, text in value.items():
        if not isinstance(name, str) or not name.isidentifier() or (name.startswith("EVERSTEP_") and name not in _OPEN):
            raise JobRefused(f"environment: {name!r:.60} is no name that a job may set.")
        if not isinstance(text, str) or "\0" in text or len(text) > MAX_SPEC_TEXT:
            raise JobRefused(f"environment: the value of {name} must be text of at most {MAX_SPEC_TEXT} characters.")
    return dict(value)


_OPEN = frozenset({"EVERSTEP_BEATS"})


def _count(spec: Mapping[str, Any], field: str, *, default: int, most: int) -> int:
    value = spec.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise JobRefused(f"{field} must be a whole number from 1 to {most}, not {value!r:.60}.")
    return value


def _interval(spec: Mapping[str, Any], name: str) -> int | str | None:
    """Steps between saves, `auto` for what costs least, None where the script says."""
    value = spec.get(name)
    if value is None or value == AUTO:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
        raise JobRefused(f"{name} must be a number of steps, 1 or more, or {AUTO!r}, not {value!r:.60}.")
    return value


_MOST_NODES = 10_000


def _nodes(spec: Mapping[str, Any]) -> int | dict[str, int]:
    """A number of nodes, or a range: {"min": 2, "max": 4, "multiple_of": 2}."""
    value = spec.get("nodes", 1)
    if not isinstance(value, Mapping):
        return _count(spec, "nodes", default=1, most=_MOST_NODES)
    unknown = sorted(set(value) - {"min", "max", "multiple_of"})
    if unknown:
        raise JobRefused(f"nodes has unknown fields {', '.join(unknown)}; known are max, min, multiple_of.")
    if "min" not in value or "max" not in value:
        raise JobRefused('nodes as a range needs min and max, for example {"min": 2, "max": 4, "multiple_of": 2}.')
    counted = {name: _count(value, name, default=1, most=_MOST_NODES) for name in ("min", "max", "multiple_of")}
    if counted["min"] > counted["max"]:
        raise JobRefused(f"nodes: min is {counted['min']} and max is {counted['max']}; min must not be above max.")
    for name in ("min", "max"):
        if counted[name] % counted["multiple_of"]:
            raise JobRefused(f"nodes: {name} {counted[name]} is no multiple of {counted['multiple_of']}.")
    return counted


def _flag(spec: Mapping[str, Any], field: str, *, default: bool) -> bool:
    value = spec.get(field, default)
    if not isinstance(value, bool):
        raise JobRefused(f"{field} must be true or false, not {value!r:.60}.")
    return value


def _phase_limits(spec: Mapping[str, Any]) -> dict[str, float]:
    """How long ranks may go on without contact to the server and without progress, by phase, in seconds."""
    value = spec.get("phase_limits_s") or {}
    known = [field.name for field in fields(LeaseLimits)]
    if not isinstance(value, Mapping) or set(value) - set(known):
        raise JobRefused(f"phase_limits_s must be an object with some of {', '.join(known)}, in seconds.")
    limits = {name: _seconds(value, name, default=1.0) for name in value}
    for name, seconds in limits.items():
        if seconds < SHORTEST_LIMIT_S:
            raise JobRefused(f"phase_limits_s: {name} must be at least {SHORTEST_LIMIT_S:.0f} s.")
    return limits


SHORTEST_LIMIT_S = 2.0
"""A runner looks at its lease four times a second and hears of the server once a second."""


def _seconds(spec: Mapping[str, Any], field: str, *, default: float) -> float:
    value = spec.get(field, default)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not 0 < value <= 86400:
        raise JobRefused(f"{field} must be seconds, over 0 and at most 86400, not {value!r:.60}.")
    return float(value)
