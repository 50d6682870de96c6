from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import (
    NOW,
    ended_well,
    exited,
    generation,
    job,
    lost_rank_1,
    plan,
    prepared,
    share,
    situation,
    stopping,
)

from recovery.domain.detection import Fault, find_fault
from recovery.domain.generations import GenerationView, SeenPhase
from recovery.domain.instructions import JobState


def fault_of(view: GenerationView, state: JobState = JobState.RUNNING, *, stop_wanted: bool = False) -> Fault | None:
    return find_fault(situation(view, job=job(state=state, stop_wanted=stop_wanted)), NOW)


@pytest.mark.parametrize("state", [JobState.LAUNCHING, JobState.RUNNING, JobState.RECOVERING])
def test_finds_a_death_that_no_incident_has_in_hand(state: JobState) -> None:
    fault = fault_of(lost_rank_1(), state)
    assert fault is not None
    assert (fault.generation, fault.rank, fault.at) == (1, 1, NOW - 1)
    assert "killed by signal 9" in fault.sentence


def test_finds_a_runner_that_vanished_without_a_word() -> None:
    gone = generation(1, shares=(share("gpu-01", SeenPhase.RUNNING), share("gpu-02", SeenPhase.STOPPED)))
    fault = fault_of(gone)
    assert fault is not None
    assert (fault.rank, fault.at) == (None, None)
    assert "gpu-02" in fault.sentence


def test_a_runner_that_cannot_start_at_the_first_launch_is_no_incident() -> None:
    gone = generation(1, ranks=(), shares=(share("gpu-01", SeenPhase.RUNNING), share("gpu-02", SeenPhase.STOPPED)))
    assert fault_of(gone, JobState.LAUNCHING) is None


def test_a_job_that_ended_by_itself_has_no_fault() -> None:
    base = generation(1)
    done = replace(base, ranks=tuple(ended_well(rank) for rank in base.ranks))
    stopped = tuple(replace(part, seen=SeenPhase.STOPPED) for part in done.shares)
    assert fault_of(done) is None
    assert fault_of(replace(done, shares=stopped)) is None


def test_one_rank_that_ended_first_is_no_fault_though_its_runner_is_gone() -> None:
    base = generation(1)
    first = replace(
        base,
        ranks=(ended_well(base.ranks[0]), base.ranks[1]),
        shares=(replace(base.shares[0], seen=SeenPhase.STOPPED), base.shares[1]),
    )
    assert fault_of(first) is None


def test_exit_code_0_before_the_last_step_is_a_fault() -> None:
    base = generation(1)
    fault = fault_of(replace(base, ranks=(exited(base.ranks[0], code=0), base.ranks[1])))
    assert fault is not None
    assert fault.rank == 0


def test_what_was_stopped_on_purpose_is_no_fault() -> None:
    assert fault_of(stopping(lost_rank_1())) is None
    assert fault_of(lost_rank_1(), stop_wanted=True) is None


@pytest.mark.parametrize(
    "state",
    [JobState.PENDING, JobState.PLACING, JobState.STOPPING, JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED],
)
def test_no_fault_is_looked_for_where_nothing_should_run(state: JobState) -> None:
    assert fault_of(lost_rank_1(), state) is None


def test_only_the_newest_generation_counts() -> None:
    world = situation(lost_rank_1(), generation(2, of=plan(2)), job=job(state=JobState.RUNNING))
    assert find_fault(world, NOW) is None
    assert find_fault(situation(lost_rank_1(), prepared(plan(2)), job=job(state=JobState.RUNNING)), NOW) is None


def lost_loss(count: int) -> GenerationView:
    base = generation(1)
    return replace(
        base,
        ranks=tuple(replace(r, nonfinite_since=48, nonfinite_count=count, nonfinite_at=NOW - 7) for r in base.ranks),
    )


def test_a_loss_that_is_not_finite_for_three_steps_is_a_fault_though_nothing_died() -> None:
    fault = fault_of(lost_loss(3))
    assert fault is not None
    assert (fault.rank, fault.at) == (None, NOW - 7)
    assert fault.sentence == "Ranks 0 and 1 report a loss that is not finite from step 48 on."


def test_one_or_two_of_them_are_what_a_gradient_scaler_skips() -> None:
    assert fault_of(lost_loss(2)) is None
