"""What ranks reported about their training, as continuity compares it: one record per resume and per finished step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StateProbe:
    """A look at a rank's state right after a step: a sample of each part's values, not all of them as in a digest."""

    digests: Mapping[str, str]
    """Part (model, optimizer, scheduler, sampler, rng, ...) -> checksum after the step."""
    unmoved: tuple[str, ...] = ()
    """Parts that are as they were before the step."""


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
    indices_digest: str | None = None
    """Checksum of the sample indices that travelled with the batch; None where nobody looked."""
    probe: StateProbe | None = None
    """Only after the first steps behind a save or a resume."""

    @property
    def place(self) -> tuple[int, int | None, int | None]:
        """Where in the data the step was: epoch, and the span of the global order."""
        return (self.epoch, self.span_start, self.span_stop)

    @property
    def samples(self) -> str:
        return f"[{self.span_start}, {self.span_stop}) of epoch {self.epoch}"


Records = Mapping[tuple[int, int], StepRecord]
"""(rank, step) -> what was recorded of it."""


@dataclass(frozen=True, kw_only=True)
class ResumeRecord:
    """What one rank of the new generation said when it entered its training loop."""

    rank: int
    step: int
    saved_digest: Mapping[str, str]
    live_digest: Mapping[str, str]
    deterministic: bool
