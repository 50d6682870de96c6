"""From what ranks say to what the server hears: order, repeats, batches."""

from __future__ import annotations

from typing import Any

from agents.protocol.messages import (
    CheckpointRehashed,
    CheckpointSaved,
    Message,
    Phase,
    RankFinished,
    RankPhase,
    RankResumed,
    SaveInTrouble,
    SaveTroubleKind,
    SnapshotKept,
    StateProbe,
    StepReport,
    StepReports,
)
from agents.sensors.rank_reports import (
    FinishedSaid,
    KeptSaid,
    NotKeptSaid,
    PhaseSaid,
    ProbeSaid,
    ResumedSaid,
    SavedSaid,
    StepSaid,
    parse_report,
)
from agents.supervisor.intake import Intake
from agents.told import Told


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


async def test_each_rank_tells_of_its_part_in_memory_once_and_of_what_was_not_kept_as_of_a_save() -> None:
    told: list[Message] = []
    taken = intake(told)
    for rank in (0, 1, 1):
        taken.take(KeptSaid(job="j", generation=1, rank=rank, at=1.0, step=4, world_size=2, copy_of=1 - rank))
    for _ in range(2):
        taken.take(NotKeptSaid(job="j", generation=1, rank=0, at=1.0, step=8, reason="no room"))
    kept = [(m.rank, m.step, m.copy_of) for m in told if isinstance(m, SnapshotKept)]
    assert kept == [(0, 4, 1), (1, 4, 0)]
    (trouble,) = [message for message in told if isinstance(message, SaveInTrouble)]
    assert (trouble.step, trouble.kind, trouble.reason) == (8, "skipped", "not kept in memory: no room")


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


async def test_the_save_of_step_0_is_told_like_any_other() -> None:
    told = Told()
    messages: list[Message] = []
    for _ in range(2):  # the second life of the agent hears it again, from the rank's own log
        taken = Intake(
            job="j",
            generation=1,
            ranks=range(2),
            emit=lambda message: (messages.append(message), told.take(message))[0],
            progressed=lambda rank: None,
            told=told.of("j", 1),
        )
        taken.take(SavedSaid(job="j", generation=1, rank=0, at=1.0, step=0, directory="d", size_bytes=1, world_size=2))
    assert [message.step for message in messages if isinstance(message, CheckpointSaved)] == [0]


async def test_large_backlogs_go_in_frames_that_fit() -> None:
    told: list[Message] = []
    taken = intake(told)
    for number in range(1, 1201):
        taken.take(step(number))
    taken.flush()
    assert [len(message.steps) for message in told if isinstance(message, StepReports)] == [500, 500, 200]


def phase(name: Phase, at: float) -> PhaseSaid:
    return PhaseSaid(job="j", generation=1, rank=0, at=at, phase=name)


async def test_phases_are_told_in_their_place_and_once() -> None:
    told: list[Message] = []
    taken = intake(told)
    taken.take(phase(Phase.SETUP, 1.0))
    taken.take(step(1))
    taken.take(phase(Phase.SAVE, 2.0))
    taken.take(phase(Phase.STEP, 3.0))
    taken.take(phase(Phase.SAVE, 2.0))  # once more, from the rank's own log
    assert [type(message) for message in told] == [RankPhase, StepReports, RankPhase, RankPhase]
    phases = [message.phase for message in told if isinstance(message, RankPhase)]
    assert phases == [Phase.SETUP, Phase.SAVE, Phase.STEP]


async def test_a_new_life_tells_nothing_that_the_earlier_one_has_told() -> None:
    story = [
        ResumedSaid(job="j", generation=1, rank=0, at=1.0, step=0),
        phase(Phase.STEP, 1.5),
        step(1),
        step(2),
        SavedSaid(job="j", generation=1, rank=0, at=2.0, step=2, directory="d", size_bytes=1, world_size=2),
        FinishedSaid(job="j", generation=1, rank=0, at=3.0, step=2),
    ]
    told = Told()
    first = Intake(job="j", generation=1, ranks=range(2), emit=told.take, progressed=lambda rank: None)
    for said in story:
        first.take(said)
    again: list[Message] = []
    second = Intake(
        job="j", generation=1, ranks=range(2), emit=again.append, progressed=lambda rank: None, told=told.of("j", 1)
    )
    for said in story:
        second.take(said)
    second.flush()
    assert again == []
    second.take(step(3))
    second.flush()
    assert [report.step for message in again if isinstance(message, StepReports) for report in message.steps] == [3]


async def test_passes_on_once_what_a_rank_says_of_a_save_beside_its_success() -> None:
    told: list[Message] = []
    remembered = Told()
    words = [
        b'{"kind":"rehashed","job":"j","generation":1,"rank":0,"at":2.0,"step":20,"ok":true}',
        b'{"kind":"save_failed","job":"j","generation":1,"rank":1,"at":3.0,"step":40,"attempt":2,"reason":"ENOSPC"}',
        b'{"kind":"save_skipped","job":"j","generation":1,"rank":0,"at":4.0,"step":60,"reason":"busy"}',
    ]
    for _ in range(2):  # by datagram and by log, also in the agent's next life
        taken = Intake(
            job="j",
            generation=1,
            ranks=range(2),
            emit=lambda message: (told.append(message), remembered.take(message))[0],
            progressed=lambda rank: None,
            told=remembered.of("j", 1),
        )
        for word in words * 2:
            said = parse_report(word)
            assert said is not None
            assert taken.take(said)  # type: ignore[arg-type]
    base = {"job": "j", "generation": 1}
    assert told == [
        CheckpointRehashed(rank=0, step=20, at=2.0, ok=True, **base),
        SaveInTrouble(rank=1, step=40, at=3.0, kind=SaveTroubleKind.FAILED, attempt=2, reason="ENOSPC", **base),
        SaveInTrouble(rank=0, step=60, at=4.0, kind=SaveTroubleKind.SKIPPED, reason="busy", **base),
    ]


async def test_every_number_of_a_step_is_passed_on() -> None:
    told: list[Message] = []
    taken = intake(told)
    fields = {
        name: kind for name, kind in StepReport.__annotations__.items() if name not in ("rank", "step", "at", "probe")
    }
    numbers: dict[str, Any] = {
        name: f"{number:016x}" if "Digest64" in str(kind) else 10 + number
        for number, (name, kind) in enumerate(fields.items())
    }
    taken.take(StepSaid(job="j", generation=1, rank=0, at=1.0, step=1, **numbers))
    taken.flush()
    reports = [report for message in told if isinstance(message, StepReports) for report in message.steps]
    assert [{name: getattr(report, name) for name in numbers} for report in reports] == [numbers]


async def test_look_at_the_state_is_passed_on_with_its_step() -> None:
    told: list[Message] = []
    taken = intake(told)
    probe = ProbeSaid(digests={"model": "aa"}, unmoved=["model"])
    taken.take(StepSaid(job="j", generation=1, rank=0, at=1.0, step=1, probe=probe))
    taken.take(step(2))
    taken.flush()
    reports = [report for message in told if isinstance(message, StepReports) for report in message.steps]
    assert [report.probe for report in reports] == [StateProbe(digests={"model": "aa"}, unmoved=["model"]), None]
