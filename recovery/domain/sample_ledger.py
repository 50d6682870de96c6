"""The ledger of samples: what a job's line of steps was trained on, and whether any sample was skipped or repeated.

The store reads the steps of all generations on the line, one record per step; `audit_samples` goes through them once.
The receipt quotes the outcome. The records are what ranks report of the spans that travelled with their batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from recovery.domain.generations import GenerationView

RULE_VERSION = "samples-1"

_MOST_FINDINGS = 12


@dataclass(frozen=True, kw_only=True)
class LinePart:
    """A generation's part of the line: its steps after `after_step`, up to and with `upto_step` (None: all)."""

    generation: int
    after_step: int
    upto_step: int | None

    def holds(self, step: int) -> bool:
        return step > self.after_step and (self.upto_step is None or step <= self.upto_step)


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """What the ranks said of one step of one generation, taken together."""

    generation: int
    step: int
    epoch: int
    start: int | None
    """None: no rank said."""
    stop: int | None
    epoch_size: int | None = None
    agree: bool = True
    """All ranks that said anything named the same span."""
    wrong_ranks: int = 0
    """Ranks whose batch held other samples than the order has at its span, by the checksum of its indices."""
    checked_ranks: int = 0
    """Ranks whose batch was compared with the order."""
    digest: str | None = None
    """Checksum of the whole global batch; None where it was not summed up, or a rank's part is missing."""


@dataclass(frozen=True, kw_only=True)
class SamplePosition:
    epoch: int
    position: int


@dataclass(frozen=True, kw_only=True)
class SampleLedger:
    """The samples that a job's present state was trained on, in numbers."""

    steps: int
    samples: int
    """Positions of the order that the line's steps cover, each counted once per epoch."""
    epochs: int
    """Epochs that were trained through to their end."""
    first: SamplePosition | None
    last: SamplePosition | None
    """Where the last step's span stops."""
    skipped: int
    repeated: int
    """Trained on twice on the line itself, beyond what was lost and done again."""
    replayed: int
    """Trained on once more since the steps were lost; what the lost steps did is no part of the present state."""
    unknown_steps: int
    """Steps of which no rank named a span."""
    checked_steps: int
    """Steps whose batches were compared with the order by the checksum of their indices."""
    findings: tuple[str, ...]
    sentence: str
    rule: str = RULE_VERSION

    @property
    def proven(self) -> bool:
        return bool(self.steps) and not (self.findings or self.skipped or self.repeated or self.unknown_steps)


def line_to(generation: int, generations: Sequence[GenerationView]) -> tuple[LinePart, ...]:
    """The line that ends in `generation`, oldest part first: each up to the step from which the next one went on."""
    by_number = {one.number: one for one in generations}
    parts: list[LinePart] = []
    upto: int | None = None
    link = by_number.get(generation)
    while link is not None and all(part.generation != link.number for part in parts):
        parent = link.plan.parent
        parts.append(
            LinePart(generation=link.number, after_step=parent.step if parent else 0, upto_step=upto),
        )
        upto = parent.step if parent else None
        link = by_number.get(parent.generation) if parent else None
    return tuple(reversed(parts))


def audit_samples(line: Iterable[StepSamples], *, lost: Iterable[StepSamples] = ()) -> SampleLedger:
    """Follow the line from its first step; `lost` are steps that are no part of it, but were made before.

    line: in order of step, each step once.
    """
    audit = _Audit(lost_by_step=_by_step(lost))
    for record in line:
        audit.follow(record)
    return audit.ledger()


def _by_step(records: Iterable[StepSamples]) -> Mapping[int, list[StepSamples]]:
    found: dict[int, list[StepSamples]] = {}
    for record in records:
        found.setdefault(record.step, []).append(record)
    return found


