"""What verification says of a resumed job, from the ranks' own logs, report by report, with the product's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agents.sensors.rank_reports import RankReport, ResumedSaid, StepSaid, parse_log_line
from planted_bugs.training import JOB, PARENT_STEP, Case
from recovery.domain.continuity import Verdict, VerdictKind, judge
from recovery.domain.plan import CheckpointRef
from recovery.domain.step_records import ResumeRecord, StateProbe, StepRecord


@dataclass(frozen=True)
class Outcome:
    """`alarm`: the first verdict that was broken, if one was; `last`: the one after all reports."""

    alarm: Verdict | None
    last: Verdict

    @property
    def said(self) -> str:
        """The sentence that the timeline and the page would show."""
        return (self.alarm or self.last).findings[0]


def judge_logs(case: Case, root: Path) -> Outcome:
    """Judge after each report of the new generation, as they come: the first broken verdict is what stops a job."""
    before = [_step(said) for said in _reports(root, 1) if isinstance(said, StepSaid)]
    reference = {(record.rank, record.step): record for record in before}
    resumes: list[ResumeRecord] = []
    replayed: dict[tuple[int, int], StepRecord] = {}
    alarm = last = None
    for said in sorted(_reports(root, 2), key=lambda said: said.at):
        match said:
            case ResumedSaid():
                resumes.append(
                    ResumeRecord(
                        rank=said.rank,
                        step=said.step,
                        saved_digest=said.saved_digest,
                        live_digest=said.live_digest,
                        deterministic=said.deterministic,
                    )
                )
            case StepSaid():
                replayed[said.rank, said.step] = _step(said)
            case _:
                continue
        last = judge(
            parent=CheckpointRef(generation=1, step=PARENT_STEP),
            world_size=case.world_size,
            same_topology=True,
            reached_step=max(record.step for record in before),
            resumes=resumes,
            reference=reference,
            replayed=replayed,
        )
        if last.kind is VerdictKind.BROKEN and alarm is None:
            alarm = last
    if last is None:
        raise RuntimeError(f"The resumed generation of {case} reported nothing: see {root}.")
    return Outcome(alarm, last)


def _reports(root: Path, generation: int) -> list[RankReport]:
    lines = [line for path in _logs(root, generation) for line in path.read_bytes().splitlines()]
    return [said for line in lines if (said := parse_log_line(line, job=JOB)) is not None]


def _logs(root: Path, generation: int) -> list[Path]:
    return sorted((root / f"generation-{generation}").glob("rank-*.jsonl"))


def _step(said: StepSaid) -> StepRecord:
    probe = None if said.probe is None else StateProbe(digests=said.probe.digests, unmoved=tuple(said.probe.unmoved))
    return StepRecord(
        generation=said.generation,
        rank=said.rank,
        step=said.step,
        at=said.at,
        loss=said.loss,
        learning_rate=said.learning_rate,
        grad_norm=said.grad_norm,
        epoch=said.epoch,
        span_start=said.span_start,
        span_stop=said.span_stop,
        indices_digest=said.indices_digest,
        probe=probe,
    )
