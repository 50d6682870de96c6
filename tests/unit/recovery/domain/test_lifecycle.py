"""A job's life without faults, state by state, and each way in which a launch goes wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from domain_scenes import (
    CHECKPOINTS,
    NOW,
    PARENT,
    POLICY,
    ended_well,
    exited,
    fenced,
    fleet,
    generation,
    job,
    killed,
    leased,
    lost,
    node,
    plan,
    prepared,
    preparing,
    proven,
    rank,
    share,
    situation,
    stopping,
    training,
)

from recovery.domain.fleet import NodeHealth
from recovery.domain.generations import AssignmentPhase, GenerationView, Phase, ProofKind, SeenPhase
from recovery.domain.instructions import (
    JOB_ENDS,
    JobState,
    MarkContinuityBroken,
    MarkJob,
    PageOperator,
    PreparePlan,
    RecordProof,
    ReleaseNodes,
    RunPlan,
    StopGeneration,
)
from recovery.domain.lifecycle import JobOutcome, step_job
from recovery.domain.plan import LeaseLimits
from recovery.domain.situation import Situation

J = JobState


def life(state: JobState, *generations: GenerationView, **changes: Any) -> Situation:
    about = {name: changes.pop(name) for name in ("stop_wanted", "launch_attempts", "state_since") if name in changes}
    base = situation(*generations, checkpoints=(), job=job(state=state, **about), **changes)
    return base if generations else replace(base, generations=())


def marks(outcome: JobOutcome) -> list[JobState]:
    return [found.state for found in outcome.instructions if isinstance(found, MarkJob)]


def done() -> GenerationView:
    base = generation(1)
    return replace(base, ranks=tuple(ended_well(rank) for rank in base.ranks))


WAITS = JobOutcome()


# --- Pending ---


def test_pending_job_is_placed_and_prepared_from_the_beginning() -> None:
    outcome = step_job(life(J.PENDING), NOW)
    prepare, mark = outcome.instructions
    assert isinstance(prepare, PreparePlan)
    assert (prepare.plan.parent, prepare.plan.parent_reason) == (None, "first launch")
    assert prepare.plan.nodes == ("gpu-01", "gpu-02")
    assert mark == MarkJob(job="job-1", state=J.PLACING)


def test_pending_job_says_why_it_waits() -> None:
    outcome = step_job(life(J.PENDING, fleet=fleet(node("gpu-01"), node("gpu-02", cordoned=True))), NOW)
    (mark,) = outcome.instructions
    assert isinstance(mark, MarkJob)
    assert mark.state is J.PENDING
    assert "gpu-02 (cordoned)" in mark.reason


def test_relaunch_goes_on_from_what_an_unseen_launch_had_trained() -> None:
    world = replace(life(J.PENDING, fenced(generation(1))), checkpoints=CHECKPOINTS)
    prepare = step_job(world, NOW).instructions[0]
    assert isinstance(prepare, PreparePlan)
    assert prepare.plan.parent == PARENT


def test_relaunch_never_starts_silently_from_step_0() -> None:
    world = life(J.PENDING, fenced(generation(1)), state_since=NOW - 1)
    (mark,) = step_job(world, NOW).instructions
    assert isinstance(mark, MarkJob)
    assert (mark.state, "step 50 was reached" in mark.reason) == (J.PENDING, True)
    late = step_job(life(J.PENDING, fenced(generation(1)), state_since=NOW - 1000), NOW)
    assert marks(late) == [J.FAILED]
    assert any(isinstance(found, PageOperator) for found in late.instructions)


# --- Placing ---


def test_placing_job_runs_once_prepared() -> None:
    outcome = step_job(life(J.PLACING, prepared(plan())), NOW)
    assert outcome.instructions == (
        RunPlan(job="job-1", generation=1, master_port=20001),
        MarkJob(job="job-1", state=J.LAUNCHING),
    )


@pytest.mark.parametrize("seen", [SeenPhase.PREPARING, None])
def test_placing_job_waits_for_the_slower_node(seen: SeenPhase | None) -> None:
    assert step_job(life(J.PLACING, preparing(plan(), SeenPhase.PREPARED, seen)), NOW) == WAITS


def test_placing_job_never_runs_before_a_former_launch_is_fenced() -> None:
    former = stopping(replace(generation(1), ranks=()))
    assert step_job(life(J.PLACING, former, prepared(plan(2))), NOW) == WAITS
    assert RunPlan in map(type, step_job(life(J.PLACING, fenced(former), prepared(plan(2))), NOW).instructions)


def test_placing_job_does_not_run_on_a_node_that_is_out_of_sight() -> None:
    blind = fleet(node("gpu-01"), node("gpu-02", health=NodeHealth.UNKNOWN))
    assert step_job(life(J.PLACING, prepared(plan()), fleet=blind), NOW) == WAITS


def test_plan_from_the_beginning_goes_stale_when_the_former_launch_turns_out_to_have_trained() -> None:
    outcome = step_job(life(J.PLACING, fenced(generation(1)), prepared(plan(2))), NOW)
    assert StopGeneration(job="job-1", generation=2) in outcome.instructions
    assert marks(outcome) == [J.PENDING]
    assert not outcome.failed_launch


def test_placing_job_whose_generation_was_found_running_is_launching() -> None:
    """Its order to run was lost with a newer database."""
    outcome = step_job(life(J.PLACING, generation(1)), NOW)
    assert outcome.instructions == (MarkJob(job="job-1", state=J.LAUNCHING),)


def test_placing_job_gives_up_a_node_that_never_prepares() -> None:
    outcome = step_job(life(J.PLACING, preparing(plan()), state_since=NOW - 91), NOW)
    assert (marks(outcome), outcome.failed_launch) == ([J.PENDING], True)
    assert StopGeneration(job="job-1", generation=1) in outcome.instructions


@pytest.mark.parametrize("seen", [SeenPhase.PREPARE_FAILED, SeenPhase.REFUSED])
def test_failed_preparation_is_tried_again_with_a_fresh_plan(seen: SeenPhase) -> None:
    outcome = step_job(life(J.PLACING, preparing(plan(), SeenPhase.PREPARED, seen)), NOW)
    assert (marks(outcome), outcome.failed_launch) == ([J.PENDING], True)


def test_nodes_that_do_not_agree_on_the_job_do_not_run() -> None:
    view = prepared(plan())
    other = replace(view.shares[1], fingerprint="other", fingerprint_parts={"script": "other"})
    outcome = step_job(life(J.PLACING, replace(view, shares=(view.shares[0], other))), NOW)
    (mark,) = [found for found in outcome.instructions if isinstance(found, MarkJob)]
    assert "script is same on gpu-01 and other on gpu-02" in mark.reason
    assert outcome.failed_launch


def test_launches_are_bounded_and_end_with_a_page_keeping_the_nodes_until_they_are_empty() -> None:
    failed = preparing(plan(), SeenPhase.PREPARED, SeenPhase.PREPARE_FAILED)
    outcome = step_job(life(J.PLACING, failed, launch_attempts=2), NOW)
    assert marks(outcome) == [J.FAILED]
    assert PageOperator in map(type, outcome.instructions)
    assert ReleaseNodes not in map(type, outcome.instructions)


def test_placing_job_whose_orders_are_gone_is_placed_again() -> None:
    assert marks(step_job(life(J.PLACING, stopping(prepared(plan()))), NOW)) == [J.PENDING]
    assert marks(step_job(life(J.PLACING), NOW)) == [J.PENDING]


# --- Launching ---


def test_launching_job_runs_once_every_rank_has_made_a_step() -> None:
    assert step_job(life(J.LAUNCHING, generation(1)), NOW).instructions == (MarkJob(job="job-1", state=J.RUNNING),)


def test_launch_that_went_on_from_a_checkpoint_without_restoring_it_is_stopped_and_pages() -> None:
    made = plan(2, parent=PARENT)
    forgot = replace(training(0, of=made), saved_digest={"optimizer": "a"}, live_digest={"optimizer": "b"})
    view = generation(2, of=made, ranks=(forgot, training(1, of=made)))
    outcome = step_job(life(J.LAUNCHING, fenced(generation(1)), view), NOW)
    assert outcome.instructions[:2] == (
        MarkContinuityBroken(job="job-1", generation=2),
        StopGeneration(job="job-1", generation=2),
    )
    assert marks(outcome) == [J.FAILED]
    page = outcome.instructions[-1]
    assert isinstance(page, PageOperator)
    assert "rank 0 did not restore the optimizer" in page.reason


def test_launching_job_waits_for_the_last_rank() -> None:
    assert step_job(life(J.LAUNCHING, generation(1, ranks=(training(0, of=plan()),))), NOW) == WAITS


def test_launching_job_that_never_trains_is_tried_again() -> None:
    outcome = step_job(life(J.LAUNCHING, generation(1, ranks=()), state_since=NOW - 181), NOW)
    assert (marks(outcome), outcome.failed_launch) == ([J.PENDING], True)


def test_launching_job_has_as_long_as_its_own_limits_allow_its_ranks() -> None:
    """A model that loads for minutes, or compiles for half an hour, is no failed launch."""
    silent = tuple(rank(number, of=plan()) for number in range(2))
    compiling = (silent[0], replace(silent[1], phase=Phase.COMPILE, progress_seen_at=NOW - 1000))
    limits = LeaseLimits(setup_s=600, compile_s=1800)
    for ranks, since in ((silent, NOW - 599), (compiling, NOW - 1400)):
        view = generation(1, ranks=ranks, lease=limits)
        waits = step_job(life(J.LAUNCHING, view, state_since=since), NOW)
        assert (marks(waits), waits.failed_launch) == ([J.LAUNCHING], False)
        late = step_job(life(J.LAUNCHING, view, state_since=since), NOW + 801)
        assert (marks(late), late.failed_launch) == ([J.PENDING], True)


def test_a_runner_that_cannot_start_is_a_failed_launch() -> None:
    gone = generation(1, ranks=(), shares=(share("gpu-01", SeenPhase.STOPPED, reason="port_busy"), share("gpu-02")))
    outcome = step_job(life(J.LAUNCHING, gone), NOW)
    assert (marks(outcome), outcome.failed_launch) == ([J.PENDING], True)


def test_a_rank_that_died_while_launching_is_left_to_its_incident() -> None:
    dead = generation(1, ranks=(killed(training(0, of=plan())),))
    assert step_job(life(J.LAUNCHING, dead), NOW) == WAITS


# --- Running and the end ---


def test_running_job_is_left_alone() -> None:
    assert step_job(life(J.RUNNING, generation(1)), NOW + 1e6) == WAITS


@pytest.mark.parametrize("state", [J.LAUNCHING, J.RUNNING, J.RECOVERING])
def test_a_job_that_ends_by_itself_succeeds_and_keeps_its_nodes_until_they_are_empty(state: JobState) -> None:
    outcome = step_job(life(state, done()), NOW)
    assert outcome.instructions == (
        MarkJob(job="job-1", state=J.SUCCEEDED),
        StopGeneration(job="job-1", generation=1),
    )


def test_one_rank_that_ends_first_is_no_end_and_no_fault() -> None:
    base = generation(1)
    first = replace(base, ranks=(ended_well(base.ranks[0]), base.ranks[1]))
    assert step_job(life(J.RUNNING, first), NOW) == WAITS


def test_case_R41_exit_code_0_before_the_last_step_is_no_success() -> None:
    base = generation(1)
    early = replace(base, ranks=(exited(base.ranks[0], code=0), exited(base.ranks[1], code=0)))
    assert step_job(life(J.RUNNING, early), NOW) == WAITS


def test_a_normal_end_of_fewer_ranks_than_planned_is_no_success() -> None:
    view = done()
    assert step_job(life(J.RUNNING, replace(view, ranks=view.ranks[:1])), NOW) == WAITS


@pytest.mark.parametrize("state", sorted(JOB_ENDS))
def test_ended_job_gives_up_its_nodes_once_they_are_proven_empty(state: JobState) -> None:
    held = fleet(node("gpu-01", claimed_by="job-1"), node("gpu-02", claimed_by="job-1"))
    assert step_job(life(state, stopping(done()), fleet=held), NOW) == WAITS
    assert step_job(life(state, fenced(done()), fleet=held), NOW).instructions == (ReleaseNodes(job="job-1"),)
    assert step_job(life(state, fenced(done())), NOW) == WAITS


@pytest.mark.parametrize("state", sorted(JOB_ENDS))
def test_ended_job_wants_nothing_any_more(state: JobState) -> None:
    assert step_job(life(state, done()), NOW).instructions == (StopGeneration(job="job-1", generation=1),)


# --- Stop ---


@pytest.mark.parametrize("state", sorted(set(J) - JOB_ENDS))
def test_stop_in_every_state_ends_as_stopped_only_after_proof(state: JobState) -> None:
    first = step_job(life(state, generation(1), stop_wanted=True), NOW)
    assert first.instructions[0] == StopGeneration(job="job-1", generation=1)
    assert RunPlan not in map(type, first.instructions)
    assert step_job(life(J.STOPPING, stopping(generation(1)), stop_wanted=True), NOW) == WAITS
    last = step_job(life(J.STOPPING, fenced(generation(1)), stop_wanted=True), NOW)
    assert last.instructions == (MarkJob(job="job-1", state=J.STOPPED), ReleaseNodes(job="job-1"))


def test_stop_of_a_job_that_never_ran_needs_no_proof() -> None:
    outcome = step_job(life(J.PLACING, stopping(prepared(plan())), stop_wanted=True), NOW)
    assert marks(outcome) == [J.STOPPED]
    assert marks(step_job(life(J.PENDING, stop_wanted=True), NOW)) == [J.STOPPED]


def test_phases_of_the_scenes_are_what_they_say() -> None:
    assert (prepared(plan()).wanted, generation(1).wanted) == (AssignmentPhase.PREPARE, AssignmentPhase.RUN)


def test_stop_that_is_not_proven_in_time_says_what_it_waits_for() -> None:
    late = NOW + 1000
    outcome = step_job(life(J.STOPPING, stopping(generation(1)), stop_wanted=True), late)
    (mark,) = outcome.instructions
    assert isinstance(mark, MarkJob)
    assert mark.reason == "Waiting for proof that its ranks are gone from gpu-01 and gpu-02."


# --- Silent nodes ---


def on_launch(view: GenerationView, *, overdue_s: float = 1.0, **changes: Any) -> JobOutcome:
    since = NOW - POLICY.launching_s - overdue_s
    return step_job(situation(view, job=job(state=JobState.LAUNCHING, state_since=since), **changes), NOW)


def test_an_overdue_launch_that_waits_for_a_lost_node_has_failed() -> None:
    away = fleet(node("gpu-01"), lost("gpu-02"), node("gpu-03"))
    outcome = on_launch(generation(1, ranks=()), fleet=away)
    assert outcome.failed_launch
    assert any("contact with gpu-02 was lost" in getattr(one, "reason", "") for one in outcome.instructions)


def test_an_overdue_launch_of_which_nothing_can_be_seen_has_not_failed() -> None:
    outcome = on_launch(generation(1, ranks=()), fleet=fleet(lost("gpu-01"), lost("gpu-02")))
    assert not outcome.failed_launch
    assert [type(one) for one in outcome.instructions] == [MarkJob]


@pytest.mark.parametrize("state", [JobState.STOPPING, JobState.FAILED, JobState.SUCCEEDED])
def test_a_lease_that_ran_out_proves_the_stop_of_a_job_that_is_over(state: JobState) -> None:
    view = proven(stopping(leased(1, ago_s=90)), "gpu-01", at=NOW - 80)
    away = fleet(node("gpu-01"), lost("gpu-02", heard_at=NOW - 85))
    outcome = step_job(situation(view, fleet=away, job=job(state=state, stop_wanted=True)), NOW)
    (recorded,) = outcome.instructions
    assert isinstance(recorded, RecordProof)
    assert (recorded.proof.node, recorded.proof.kind) == ("gpu-02", ProofKind.LEASE_EXPIRED)
