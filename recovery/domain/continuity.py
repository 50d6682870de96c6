"""Does training go on exactly where it was? Two proofs: the state digest after the load, then the replayed steps.

The verifying state of the machine calls `judge` with what the ranks reported. A digest is compared per part (model,
optimizer, ...), so that a forgotten part is named.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from recovery.domain.plan import CheckpointRef

RULE_VERSION = "continuity-2"

RELATIVE_BAND = 1e-5
"""Two-sided band for losses that cannot be bit-equal (other topology, or a script that promises nothing).

Source: a resume at another world size stayed within 2.4e-6 over 60 steps; 1e-5 leaves a margin of four.
"""


class VerdictKind(StrEnum):
    """How far continuity is proven: to the bit, by state, not at all, or disproven."""

    BIT_EQUAL = "bit-equal"
    STATE_EQUAL = "state-equal"
    INCONCLUSIVE = "inconclusive"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished step of one rank."""

    generation: int
    rank: int
    step: int
    at: float
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    epoch: int = 0
    span_start: int | None = None
    span_stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class ResumeRecord:
    """What one rank of the new generation said when it entered its training loop."""

    rank: int
    step: int
    saved_digest: Mapping[str, str]
    live_digest: Mapping[str, str]
    deterministic: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome with its numbers."""

    kind: VerdictKind
    findings: tuple[str, ...]
    """Sentences: what is broken or missing, or what was found equal."""
    steps_compared: int
    """Replayed steps that every rank has in both generations and that were compared."""
    steps_lost: int
    caught_up: bool
    """Every rank has completed a step beyond the old generation's last."""
    digest_parts: tuple[str, ...] = ()
    """Parts whose digests were compared and are equal on every rank."""
    max_relative_difference: float = 0.0
    """Always finite, so that it can be stored: the largest number there is where only one of two losses is finite."""
    rule: str = RULE_VERSION

    @property
    def proven(self) -> bool:
        return self.kind in (VerdictKind.BIT_EQUAL, VerdictKind.STATE_EQUAL)


def judge(
    *,
    parent: CheckpointRef | None,
    world_size: int,
    same_topology: bool,
    reached_step: int | None,
    resumes: Sequence[ResumeRecord],
    reference: Mapping[tuple[int, int], StepRecord],
    replayed: Mapping[tuple[int, int], StepRecord],
) -> Verdict:
    """Compare the new generation with what the job did before.

    `reference` and `replayed` map (rank, step) to records of the old and new generation. `same_topology` says that
    world size and nodes are such that equal state must give equal bits. Steps lost are those done after the parent
    checkpoint. A record of the parent's own step in `reference` ties the first replayed span to it.
    """
    parent_step = parent.step if parent else 0
    reached = parent_step if reached_step is None else max(reached_step, parent_step)
    broken = [*_resume_findings(parent_step, resumes)]
    parts, digest_findings = _digest_findings(resumes)
    broken += digest_findings
    complete = {resume.rank for resume in resumes} == set(range(world_size))
    exact = same_topology and complete and all(resume.deterministic for resume in resumes)
    comparison = _compare_steps(
        first=parent_step + 1, last=reached, world_size=world_size, exact=exact, reference=reference, replayed=replayed
    )
    broken += comparison.findings
    broken += _span_findings(world_size=world_size, parent_step=parent_step, reference=reference, replayed=replayed)
    caught_up = all(any(rank == r and step > reached for r, step in replayed) for rank in range(world_size))
    kind = _verdict_kind(
        broken=broken,
        digests_cover_all=bool(parts) and complete,
        bits_equal=exact and comparison.compared > 0 and comparison.max_relative_difference == 0.0,
        from_beginning=parent is None,
    )
    findings = tuple(dict.fromkeys(broken)) or _good_findings(kind=kind, parts=parts, compared=comparison.compared)
    return Verdict(
        kind=kind,
        findings=findings,
        steps_compared=comparison.compared,
        steps_lost=reached - parent_step,
        caught_up=caught_up,
        digest_parts=parts,
        max_relative_difference=min(comparison.max_relative_difference, sys.float_info.max),
    )


def _resume_findings(parent_step: int, resumes: Sequence[ResumeRecord]) -> list[str]:
    return [
        f"Rank {resume.rank} resumed at step {resume.step}; the plan says {parent_step}."
        for resume in resumes
        if resume.step != parent_step
    ]


def _digest_findings(resumes: Sequence[ResumeRecord]) -> tuple[tuple[str, ...], list[str]]:
    """Parts that are equal on every rank, and a sentence for each part that is not."""
    findings = []
    equal: set[str] | None = None
    for resume in resumes:
        same = set()
        for part in sorted(set(resume.saved_digest) | set(resume.live_digest)):
            saved, live = resume.saved_digest.get(part), resume.live_digest.get(part)
            if saved == live:
                same.add(part)
            elif resume.saved_digest and live is None:
                findings.append(f"Rank {resume.rank}: the {part} is in the checkpoint but not in the resumed run.")
            elif resume.saved_digest and saved is None:
                findings.append(f"Rank {resume.rank}: the {part} is in the resumed run but not in the checkpoint.")
            elif resume.saved_digest:
                findings.append(
                    f"Rank {resume.rank}: the {part} was not restored: its state is not what the checkpoint holds."
                )
        equal = same if equal is None else equal & same
    return tuple(sorted(equal or ())), findings


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    compared: int
    findings: list[str]
    max_relative_difference: float


