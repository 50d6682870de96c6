"""What was told of a generation follows from the messages alone."""

from __future__ import annotations

import msgspec

from agents.protocol.messages import (
    CheckpointRehashed,
    CheckpointSaved,
    Phase,
    ProbeOutcome,
    ProbeReport,
    RankExited,
    RankFinished,
    RankPhase,
    RankResumed,
    RankStarted,
    SaveInTrouble,
    SaveTroubleKind,
    StepReport,
    StepReports,
)
from agents.told import Told, ToldGeneration

STORY = (
    RankStarted(job="j", generation=2, rank=1, pid=77, at=1.0),
    RankResumed(job="j", generation=2, rank=1, step=20, at=2.0),
    RankPhase(job="j", generation=2, rank=1, phase=Phase.STEP, at=2.5),
    StepReports(job="j", generation=2, steps=[StepReport(rank=1, step=n, at=3.0) for n in (21, 22)]),
    CheckpointSaved(job="j", generation=2, step=22, at=3.0, directory="d", size_bytes=1, world_size=2),
    CheckpointRehashed(job="j", generation=2, rank=0, step=22, at=3.5, ok=True),
    SaveInTrouble(job="j", generation=2, rank=1, step=30, at=3.6, kind=SaveTroubleKind.FAILED, attempt=2),
    RankFinished(job="j", generation=2, rank=1, step=22, at=4.0),
    RankExited(job="j", generation=2, rank=1, pid=77, at=5.0, exit_code=0),
)
WHOLE = ToldGeneration(
    started={1: 77},
    resumed={1: 20},
    step={1: 22},
    saved=22,
    save_notes=["rehashed:0:22:True", "failed:1:30:2"],
    phase={1: 2.5},
    finished={1: 22},
    exited={1},
)


def test_follows_the_messages_of_each_generation() -> None:
    told = Told()
    for message in STORY:
        told.take(message)
    assert told.of("j", 2) == WHOLE
    assert told.of("j", 1) == ToldGeneration()


def test_a_message_taken_twice_changes_nothing() -> None:
    told = Told()
    for message in (*STORY, *STORY):
        told.take(message)
    assert told.of("j", 2) == WHOLE


def test_survives_the_way_to_the_disk() -> None:
    told = Told()
    for message in STORY:
        told.take(message)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Told)
    assert again.of("j", 2) == WHOLE


def test_a_copy_is_not_changed_by_what_comes_later() -> None:
    told = Told()
    told.take(STORY[0])
    before = told.of("j", 2)
    for message in STORY:
        told.take(message)
    assert before == ToldGeneration(started={1: 77})


def test_stays_small() -> None:
    told = Told()
    for number in range(1, 1000):
        told.take(RankStarted(job="j", generation=number, rank=0, pid=1, at=0.0))
        told.take(ProbeReport(probe=f"p{number}", outcome=ProbeOutcome.REACHABLE, at=0.0))
    assert len(told.generations) == 200
    assert told.of("j", 999).started == {0: 1}
    assert "p999" in told.probes
    assert len(told.probes) == 500
