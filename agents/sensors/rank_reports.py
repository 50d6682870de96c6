"""What ranks say, checked: one JSON object becomes one typed report or nothing, since ranks are not trusted.

`rank_socket` feeds it datagrams, the supervisor feeds it lines of the ranks' own logs. Nothing here does I/O.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from agents.protocol.messages import Digest64, Phase

MAX_REPORT_BYTES = 64 * 1024

_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Positive = Annotated[int, Meta(ge=1, le=2**53)]
_Reason = Annotated[str, Meta(max_length=4000)]
_Part = Annotated[str, Meta(max_length=100)]
_Digest = Annotated[dict[_Part, Annotated[str, Meta(max_length=200)]], Meta(max_length=64)]


class ProbeSaid(Struct, frozen=True, kw_only=True):
    digests: _Digest = {}
    unmoved: Annotated[list[_Part], Meta(max_length=64)] = []


class _Report(Struct, frozen=True, kw_only=True, tag_field="kind"):
    job: _Name
    generation: _Positive


class _FromRank(_Report, frozen=True):
    rank: _Count
    at: float


class StepSaid(_FromRank, frozen=True, tag="step"):
    step: _Positive
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    epoch: _Count = 0
    span_start: _Count | None = None
    span_stop: _Count | None = None
    step_time_s: float | None = None
    epoch_size: _Count | None = None
    indices_digest: Digest64 | None = None
    order_digest: Digest64 | None = None
    samples: _Count | None = None
    tokens: _Count | None = None
    parameter_norm: float | None = None
    data_s: float | None = None
    forward_backward_s: float | None = None
    optimizer_s: float | None = None
    wait_s: float | None = None
    checkpoint_s: float | None = None
    memory_bytes: _Count | None = None
    gpu_memory_bytes: _Count | None = None
    probe: ProbeSaid | None = None


class ResumedSaid(_FromRank, frozen=True, tag="resumed"):
    step: _Count
    total_steps: _Count | None = None
    parent_generation: _Positive | None = None
    saved_digest: _Digest = {}
    live_digest: _Digest = {}
    deterministic: bool = False


class SavedSaid(_FromRank, frozen=True, tag="saved"):
    step: _Count
    directory: Annotated[str, Meta(max_length=4096)]
    size_bytes: _Count
    world_size: _Positive
    parent_generation: _Positive | None = None
    parent_step: _Count | None = None
    save_time_s: float | None = None
    blocked_s: float | None = None


class RehashedSaid(_FromRank, frozen=True, tag="rehashed"):
    """The files of a complete checkpoint were read again: all of them are what was written, or one is not."""

    step: _Count
    ok: bool
    reason: _Reason = ""


class SaveFailedSaid(_FromRank, frozen=True, tag="save_failed"):
    step: _Count
    attempt: _Positive = 1
    reason: _Reason = ""


class SaveSkippedSaid(_FromRank, frozen=True, tag="save_skipped"):
    step: _Count
    reason: _Reason = ""


class KeptSaid(_FromRank, frozen=True, tag="kept"):
    """The rank's part of a snapshot is in this node's memory, and with it that of the rank `copy_of`."""

    step: _Count
    world_size: _Positive
    copy_of: _Count | None = None


class NotKeptSaid(_FromRank, frozen=True, tag="not_kept"):
    step: _Count
    reason: _Reason = ""


class FinishedSaid(_FromRank, frozen=True, tag="finished"):
    step: _Count


class PhaseSaid(_FromRank, frozen=True, tag="phase"):
    """The rank has begun to do something else."""

    phase: Phase


class PokeSaid(_Report, frozen=True, tag="poke"):
    """The runner asks to read its events again."""


SaveNote = RehashedSaid | SaveFailedSaid | SaveSkippedSaid | NotKeptSaid
RankReport = StepSaid | ResumedSaid | SavedSaid | KeptSaid | SaveNote | PhaseSaid | FinishedSaid
Said = RankReport | PokeSaid


def parse_report(raw: bytes) -> Said | None:
    """Return what a datagram says, None if it is malformed in any way."""
    if len(raw) > MAX_REPORT_BYTES:
        return None
    try:
        # The stdlib parser and not msgspec's: a loss may be NaN, which JSON has no word for but Python writes.
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return _convert(value)


def parse_log_line(raw: bytes, *, job: str) -> RankReport | None:
    """Return what a line of a rank's own log reports; None for other lines. The log need not name its job."""
    if len(raw) > MAX_REPORT_BYTES:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    said = _convert({**value, "job": job})
    return None if isinstance(said, PokeSaid) else said


def _convert(value: Any) -> Said | None:
    try:
        said: Said = msgspec.convert(value, Said)
    except (msgspec.ValidationError, RecursionError):
        return None
    if not isinstance(said, PokeSaid) and not math.isfinite(said.at):
        return None
    return said