def _compare_steps(
    *,
    first: int,
    last: int,
    world_size: int,
    exact: bool,
    reference: Mapping[tuple[int, int], StepRecord],
    replayed: Mapping[tuple[int, int], StepRecord],
) -> _Comparison:
    compared, findings, worst = 0, [], 0.0
    old_losses, new_losses = set(), set()
    for step in range(first, last + 1):
        complete = True
        for rank in range(world_size):
            old, new = reference.get((rank, step)), replayed.get((rank, step))
            if old is None or new is None or old.loss is None or new.loss is None:
                complete = False
                continue
            old_losses.add(old.loss)
            new_losses.add(new.loss)
            difference = relative_difference(old.loss, new.loss)
            worst = max(worst, difference)
            findings += _pair_findings(old, new, difference=difference, exact=exact)
        compared += complete
    if compared >= 5 and len(new_losses) == 1 < len(old_losses):
        findings.append(f"The loss did not change in {compared} replayed steps: the weights are not being trained.")
    return _Comparison(compared=compared, findings=findings[:12], max_relative_difference=worst)


def relative_difference(old: float, new: float) -> float:
    """|old - new| over |old|; 0 for equal values (two NaN of a replay are equal), infinity where only one is finite."""
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    if not (math.isfinite(old) and math.isfinite(new)):
        return math.inf
    return abs(old - new) / max(abs(old), 1e-30)


def _pair_findings(old: StepRecord, new: StepRecord, *, difference: float, exact: bool) -> list[str]:
    where = f"Step {new.step}, rank {new.rank}"
    findings = []
    if (old.epoch, old.span_start, old.span_stop) != (new.epoch, new.span_start, new.span_stop):
        findings.append(
            f"{where}: trained on samples {_span(new)}, before the fault on {_span(old)}: "
            "the sampler was not restored to its position."
        )
    if old.learning_rate != new.learning_rate:
        findings.append(
            f"{where}: learning rate {new.learning_rate!r}, before the fault {old.learning_rate!r}: "
            "the scheduler was not restored."
        )
    if exact and difference != 0.0:
        findings.append(f"{where}: loss {new.loss!r}, before the fault {old.loss!r}; a bit-equal replay was promised.")
    elif difference > RELATIVE_BAND:
        findings.append(
            f"{where}: loss {new.loss!r}, before the fault {old.loss!r}: "
            f"{difference:.2e} apart, the band is {RELATIVE_BAND:.0e}."
        )
    return findings


def _span(record: StepRecord) -> str:
    return f"[{record.span_start}, {record.span_stop}) of epoch {record.epoch}"


def _span_findings(
    *,
    world_size: int,
    parent_step: int,
    reference: Mapping[tuple[int, int], StepRecord],
    replayed: Mapping[tuple[int, int], StepRecord],
) -> list[str]:
    """Each rank's spans must follow each other, from the parent's step on: nothing skipped, nothing repeated."""
    findings = []
    for rank in range(world_size):
        records = sorted((r for (k, _), r in replayed.items() if k == rank), key=lambda r: r.step)
        parent = reference.get((rank, parent_step))
        for before, after in itertools.pairwise([parent, *records] if parent else records):
            what = _span_break(before, after)
            if what:
                findings.append(
                    f"Rank {rank} {what} samples between step {before.step} and {after.step}: "
                    f"{_span(before)} then {_span(after)}."
                )
    return findings[:6]


def _span_break(before: StepRecord, after: StepRecord) -> str:
    """What happened to the samples between two steps; empty if they follow each other, or if that is not known."""
    if before.span_stop is None or after.span_start is None or after.step != before.step + 1:
        return ""
    # The next epoch begins at its first sample; an incomplete last batch of the old one may have been left out.
    due = (before.epoch, before.span_stop) if after.epoch == before.epoch else (before.epoch + 1, 0)
    found = (after.epoch, after.span_start)
    if found == due:
        return ""
    return "skipped" if found > due else "repeated"


def _verdict_kind(
    *, broken: Sequence[str], digests_cover_all: bool, bits_equal: bool, from_beginning: bool
) -> VerdictKind:
    if broken:
        return VerdictKind.BROKEN
    if bits_equal and (digests_cover_all or from_beginning):
        return VerdictKind.BIT_EQUAL
    if digests_cover_all:
        return VerdictKind.STATE_EQUAL
    return VerdictKind.INCONCLUSIVE


def _good_findings(*, kind: VerdictKind, parts: tuple[str, ...], compared: int) -> tuple[str, ...]:
    findings = []
    if parts:
        findings.append(f"State digests are equal on every rank: {', '.join(parts)}.")
    if compared:
        word = "bit-equal" if kind is VerdictKind.BIT_EQUAL else "within the band"
        findings.append(f"{compared} replayed steps are {word} on every rank.")
    if kind is VerdictKind.INCONCLUSIVE:
        findings.append("The ranks reported no state digests, so that continuity is neither proven nor disproven.")
    return tuple(findings)
