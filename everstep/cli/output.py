"""How commands show values: tables, JSON, moments, durations and a little colour where a terminal wants it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any

COLOURS = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1"}

GOOD = {"ready", "running", "recovered", "passed", "succeeded", "bit-equal", "state-equal", "complete", "whole"}
BAD = {
    "unhealthy", "failed", "escalated", "broken", "refused", "expired", "lost", "breaker_open", "waiting_for_fence",
    "damaged", "missing",
}  # fmt: skip
WARN = {
    "unknown", "held", "cordoned", "suspect", "unobserved", "recovering", "paused", "inconclusive", "unfinished",
    "awaiting_approval", "contact_restored",
}  # fmt: skip


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")


def wants_colour(stream: IO[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Colour only on a terminal, and never where NO_COLOR is set to anything (no-color.org)."""
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, tone: str, *, colour: bool) -> str:
    return f"\x1b[{COLOURS[tone]}m{text}\x1b[0m" if colour and text else text


def tone_of(word: str) -> str | None:
    """The tone of a state; the word itself always says the same, so that nothing hangs on colour."""
    if word in GOOD:
        return "good"
    if word in BAD:
        return "bad"
    return "warn" if word in WARN else None


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Aligned columns; `empty` is the sentence for no rows. None is shown as `-`."""
    if not rows:
        print(empty)
        return
    for line in table(headings, rows, colour=wants_colour(sys.stdout)):
        print(line)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, colour: bool = False) -> list[str]:
    """The lines of a table. States are coloured after the widths are known, so that columns stay aligned."""
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(headings), *texts]) for column in range(len(headings))]
    lines = [paint(_line(headings, widths), "bold", colour=colour)]
    for row in texts:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        painted = [_paint_state(text, part, colour=colour) for text, part in zip(row, padded, strict=True)]
        lines.append("  ".join(painted).rstrip())
    return lines


def print_fields(fields: Mapping[str, object]) -> None:
    """One `name: value` a line, values aligned; empty and unknown ones are left out."""
    shown = {name: cell(value) for name, value in fields.items() if value not in (None, "", [], ())}
    width = max((len(name) for name in shown), default=0)
    for name, text in shown.items():
        print(f"{name + ':':<{width + 1}} {text}")


def cell(value: object) -> str:
    """A value as one cell: no line breaks and no control characters, which could move the cursor."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case list() | tuple():
            return ", ".join(cell(item) for item in value) or "-"
    return clean(str(value))


def clean(text: str) -> str:
    """Text of jobs and errors without control characters: it may hold anything."""
    return "".join(char if char.isprintable() else " " for char in text)


def moment(at: str | None) -> str:
    """An RFC 3339 moment as `2031-05-04 03:02:01Z`."""
    return "-" if at is None else f"{_parse(at):%Y-%m-%d %H:%M:%S}Z"


def clock(at: str) -> str:
    """An RFC 3339 moment as `03:02:01.2Z`: enough within one incident."""
    parsed = _parse(at)
    return f"{parsed:%H:%M:%S}.{parsed.microsecond // 100_000}Z"


def ago(at: str | None, *, now: datetime | None = None) -> str:
    """How long ago a moment is, in words: `4 s ago`."""
    if at is None:
        return "never"
    return f"{duration(max(0.0, ((now or datetime.now(UTC)) - _parse(at)).total_seconds()))} ago"


def duration(seconds: float | None) -> str:
    """`0.42 s`, `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"


def size(count: int | None) -> str:
    """Bytes with a decimal unit: `1.2 GB`."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} PB"


def steps(job: Mapping[str, Any]) -> str:
    """`120 / 1000`, `120`, or `-` before the first step."""
    done, total = job["last_step"], job["total_steps"]
    if done is None and total is None:
        return "-"
    return f"{done or 0} / {total}" if total is not None else str(done)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)).rstrip()


def _paint_state(text: str, padded: str, *, colour: bool) -> str:
    tone = tone_of(text)
    return padded if tone is None else paint(padded, tone, colour=colour)


def _parse(at: str) -> datetime:
    return datetime.fromisoformat(at)
