"""When a drill's fault is due: counted from the newest checkpoint that the rank could go back to."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from agents.faults.drill_record import DrillRecord
from agents.protocol.messages import LaunchSpec, SeenPhase
from agents.supervisor.checkpoints import complete_steps
from agents.supervisor.intake import Intake, Progress


class DrilledRun(Protocol):
    """What a drill has to know of a run; see `supervisor.run.Run`."""

    phase: SeenPhase
    launch: LaunchSpec
    intake: Intake

    @property
    def ranks(self) -> Container[int]: ...
    @property
    def rank_pids(self) -> Mapping[int, int]: ...
    @property
    def exited(self) -> Container[int]: ...
    @property
    def runner_pid(self) -> int | None: ...
    def holds_process(self, pid: int) -> bool: ...


def steps_past_save(progress: Progress, *, rank: int, complete: Sequence[int] = ()) -> int | None:
    """Return how many steps a rank is past the newest checkpoint that it could go back to; None if there is none.

    `complete` are this generation's checkpoints as the storage shows them: only rank 0 tells of saves, and it may run
    on another node. Step 0 is the beginning, no checkpoint worth a drill.
    """
    step = progress.step.get(rank)
    saves = [save for save in (*progress.saved, *complete, progress.resumed.get(rank, 0)) if save > 0]
    if step is None or not saves:
        return None
    return step - max(saves)


def is_due(record: DrillRecord, run: DrilledRun) -> bool:
    """Whether the moment has come that the drill waits for."""
    if record.rank not in run.rank_pids:
        return False
    if record.steps_after_save <= 0:
        return True
    complete = complete_steps(run.launch.checkpoint_directory, record.generation)
    past = steps_past_save(run.intake.progress, rank=record.rank, complete=complete)
    return past is not None and past >= record.steps_after_save


def words_for_moment(record: DrillRecord, run: DrilledRun) -> str:
    """Where in the training the fault came."""
    step = run.intake.progress.step.get(record.rank)
    return "before its first step" if step is None else f"after step {step}"
