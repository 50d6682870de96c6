"""From what ranks say to what the server hears: order, repeats, batches."""

from __future__ import annotations

from agents.protocol.messages import CheckpointSaved, Message, RankFinished, RankResumed, StepReports
from agents.sensors.rank_reports import FinishedSaid, ResumedSaid, SavedSaid, StepSaid
from agents.supervisor.intake import Intake


def intake(told: list[Message], ranks: range = range(2)) -> Intake:
    return Intake(job="j", generation=1, ranks=ranks, emit=told.append, progressed=lambda rank: None)


def step(number: int, rank: int = 0) -> StepSaid:
    return StepSaid(job="j", generation=1, rank=rank, at=1.0, step=number, loss=0.5)


async def test_hands_steps_on_before_what_came_after_them() -> None:
    told: list[Message] = []
    taken = intake(told)
    taken.take(ResumedSaid(job="j", generation=1, rank=0, at=1.0, step=0))
    taken.take(step(1))
    taken.take(step(2))
    taken.take(SavedSaid(job="j", generation=1, rank=0, at=1.0, step=2, directory="d", size_bytes=1, world_size=2))
    taken.take(step(3))
    taken.take(FinishedSaid(job="j", generation=1, rank=0, at=1.0, step=3))
    assert [type(message) for message in told] == [RankResumed, StepReports, CheckpointSaved, StepReports, RankFinished]
    assert [[s.step for s in message.steps] for message in told if isinstance(message, StepReports)] == [[1, 2], [3]]


async def test_forgets_repeats() -> None:
    told: list[Message] = []
    taken = intake(told)
    for _ in range(2):
        for number in (1, 2, 3):
            assert taken.take(step(number))
        taken.take(ResumedSaid(job="j", generation=1, rank=0, at=1.0, step=0))
        taken.take(FinishedSaid(job="j", generation=1, rank=0, at=1.0, step=3))
    taken.flush()
    assert [s.step for message in told if isinstance(message, StepReports) for s in message.steps] == [1, 2, 3]
    assert sum(isinstance(message, RankResumed) for message in told) == 1
    assert sum(isinstance(message, RankFinished) for message in told) == 1


async def test_refuses_ranks_of_other_nodes() -> None:
    told: list[Message] = []
    taken = intake(told)
    assert not taken.take(step(1, rank=2))
    taken.flush()
    assert told == []


async def test_only_rank_0_tells_of_saves_but_all_count_as_progress() -> None:
    told: list[Message] = []
    taken = intake(told, range(1, 2))
    taken.take(SavedSaid(job="j", generation=1, rank=1, at=1.0, step=20, directory="d", size_bytes=1, world_size=2))
    assert told == []
    assert taken.progress.saved == {20}


async def test_large_backlogs_go_in_frames_that_fit() -> None:
    told: list[Message] = []
    taken = intake(told)
    for number in range(1, 1201):
        taken.take(step(number))
    taken.flush()
    assert [len(message.steps) for message in told if isinstance(message, StepReports)] == [500, 500, 200]