@dataclass(kw_only=True)
class _Audit:
    lost_by_step: Mapping[int, list[StepSamples]]
    steps: int = 0
    samples: int = 0
    skipped: int = 0
    repeated: int = 0
    replayed: int = 0
    unknown_steps: int = 0
    checked_steps: int = 0
    findings: list[str] = field(default_factory=list)
    first: SamplePosition | None = None
    last_step: int = 0
    last_known: bool = True
    """The last step named its span, so that what follows it can be judged."""
    epoch: int = 0
    covered: int = 0
    """Position of the newest epoch up to which everything was trained on or reported as skipped."""
    epoch_size: int | None = None
    ends: dict[int, int] = field(default_factory=dict)
    """Epoch to where its last span stopped, for those that another one followed."""

    def follow(self, record: StepSamples) -> None:
        missing = record.step - self.last_step - 1
        self.steps += missing + 1
        self.unknown_steps += missing
        self.last_known = self.last_known and missing == 0
        self.last_step = record.step
        if record.start is None or record.stop is None:
            self.unknown_steps += 1
            self.last_known = False
            return
        if not record.agree:
            self._find(f"Step {record.step}: the ranks named different samples.")
        self.checked_steps += record.checked_ranks > 0
        if record.wrong_ranks:
            self._find(
                f"Step {record.step}: {record.wrong_ranks} of {record.checked_ranks} ranks had other samples in their "
                f"batch than the order has at {_place(record)}: the loader skips or repeats samples that its counter "
                "does not know of."
            )
        self._place(record, record.start, record.stop)
        self._compare_lost(record)
        self.first = self.first or SamplePosition(epoch=record.epoch, position=record.start)
        self.last_known = True

    def _place(self, record: StepSamples, start: int, stop: int) -> None:
        if record.epoch < self.epoch:
            self._repeat(record, stop - start)
            return
        if record.epoch > self.epoch:
            self._leave_epoch(record)
        self.epoch_size = record.epoch_size
        if start > self.covered and self.last_known:
            self._skip(record, start - self.covered)
        again = max(0, min(stop, self.covered) - start)
        if again:
            self._repeat(record, again)
        self.samples += stop - start - again
        self.covered = max(self.covered, stop)

    def _leave_epoch(self, record: StepSamples) -> None:
        """The step belongs to a later epoch: was the one before trained through to its end?"""
        if self.last_known:
            if self.epoch_size is not None and self.covered < self.epoch_size:
                self._skip(record, self.epoch_size - self.covered)
            self.ends[self.epoch] = self.covered
            between = record.epoch - self.epoch - 1
            if between:
                size = self.epoch_size or self.covered
                self._skip(record, between * size)
        self.epoch, self.covered = record.epoch, 0

    def _compare_lost(self, record: StepSamples) -> None:
        for old in self.lost_by_step.get(record.step, ()):
            if old.start is None or old.stop is None:
                continue
            self.replayed += old.stop - old.start
            if (old.epoch, old.start, old.stop) != (record.epoch, record.start, record.stop):
                self._find(
                    f"Step {record.step}: generation {record.generation} trained on {_place(record)}, generation "
                    f"{old.generation} before it on {_place(old)}."
                )
            elif None not in (old.digest, record.digest) and old.digest != record.digest:
                self._find(
                    f"Step {record.step}: the batch of generation {record.generation} held other samples than that of "
                    f"generation {old.generation}, though both name {_place(record)}."
                )

    def _skip(self, record: StepSamples, count: int) -> None:
        self.skipped += count
        self._find(f"Before step {record.step}: {_samples(count)} skipped; it goes on at {_place(record)}.")

    def _repeat(self, record: StepSamples, count: int) -> None:
        self.repeated += count
        self._find(f"Step {record.step}: {_samples(count)} trained on before; it holds {_place(record)}.")

    def _find(self, sentence: str) -> None:
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(sentence)

    def ledger(self) -> SampleLedger:
        if len(set(self.ends.values())) > 1:
            ends = ", ".join(f"epoch {epoch} at {stop}" for epoch, stop in sorted(self.ends.items())[:4])
            self._find(f"Epochs ended at different positions: {ends}.")
        complete = len(self.ends) + (self.epoch_size is not None and self.covered == self.epoch_size)
        known = self.first is not None
        return SampleLedger(
            steps=self.steps,
            samples=self.samples,
            epochs=complete,
            first=self.first,
            last=SamplePosition(epoch=self.epoch, position=self.covered) if known else None,
            skipped=self.skipped,
            repeated=self.repeated,
            replayed=self.replayed,
            unknown_steps=self.unknown_steps,
            checked_steps=self.checked_steps,
            findings=tuple(self.findings),
            sentence=self._sentence(),
        )

    def _sentence(self) -> str:
        if self.first is None:
            return "No rank reported which samples its steps were trained on, so that nothing is known of them."
        counted = (
            f"{_samples(self.samples)} in {self.steps} steps, from position {self.first.position} of epoch "
            f"{self.first.epoch} to {self.covered} of epoch {self.epoch}"
        )
        clean = not (self.skipped or self.repeated)
        verdict = "none skipped and none repeated" if clean else f"{self.skipped} skipped, {self.repeated} repeated"
        if clean and self.findings:
            verdict += " by their spans, but the batches do not bear that out"
        if clean and self.unknown_steps:
            verdict += f" as far as is known: {self.unknown_steps} steps named no samples"
        replay = f"; {self.replayed} were trained on again since their steps were lost" if self.replayed else ""
        return f"{counted}: {verdict}{replay}."


def _place(record: StepSamples) -> str:
    return f"[{record.start}, {record.stop}) of epoch {record.epoch}"


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"
