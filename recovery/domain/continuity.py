"""Does training go on exactly where it was? Two proofs: the state digest after the load, then the replayed steps.

The verifying state of the machine calls `judge` with what the ranks reported. A digest is compared per part (model,
optimizer, ...), so that a forgotten part is named.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from recovery.domain.loss_band import ORDER_OF_SUMS, noise_band
from recovery.domain.plan import CheckpointRef
from recovery.domain.replay import compare_steps
from recovery.domain.step_records import Records, ResumeRecord, StepRecord

RULE_VERSION = "continuity-3"


class VerdictKind(StrEnum):
    """How far continuity is proven: to the bit, by state, not at all, or disproven."""

    BIT_EQUAL = "bit-equal"
    STATE_EQUAL = "state-equal"
    INCONCLUSIVE = "inconclusive"
    BROKEN = "broken"


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
    loss_band: float = 0.0
    """How far apart, relatively and to either side, losses may be; 0 where equal bits are promised."""
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
    reference: Records,
    replayed: Records,
) -> Verdict:
    """Compare the new generation with what the job did before.

    `reference` and `replayed` map (rank, step) to records of the old and new generation. `same_topology` says that
    world size and nodes are such that equal state must give equal bits. Steps lost are those done after the parent
    checkpoint. A record of the parent's own step in `reference` ties the first replayed span to it; those of the
    `LOOK_BACK_STEPS` before it tell the curve's noise.
    """
    parent_step = parent.step if parent else 0
    reached = parent_step if reached_step is None else max(reached_step, parent_step)
    broken = [*_resume_findings(parent_step, resumes)]
    parts, digest_findings = _digest_findings(resumes)
    broken += digest_findings
    complete = {resume.rank for resume in resumes} == set(range(world_size))
    promised = bool(resumes) and all(resume.deterministic for resume in resumes)
    exact = same_topology and complete and promised
    band = 0.0 if exact else ORDER_OF_SUMS if promised else noise_band(reference)
    comparison = compare_steps(
        first=parent_step + 1, last=reached, world_size=world_size, band=band, reference=reference, replayed=replayed
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
    good = _good_findings(kind=kind, parts=parts, compared=comparison.compared, band=band)
    findings = tuple(dict.fromkeys(broken)) or (*good, *comparison.remarks)
    return Verdict(
        kind=kind,
        findings=findings,
        steps_compared=comparison.compared,
        steps_lost=reached - parent_step,
        caught_up=caught_up,
        digest_parts=parts,
        max_relative_difference=min(comparison.max_relative_difference, sys.float_info.max),
        loss_band=band,
    )


def _resume_findings(parent_step: int, resumes: Sequence[ResumeRecord]) -> list[str]:
    return [
        f"Rank {resume.rank} resumed at step {resume.step}; the plan says {parent_step}: "
        f"{'its step counter is off by one' if abs(resume.step - parent_step) == 1 else 'the rank is at another step'}."
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


def _span_findings(
    *,
    world_size: int,
    parent_step: int,
    reference: Records,
    replayed: Records,
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
                    f"{before.samples} then {after.samples}."
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


def _good_findings(*, kind: VerdictKind, parts: tuple[str, ...], compared: int, band: float) -> tuple[str, ...]:
    findings = []
    if parts:
        findings.append(f"State digests are equal on every rank: {', '.join(parts)}.")
    if compared:
        word = "bit-equal" if kind is VerdictKind.BIT_EQUAL else f"within the band of {band:.0e}"
        findings.append(f"{compared} replayed steps are {word} on every rank.")
    if kind is VerdictKind.INCONCLUSIVE:
        findings.append("The ranks reported no state digests, so that continuity is neither proven nor disproven.")
    return tuple(findings)
