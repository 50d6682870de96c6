"""Drills are judged by what was promised: recovery with proof, or a job that did not notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recovery.domain.drill_promises import (
    CANCELLED,
    INCIDENT_WITHIN_S,
    SETTLE_S,
    SETTLED_WITHIN_S,
    UNDONE_WITHIN_S,
    FaultProgress,
    JobRecord,
    RankRecord,
    RecoveryEnd,
    judge_recovery,
    judge_unharmed,
    too_late,
)

ASKED, APPLIED, DURATION = 1000.0, 1001.0, 30.0
UNDONE = APPLIED + DURATION
FAULT = FaultProgress(not_after=ASKED + 120, duration_s=DURATION, is_undone=True, applied_at=APPLIED, undone_at=UNDONE)
END = RecoveryEnd(
    state="recovered",
    ended=True,
    within_s=120.0,
    total_s=50.0,
    continuity="bit-equal",
    steps_lost=7,
    fences={"gpu-02": "lease_expired"},
    fence_s=41.0,
)
RANK = RankRecord(rank=0, last_step=900, last_at=UNDONE + 20, steps=800, missing=0, longest_gap_s=0.4)
UNHARMED = JobRecord(
    generation_before=1,
    generation=1,
    ended=False,
    ranks=(RANK, replace(RANK, rank=1)),
    gaps={"gpu-01": 0, "gpu-02": 0},
    silent_s=33.0,
)
SETTLED = UNDONE + SETTLE_S + 1


def test_recovered_drill_passes_with_its_numbers() -> None:
    outcome = judge_recovery(END, FAULT)
    assert outcome is not None and outcome.passed
    assert outcome.numbers["fence"] == {"gpu-02": "lease_expired"}
    assert (outcome.numbers["steps_lost"], outcome.numbers["fence_s"]) == (7, 41.0)


def test_recovered_drill_waits_until_its_fault_is_undone() -> None:
    assert judge_recovery(END, replace(FAULT, undone_at=None)) is None
    told_by_nobody = replace(FAULT, undone_at=None, is_undone=False)
    assert judge_recovery(END, told_by_nobody) is not None


def test_recovered_drill_waits_while_its_incident_is_open() -> None:
    assert judge_recovery(replace(END, state="waiting_for_fence", ended=False), FAULT) is None


STOPPED = replace(END, state="cancelled", total_s=None, continuity="", lasted_s=119.0)


def test_drill_whose_incident_was_cancelled_says_so_and_nothing_of_continuity() -> None:
    outcome = judge_recovery(STOPPED, FAULT)
    assert outcome is not None and not outcome.passed
    assert outcome.reasons == (CANCELLED,)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lasted_s": 200.0}, "It was under way for 200 s; promised were 120 s."),
        ({"escalation": "Continuity broke twice."}, "It had asked for a person before: Continuity broke twice."),
        ({"continuity": "broken"}, "Continuity was not proven (broken)."),
        ({"rolled_back": (2,)}, "Generation 2 resumed with broken continuity; recovery had to roll back."),
    ],
)
def test_cancelled_drill_tells_what_was_broken_already(changed: dict[str, Any], words: str) -> None:
    outcome = judge_recovery(replace(STOPPED, **changed), FAULT)
    assert outcome is not None and outcome.reasons == (CANCELLED, words)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"state": "closed_by_operator"}, "ended as closed_by_operator"),
        ({"state": "escalated", "ended": False}, "ended as escalated"),
        ({"total_s": 121.0}, "Recovery took 121.0 s"),
        ({"total_s": None}, "Recovery took None s"),
        ({"continuity": "inconclusive"}, "Continuity was not proven (inconclusive)"),
        ({"continuity": ""}, "Continuity was not proven (no verdict)"),
        ({"rolled_back": (2,)}, "Generation 2 resumed with broken continuity"),
    ],
)
def test_recovered_drill_fails_for_each_broken_part_of_its_promise(changed: dict[str, Any], words: str) -> None:
    outcome = judge_recovery(replace(END, **changed), FAULT)
    assert outcome is not None and outcome.state == "failed"
    assert any(words in reason for reason in outcome.reasons)


def test_unharmed_drill_passes_with_its_numbers() -> None:
    outcome = judge_unharmed(UNHARMED, FAULT, now=SETTLED)
    assert outcome is not None and outcome.passed, outcome
    assert outcome.numbers == {
        "steps_lost": 0,
        "events_lost": 0,
        "incidents": 0,
        "steps_made": 800,
        "largest_step_gap_s": 0.4,
        "silent_s": 33.0,
    }


def test_unharmed_drill_is_not_judged_before_it_has_settled() -> None:
    assert judge_unharmed(UNHARMED, FAULT, now=SETTLED - 2) is None
    assert judge_unharmed(UNHARMED, replace(FAULT, undone_at=None), now=SETTLED) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"generation": 2}, "The job was relaunched: generation 2 after 1"),
        ({"ended": True}, "The job ended meanwhile"),
        ({"incidents": ("false_alarm",)}, "An incident was opened against the job: false_alarm"),
        ({"gaps": {"gpu-02": 1}}, "gpu-02 had to drop messages 1 time."),
        ({"renewed_outboxes": ("gpu-02",)}, "gpu-02 lost what it had kept"),
        ({"ranks": (replace(RANK, longest_gap_s=16.0),)}, "Rank 0 stood still for 16.0 s"),
    ],
)
def test_unharmed_drill_fails_for_each_harm(changed: dict[str, Any], words: str) -> None:
    outcome = judge_unharmed(replace(UNHARMED, **changed), FAULT, now=SETTLED)
    assert outcome is not None and outcome.state == "failed"
    assert any(words in reason for reason in outcome.reasons), outcome.reasons


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"missing": 3}, "Of rank 0, 3 steps before step 900 never arrived"),
        ({"last_at": UNDONE - 1}, "nothing was heard of a step of rank 0"),
        ({"last_at": None, "last_step": None}, "nothing was heard of a step of rank 0"),
    ],
)
def test_unharmed_drill_waits_for_what_may_still_arrive_and_then_fails(changed: dict[str, Any], words: str) -> None:
    job = replace(UNHARMED, ranks=(replace(RANK, **changed), replace(RANK, rank=1)))
    assert judge_unharmed(job, FAULT, now=SETTLED) is None
    late = UNDONE + SETTLED_WITHIN_S + 1
    outcome = judge_unharmed(job, FAULT, now=late)
    assert outcome is not None and any(words in reason for reason in outcome.reasons), outcome
    assert judge_unharmed(job, replace(FAULT, away_s=60.0), now=late) is None


def test_lost_events_are_missing_steps_gaps_and_renewed_outboxes() -> None:
    job = replace(
        UNHARMED, ranks=(replace(RANK, missing=3),), gaps={"gpu-01": 0, "gpu-02": 2}, renewed_outboxes=("gpu-01",)
    )
    outcome = judge_unharmed(job, FAULT, now=UNDONE + SETTLED_WITHIN_S + 1)
    assert outcome is not None and outcome.numbers["events_lost"] == 6


def test_rank_that_did_its_last_step_meanwhile_needs_no_further_one() -> None:
    done = replace(RANK, last_at=UNDONE - 1, finished=True)
    outcome = judge_unharmed(replace(UNHARMED, ranks=(done,), ended=True), FAULT, now=SETTLED)
    assert outcome is not None and outcome.passed


def test_false_alarm_breaks_no_promise_where_waiting_was_allowed() -> None:
    job = replace(UNHARMED, incidents=("false_alarm",), may_wait=True)
    outcome = judge_unharmed(job, FAULT, now=SETTLED)
    assert outcome is not None and outcome.passed
    recovered = judge_unharmed(replace(job, incidents=("recovered",)), FAULT, now=SETTLED)
    assert recovered is not None and not recovered.passed


def test_open_incident_is_waited_for_before_an_unharmed_drill_is_judged() -> None:
    job = replace(UNHARMED, incidents=("waiting_for_fence",), open_incident=True, may_wait=True)
    assert judge_unharmed(job, FAULT, now=SETTLED) is None
    outcome = judge_unharmed(job, FAULT, now=UNDONE + SETTLED_WITHIN_S + 1)
    assert outcome is not None and not outcome.passed


def late(fault: FaultProgress, now: float, *, needs_incident: bool = True, has_incident: bool = False) -> str | None:
    outcome = too_late(fault, now=now, needs_incident=needs_incident, has_incident=has_incident)
    return None if outcome is None else outcome.state


def test_fault_that_never_came_expires() -> None:
    waiting = replace(FAULT, applied_at=None, undone_at=None)
    limit = waiting.not_after + INCIDENT_WITHIN_S
    assert [late(waiting, limit), late(waiting, limit + 1)] == [None, "expired"]
    assert late(replace(waiting, away_s=100.0), limit + 1) is None
    assert late(waiting, limit + 1, has_incident=True) is None


def test_fault_without_an_incident_fails_where_one_was_promised() -> None:
    applied = replace(FAULT, undone_at=None)
    limit = APPLIED + INCIDENT_WITHIN_S
    assert [late(applied, limit), late(applied, limit + 1)] == [None, "failed"]
    assert late(applied, limit + 1, needs_incident=False) is None
    assert late(replace(applied, away_s=100.0), limit + 1) is None


def test_fault_that_nobody_reports_undone_fails_in_the_end() -> None:
    applied = replace(FAULT, undone_at=None)
    limit = APPLIED + DURATION + UNDONE_WITHIN_S
    assert [late(applied, limit, has_incident=True), late(applied, limit + 1, has_incident=True)] == [None, "failed"]
    assert late(replace(applied, away_s=100.0), limit + 1, has_incident=True) is None
    assert late(replace(applied, is_undone=False), limit + 1, has_incident=True) is None
    assert late(FAULT, limit + 1, has_incident=True) is None
