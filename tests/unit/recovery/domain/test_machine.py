"""The incident machine, state by state: the normal event, the event twice, the event late, each way to fail."""

from __future__ import annotations

from dataclasses import replace

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
    incident,
    job,
    killed,
    lost_rank_1,
    node,
    plan,
    prepared,
    preparing,
    proof,
    rank,
    settle,
    share,
    situation,
    stopping,
    training,
    verdict,
)

from recovery.domain.continuity import VerdictKind
from recovery.domain.fleet import NodeHealth
from recovery.domain.generations import AssignmentPhase, GenerationView, SeenPhase
from recovery.domain.incident import ENDS, TRANSITIONS, CauseKind, Incident, IncidentState
from recovery.domain.instructions import (
    Instruction,
    IssueReceipt,
    JobState,
    MarkContinuityBroken,
    MarkJob,
    PageOperator,
    PreparePlan,
    ReleaseNodes,
    RunPlan,
    StopGeneration,
)
from recovery.domain.machine import step
from recovery.domain.moves import Outcome, escalate_poisoned
from recovery.domain.plan import CheckpointRef, LeaseLimits
from recovery.domain.silence import Contact
from recovery.domain.situation import Command, Situation

S = IncidentState
PLAN = plan(2, parent=PARENT)
OLD = fenced(lost_rank_1())


def kinds(outcome: Outcome) -> list[type[Instruction]]:
    return [type(instruction) for instruction in outcome.instructions]


def only(outcome: Outcome, kind: type[Instruction]) -> Instruction:
    found = [instruction for instruction in outcome.instructions if isinstance(instruction, kind)]
    assert len(found) == 1, outcome.instructions
    return found[0]


def waits(outcome: Outcome, start: Incident) -> bool:
    return outcome == Outcome(incident=start)


def words(outcome: Outcome) -> str:
    return " ".join(entry.text for entry in outcome.entries)


def planned(state: IncidentState, **changes: object) -> Incident:
    """An incident of that state that has a plan for generation 2."""
    return incident(state, **{"plan": PLAN, "plans_made": 1, "reached_step": 50, **changes})


def running(**changes: object) -> GenerationView:
    """Generation 2 while its ranks are being started."""
    return generation(2, of=PLAN, **{"ranks": (), **changes})


def trains(**changes: object) -> GenerationView:
    """Generation 2 with every rank beyond its first step."""
    return generation(2, of=PLAN, ranks=tuple(training(n, of=PLAN, last_step=45) for n in (0, 1)), **changes)


# --- Detected ---


def test_detected_stops_what_is_left_and_tells_the_cause() -> None:
    outcome = step(incident(), situation(), NOW)
    assert outcome.incident.state is S.STOPPING
    assert outcome.instructions == (StopGeneration(job="job-1", generation=1),)
    assert outcome.incident.cause is not None
    assert (outcome.incident.cause.kind, outcome.incident.cause.rank) == (CauseKind.RANK_KILLED, 1)
    assert outcome.incident.reached_step == 50
    assert outcome.incident.deadline_at == POLICY.deadline(S.STOPPING, now=NOW)
    assert [entry.kind.value for entry in outcome.entries] == ["fault", "state"]


def test_detected_without_a_death_is_a_false_alarm_that_stops_nothing() -> None:
    outcome = step(incident(), situation(generation(1)), NOW)
    assert outcome.incident.state is S.FALSE_ALARM
    assert outcome.instructions == (MarkJob(job="job-1", state=JobState.RUNNING),)


def test_false_alarm_during_a_launch_lets_the_launch_go_on() -> None:
    outcome = step(incident(), situation(generation(1, ranks=())), NOW)
    assert outcome.instructions == (MarkJob(job="job-1", state=JobState.LAUNCHING),)


def test_detected_for_a_generation_that_does_not_exist_is_a_false_alarm() -> None:
    assert step(incident(broken_generation=7), situation(), NOW).incident.state is S.FALSE_ALARM


def test_a_vanished_runner_is_a_fault_though_no_end_of_a_rank_is_known() -> None:
    gone = generation(1, shares=(share("gpu-01", SeenPhase.RUNNING), share("gpu-02", SeenPhase.STOPPED)))
    outcome = step(incident(), situation(gone), NOW)
    assert outcome.incident.state is S.STOPPING
    assert outcome.incident.cause is not None
    assert (outcome.incident.cause.kind, outcome.incident.cause.node) == (CauseKind.RUNNER_LOST, "gpu-02")
    assert "gpu-02" in words(outcome)


def test_a_death_during_the_first_launch_recovers_from_the_beginning() -> None:
    young = generation(1, ranks=(killed(replace(training(0, of=plan()), first_step_at=None, last_step=None)),))
    first = step(incident(), situation(young, checkpoints=()), NOW)
    assert (first.incident.state, first.incident.reached_step) == (S.STOPPING, None)
    ahead = step(first.incident, situation(stopping(young), checkpoints=()), NOW)
    assert ahead.incident.plan is not None
    assert ahead.incident.plan.parent is None


# --- Stopping ---


def test_stopping_plans_ahead_while_old_ranks_die_and_runs_nothing() -> None:
    start = incident(S.STOPPING)
    outcome = step(start, situation(stopping(lost_rank_1())), NOW)
    assert outcome.incident.state is S.STOPPING
    prepare = only(outcome, PreparePlan)
    assert isinstance(prepare, PreparePlan)
    assert (prepare.plan.generation, prepare.plan.parent, prepare.plan.nodes) == (2, PARENT, ("gpu-01", "gpu-02"))
    assert outcome.incident.plan == prepare.plan
    assert RunPlan not in kinds(outcome)


def test_stopping_plans_ahead_only_once() -> None:
    start = planned(S.STOPPING)
    assert waits(step(start, situation(stopping(lost_rank_1()), preparing(PLAN)), NOW), start)


def test_stopping_orders_the_stop_again_where_it_is_missing() -> None:
    outcome = step(incident(S.STOPPING), situation(lost_rank_1()), NOW)
    assert outcome.instructions == (StopGeneration(job="job-1", generation=1),)


def test_stopping_waits_while_one_node_of_two_is_unproven() -> None:
    half = stopping(lost_rank_1())
    half = replace(half, shares=(replace(half.shares[0], proof=proof("gpu-01")), half.shares[1]))
    start = planned(S.STOPPING)
    assert waits(step(start, situation(half, preparing(PLAN)), NOW), start)


def test_stopping_goes_on_when_every_node_is_proven_and_tells_each_proof() -> None:
    outcome = step(planned(S.STOPPING), situation(OLD, preparing(PLAN)), NOW)
    assert outcome.incident.state is S.PLACING
    assert outcome.incident.fenced_at == NOW - 0.5
    assert words(outcome).count("is gone from") == 2
    assert outcome.instructions == ()


def test_stopping_does_not_stop_the_generation_that_it_prepares() -> None:
    assert StopGeneration not in kinds(
        step(planned(S.STOPPING), situation(stopping(lost_rank_1()), preparing(PLAN)), NOW)
    )


def test_plan_made_ahead_goes_stale_when_a_newer_checkpoint_arrives() -> None:
    stale = plan(2, parent=CheckpointRef(generation=1, step=20))
    start = planned(S.STOPPING, plan=stale)
    outcome = step(start, situation(OLD, preparing(stale)), NOW)
    assert outcome.incident.plan is None
    assert outcome.instructions == (StopGeneration(job="job-1", generation=2),)
    assert outcome.incident.plans_made == 0
    again = settle(outcome.incident, lambda: situation(OLD, stopping(preparing(stale))))
    assert again.incident.state is S.PLACING
    assert again.incident.plan is not None
    assert again.incident.plan.parent == PARENT


def test_plan_from_the_beginning_goes_stale_when_it_turns_out_that_steps_were_done() -> None:
    stale = plan(2)
    outcome = step(planned(S.STOPPING, plan=stale), situation(OLD, preparing(stale), checkpoints=()), NOW)
    assert outcome.incident.plan is None
    waiting = settle(outcome.incident, lambda: situation(OLD, stopping(preparing(stale)), checkpoints=()))
    assert waiting.incident.state is S.WAITING_FOR_CHECKPOINT


def test_reached_step_counts_what_the_dying_ranks_still_did_but_not_what_the_new_ones_do() -> None:
    late = replace(OLD, ranks=(replace(OLD.ranks[0], last_step=52), OLD.ranks[1]))
    outcome = step(planned(S.STOPPING), situation(late, trains()), NOW)
    assert outcome.incident.reached_step == 52


def test_stopping_waits_for_a_fence_at_its_deadline_pages_and_names_the_nodes_without_proof() -> None:
    start = planned(S.STOPPING)
    outcome = step(start, situation(stopping(lost_rank_1()), preparing(PLAN)), NOW + 61)
    assert outcome.incident.state is S.WAITING_FOR_FENCE
    assert "gpu-01 and gpu-02" in outcome.incident.escalation
    assert kinds(outcome) == [PageOperator]


def test_an_overdue_state_first_does_what_is_due() -> None:
    # A worker that was down past the deadline must not drop the stop order, nor keep a plan that nobody prepares.
    stops = step(incident(S.STOPPING), situation(lost_rank_1()), NOW + 500)
    assert kinds(stops) == [StopGeneration]
    plans = step(incident(S.STOPPING), situation(stopping(lost_rank_1())), NOW + 500)
    assert kinds(plans) == [PreparePlan]
    assert (
        step(plans.incident, situation(stopping(lost_rank_1()), preparing(PLAN)), NOW + 500).incident.state
        is S.WAITING_FOR_FENCE
    )


def test_a_second_death_while_stopping_changes_nothing() -> None:
    both = stopping(lost_rank_1())
    both = replace(both, ranks=tuple(killed(rank) if not rank.exited else rank for rank in both.ranks))
    start = planned(S.STOPPING)
    assert waits(step(start, situation(both, preparing(PLAN)), NOW), start)


# --- Placing ---


def test_placing_launches_when_prepared_and_fenced() -> None:
    outcome = step(planned(S.PLACING), situation(OLD, prepared(PLAN)), NOW)
    assert outcome.incident.state is S.LAUNCHING
    assert outcome.instructions == (RunPlan(job="job-1", generation=2, master_port=20001, fences=OLD.proofs),)
    assert outcome.incident.run_ordered_at == NOW
    assert "from step 40 of generation 1" in words(outcome)


def test_placing_never_runs_before_every_older_generation_is_fenced() -> None:
    start = planned(S.PLACING)
    assert waits(step(start, situation(stopping(lost_rank_1()), prepared(PLAN)), NOW), start)
    oldest = stopping(generation(1))
    newer = fenced(generation(2, of=plan(2)))
    start = planned(S.PLACING, plan=plan(3, parent=PARENT))
    assert waits(step(start, situation(oldest, newer, prepared(plan(3, parent=PARENT))), NOW), start)


def test_placing_waits_for_the_slower_node() -> None:
    start = planned(S.PLACING)
    assert waits(step(start, situation(OLD, preparing(PLAN, SeenPhase.PREPARED, SeenPhase.PREPARING)), NOW), start)


def test_placing_waits_for_the_port_of_node_rank_0() -> None:
    view = prepared(PLAN)
    start = planned(S.PLACING)
    portless = replace(view, shares=tuple(replace(s, master_port=None) for s in view.shares))
    assert waits(step(start, situation(OLD, portless), NOW), start)


def test_placing_a_second_time_after_run_was_ordered_gives_no_second_order() -> None:
    outcome = step(planned(S.PLACING), situation(OLD, running()), NOW)
    assert (outcome.incident.state, outcome.instructions) == (S.LAUNCHING, ())


def test_placing_makes_a_plan_where_none_could_be_made_ahead() -> None:
    outcome = step(incident(S.PLACING), situation(OLD), NOW)
    assert kinds(outcome) == [PreparePlan]
    assert outcome.incident.plans_made == 1


def test_placing_pages_when_the_nodes_do_not_agree_on_the_job() -> None:
    view = prepared(PLAN)
    other = replace(view.shares[1], fingerprint="other", fingerprint_parts={"script": "other"})
    outcome = step(planned(S.PLACING), situation(OLD, replace(view, shares=(view.shares[0], other))), NOW)
    assert outcome.incident.state is S.ESCALATED
    assert "script is same on gpu-01 and other on gpu-02" in outcome.incident.escalation
    assert RunPlan not in kinds(outcome)


def test_failed_preparation_costs_an_attempt_and_replaces_the_node() -> None:
    failed = preparing(PLAN, SeenPhase.PREPARED, SeenPhase.PREPARE_FAILED)
    outcome = step(planned(S.PLACING), situation(OLD, failed), NOW)
    assert outcome.incident.state is S.STOPPING
    assert (outcome.incident.attempt, outcome.incident.excluded_nodes) == (1, ("gpu-02",))
    assert outcome.instructions == (StopGeneration(job="job-1", generation=2),)
    again = settle(outcome.incident, lambda: situation(OLD, stopping(failed)))
    assert again.incident.plan is not None
    assert again.incident.plan.nodes == ("gpu-01", "gpu-03")


def test_failed_preparation_without_a_spare_tries_the_same_node_again_as_the_last_resort() -> None:
    pair = fleet(node("gpu-01"), node("gpu-02"))
    start = incident(S.PLACING, excluded_nodes=("gpu-02",), attempt=1)
    outcome = step(start, situation(OLD, fleet=pair), NOW)
    prepare = only(outcome, PreparePlan)
    assert isinstance(prepare, PreparePlan)
    assert prepare.plan.nodes == ("gpu-01", "gpu-02")


@pytest.mark.parametrize("reason", ["port_busy", "older_generation"])
def test_busy_port_or_outrun_number_makes_a_new_plan_and_costs_no_attempt(reason: str) -> None:
    view = preparing(PLAN, SeenPhase.PREPARE_FAILED, SeenPhase.PREPARED)
    view = replace(view, shares=(replace(view.shares[0], reason=reason), view.shares[1]))
    outcome = step(planned(S.PLACING), situation(OLD, view), NOW)
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 0)
    assert outcome.incident.excluded_nodes == ()


def test_preparation_that_fails_while_old_ranks_still_die_waits_for_their_proof_first() -> None:
    failed = preparing(PLAN, SeenPhase.PREPARED, SeenPhase.PREPARE_FAILED)
    start = planned(S.STOPPING)
    assert waits(step(start, situation(stopping(lost_rank_1()), failed), NOW), start)
    after = step(start, situation(OLD, failed), NOW)
    assert after.incident.state is S.PLACING
    assert step(after.incident, situation(OLD, failed), NOW).incident.excluded_nodes == ("gpu-02",)


@pytest.mark.parametrize(
    "change",
    [
        {"health": NodeHealth.UNKNOWN, "contact": Contact.LOST},
        {"health": NodeHealth.UNHEALTHY},
        {"cordoned": True},
        {"claimed_by": "job-2"},
    ],
)
def test_a_planned_node_that_is_lost_before_run_makes_a_new_plan(change: dict[str, object]) -> None:
    world = fleet(node("gpu-01"), node("gpu-02", **change), node("gpu-03"))
    outcome = step(planned(S.PLACING), situation(OLD, prepared(PLAN), fleet=world), NOW)
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 0)
    assert RunPlan not in kinds(outcome)


def test_placing_waits_visibly_when_nodes_are_missing() -> None:
    outcome = step(incident(S.PLACING), situation(OLD, fleet=fleet(node("gpu-01"), node("gpu-02", cordoned=True))), NOW)
    assert outcome.incident.state is S.WAITING_FOR_CAPACITY
    assert "gpu-02 (cordoned)" in words(outcome)
    assert outcome.incident.deadline_at == POLICY.deadline(S.WAITING_FOR_CAPACITY, now=NOW)


def test_placing_waits_visibly_when_no_checkpoint_fits() -> None:
    outcome = step(incident(S.PLACING), situation(OLD, checkpoints=()), NOW)
    assert outcome.incident.state is S.WAITING_FOR_CHECKPOINT
    assert "step 50 was reached" in words(outcome)


@pytest.mark.parametrize("view", [stopping(prepared(PLAN)), None])
def test_placing_plans_again_when_its_orders_are_gone(view: GenerationView | None) -> None:
    outcome = step(planned(S.PLACING), situation(*([OLD] if view is None else [OLD, view])), NOW)
    assert (outcome.incident.state, outcome.incident.plan, outcome.incident.attempt) == (S.STOPPING, None, 0)


def test_placing_pages_at_its_deadline() -> None:
    outcome = step(planned(S.PLACING), situation(OLD, preparing(PLAN)), NOW + 91)
    assert outcome.incident.state is S.ESCALATED


# --- Waiting ---


def test_waiting_for_capacity_goes_on_when_a_node_comes_back() -> None:
    start = incident(S.WAITING_FOR_CAPACITY)
    short = fleet(node("gpu-01"))
    assert waits(step(start, situation(OLD, fleet=short), NOW), start)
    assert step(start, situation(OLD), NOW).incident.state is S.PLACING


def test_waiting_for_checkpoint_goes_on_when_one_arrives() -> None:
    start = incident(S.WAITING_FOR_CHECKPOINT)
    assert waits(step(start, situation(OLD, checkpoints=()), NOW), start)
    assert step(start, situation(OLD), NOW).incident.state is S.PLACING


def test_waiting_for_checkpoint_does_not_hide_that_nodes_are_missing_now() -> None:
    start = incident(S.WAITING_FOR_CHECKPOINT)
    outcome = settle(start, lambda: situation(OLD, fleet=fleet(node("gpu-01"))))
    assert outcome.incident.state is S.WAITING_FOR_CAPACITY


@pytest.mark.parametrize("state", [S.WAITING_FOR_CAPACITY, S.WAITING_FOR_CHECKPOINT])
def test_waiting_pages_at_its_deadline(state: IncidentState) -> None:
    world = situation(OLD, checkpoints=(), fleet=fleet(node("gpu-01")))
    start = incident(state)
    while step(start, world, NOW).incident.state is not start.state:
        start = step(start, world, NOW).incident
    assert start.deadline_at is not None
    assert step(start, world, start.deadline_at).incident.state is S.ESCALATED


# --- Launching ---


def test_launching_waits_for_the_first_step_of_every_rank() -> None:
    start = planned(S.LAUNCHING)
    assert waits(step(start, situation(OLD, running()), NOW), start)
    half = running(ranks=(training(0, of=PLAN),))
    assert waits(step(start, situation(OLD, half), NOW), start)


def test_launching_goes_on_once_every_rank_has_made_a_step() -> None:
    outcome = step(planned(S.LAUNCHING), situation(OLD, trains()), NOW)
    assert outcome.incident.state is S.VERIFYING
    assert outcome.incident.first_step_at == NOW - 40


def test_relaunch_has_as_long_as_the_jobs_own_limits_allow_its_ranks() -> None:
    ranks = tuple(rank(number, of=PLAN) for number in range(2))
    view = running(ranks=ranks, lease=LeaseLimits(setup_s=600))
    start = planned(S.LAUNCHING, state_since=NOW - 181, deadline_at=NOW - 1)
    waits_on = step(start, situation(OLD, view), NOW).incident
    assert (waits_on.state, waits_on.deadline_at) == (S.LAUNCHING, NOW - 181 + 600 + 1)
    late = step(waits_on, situation(OLD, view), NOW + 425)
    assert late.incident.state is S.STOPPING
    assert "did not train in time" in " ".join(entry.text for entry in late.entries)


def test_launching_again_after_a_death_costs_an_attempt_and_avoids_the_node() -> None:
    dead = running(ranks=(training(0, of=PLAN), killed(training(1, of=PLAN))))
    outcome = step(planned(S.LAUNCHING), situation(OLD, dead), NOW)
    assert outcome.incident.state is S.STOPPING
    assert (outcome.incident.attempt, outcome.incident.avoided_nodes) == (1, ("gpu-02",))
    assert outcome.incident.plan is None
    assert outcome.instructions == (StopGeneration(job="job-1", generation=2),)


def test_an_avoided_node_is_taken_again_if_there_is_no_other() -> None:
    start = incident(S.PLACING, avoided_nodes=("gpu-02",))
    spare = only(step(start, situation(OLD), NOW), PreparePlan)
    assert isinstance(spare, PreparePlan)
    assert spare.plan.nodes == ("gpu-01", "gpu-03")
    pair = fleet(node("gpu-01"), node("gpu-02"))
    same = only(step(start, situation(OLD, fleet=pair), NOW), PreparePlan)
    assert isinstance(same, PreparePlan)
    assert same.plan.nodes == ("gpu-01", "gpu-02")


def test_a_runner_that_is_gone_fails_the_launch_and_its_node_is_avoided() -> None:
    view = running(shares=(share("gpu-01", SeenPhase.RUNNING), share("gpu-02", SeenPhase.STOPPED, reason="runner")))
    outcome = step(planned(S.LAUNCHING), situation(OLD, view), NOW)
    assert (outcome.incident.state, outcome.incident.avoided_nodes) == (S.STOPPING, ("gpu-02",))


def test_busy_port_at_launch_costs_no_attempt_and_blames_no_node() -> None:
    view = running(shares=(share("gpu-01", SeenPhase.STOPPED, reason="port_busy"), share("gpu-02", SeenPhase.RUNNING)))
    outcome = step(planned(S.LAUNCHING), situation(OLD, view), NOW)
    assert (outcome.incident.state, outcome.incident.attempt, outcome.incident.avoided_nodes) == (S.STOPPING, 0, ())


def test_launch_without_any_word_is_relaunched_at_its_deadline_avoiding_the_silent_node() -> None:
    silent = running(ranks=(replace(training(0, of=PLAN), first_step_at=None),))
    outcome = step(planned(S.LAUNCHING), situation(OLD, silent), NOW + 181)
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 1)
    assert outcome.incident.avoided_nodes == ("gpu-02",)


def test_launching_pages_when_the_attempts_are_used_up() -> None:
    dead = running(ranks=(killed(training(0, of=PLAN)),))
    outcome = step(planned(S.LAUNCHING, attempt=2), situation(OLD, dead), NOW)
    assert (outcome.incident.state, outcome.incident.attempt) == (S.ESCALATED, 3)
    assert PageOperator in kinds(outcome)


def test_plans_that_cost_no_attempt_are_bounded_too() -> None:
    view = preparing(PLAN, SeenPhase.PREPARE_FAILED, SeenPhase.PREPARED)
    view = replace(view, shares=(replace(view.shares[0], reason="port_busy"), view.shares[1]))
    outcome = step(planned(S.PLACING, plans_made=12), situation(OLD, view), NOW)
    assert outcome.incident.state is S.ESCALATED


def test_broken_state_is_seen_while_launching_so_that_its_checkpoints_are_never_used() -> None:
    # The generation did not restore its optimizer, saved step 60 and died before every rank had told a step.
    dead = running(ranks=(training(0, of=PLAN), killed(training(1, of=PLAN))))
    seen = verdict(VerdictKind.BROKEN, caught_up=False)
    outcome = step(planned(S.LAUNCHING), situation(OLD, dead, verdict=seen), NOW)
    assert MarkContinuityBroken(job="job-1", generation=2) in outcome.instructions
    assert outcome.incident.rollbacks == 1


def test_launching_plans_again_when_its_orders_are_gone() -> None:
    outcome = step(planned(S.LAUNCHING), situation(OLD, stopping(running())), NOW)
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 0)


# --- Verifying ---


def test_verifying_waits_until_every_rank_is_beyond_the_old_last_step() -> None:
    start = planned(S.VERIFYING)
    assert waits(step(start, situation(OLD, trains(), verdict=verdict(caught_up=False)), NOW), start)
    assert waits(step(start, situation(OLD, trains()), NOW), start)


def test_verifying_ends_with_a_receipt_that_holds_its_numbers() -> None:
    start = planned(S.VERIFYING, fenced_at=NOW - 0.5, run_ordered_at=NOW, first_step_at=NOW + 2)
    outcome = step(start, situation(OLD, trains(), verdict=verdict(), caught_up_at=NOW + 3), NOW + 4)
    assert outcome.incident.state is S.RECOVERED
    assert outcome.incident.deadline_at is None
    issue = only(outcome, IssueReceipt)
    assert isinstance(issue, IssueReceipt)
    receipt = issue.receipt
    assert (receipt.broken_generation, receipt.generation, receipt.parent) == (1, 2, PARENT)
    assert (receipt.detect_s, receipt.stop_s, receipt.launch_s, receipt.first_step_s, receipt.caught_up_s) == (
        0.5, 0.5, 1.0, 3.0, 4.0,
    )  # fmt: skip
    assert (receipt.total_s, receipt.attempts, receipt.verdict.kind) == (5.0, 1, VerdictKind.BIT_EQUAL)
    assert [fence.node for fence in receipt.fences] == ["gpu-01", "gpu-02"]
    assert MarkJob(job="job-1", state=JobState.RUNNING) in outcome.instructions
    assert ReleaseNodes(job="job-1", keep=("gpu-01", "gpu-02")) in outcome.instructions


def test_verifying_says_when_continuity_could_not_be_proven() -> None:
    outcome = step(planned(S.VERIFYING), situation(OLD, trains(), verdict=verdict(VerdictKind.INCONCLUSIVE)), NOW)
    assert outcome.incident.state is S.RECOVERED
    assert "could not be proven" in words(outcome)


def test_a_job_that_ends_while_verifying_succeeds_and_its_generation_is_not_wanted_any_more() -> None:
    done = trains()
    done = replace(done, ranks=tuple(ended_well(rank) for rank in done.ranks))
    outcome = step(planned(S.VERIFYING), situation(OLD, done, verdict=verdict(caught_up=False)), NOW)
    assert outcome.incident.state is S.RECOVERED
    assert MarkJob(job="job-1", state=JobState.SUCCEEDED) in outcome.instructions
    assert StopGeneration(job="job-1", generation=2) in outcome.instructions


def test_fault_after_the_very_last_step_recovers_without_a_step_to_do() -> None:
    # The parent is the last step: the new ranks have nothing to train, and end at once.
    last = CheckpointRef(generation=1, step=100)
    made = plan(2, parent=last)
    ranks = tuple(ended_well(replace(training(n, of=made), first_step_at=None, last_step=None)) for n in (0, 1))
    done = generation(2, of=made, ranks=ranks)
    start = planned(S.LAUNCHING, plan=made, reached_step=100)
    world = situation(OLD, done, verdict=verdict(VerdictKind.STATE_EQUAL, caught_up=False))
    outcome = settle(start, lambda: world)
    assert outcome.incident.state is S.RECOVERED


def test_a_death_while_verifying_is_relaunched() -> None:
    dead = trains()
    dead = replace(dead, ranks=(killed(dead.ranks[0]), dead.ranks[1]))
    outcome = step(planned(S.VERIFYING), situation(OLD, dead, verdict=verdict(caught_up=False)), NOW)
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 1)


def test_a_death_that_comes_with_the_last_proof_is_not_called_recovered() -> None:
    dead = trains()
    dead = replace(dead, ranks=(killed(dead.ranks[0]), dead.ranks[1]))
    outcome = step(planned(S.VERIFYING), situation(OLD, dead, verdict=verdict()), NOW)
    assert outcome.incident.state is S.STOPPING


def test_case_R41_exit_code_0_before_the_last_step_is_a_failure() -> None:
    early = trains()
    early = replace(early, ranks=(exited(early.ranks[0], code=0), early.ranks[1]))
    outcome = step(planned(S.VERIFYING), situation(OLD, early, verdict=verdict()), NOW)
    assert outcome.incident.state is S.STOPPING
    assert "exited with code 0 before its last step" in words(outcome)


def test_broken_continuity_rolls_back_once_to_before_the_parent() -> None:
    seen = verdict(VerdictKind.BROKEN)
    outcome = step(planned(S.VERIFYING), situation(OLD, trains(), verdict=seen), NOW)
    assert outcome.incident.state is S.STOPPING
    assert (outcome.incident.rollbacks, outcome.incident.roll_back_before) == (1, 40)
    assert outcome.instructions == (
        MarkContinuityBroken(job="job-1", generation=2),
        StopGeneration(job="job-1", generation=2),
    )
    broken = fenced(trains(broken_continuity=True))
    again = settle(outcome.incident, lambda: situation(OLD, broken))
    assert again.incident.plan is not None
    assert again.incident.plan.parent == CheckpointRef(generation=1, step=20)


def test_broken_continuity_after_the_roll_back_pages_with_a_receipt_and_stops_the_job() -> None:
    start = planned(S.VERIFYING, rollbacks=1, roll_back_before=60)
    outcome = step(start, situation(OLD, trains(), verdict=verdict(VerdictKind.BROKEN)), NOW)
    assert outcome.incident.state is S.ESCALATED
    assert kinds(outcome) == [MarkContinuityBroken, StopGeneration, IssueReceipt, PageOperator]


def test_broken_continuity_without_an_older_checkpoint_pages_at_once() -> None:
    world = situation(OLD, trains(), verdict=verdict(VerdictKind.BROKEN), checkpoints=(PARENT,))
    assert step(planned(S.VERIFYING), world, NOW).incident.state is S.ESCALATED


def test_verifying_past_its_deadline_ends_by_what_is_proven() -> None:
    world = situation(OLD, trains(), verdict=verdict(VerdictKind.STATE_EQUAL, caught_up=False))
    assert step(planned(S.VERIFYING), world, NOW + 901).incident.state is S.RECOVERED
    unproven = replace(world, verdict=verdict(VerdictKind.INCONCLUSIVE, caught_up=False))
    assert step(planned(S.VERIFYING), unproven, NOW + 901).incident.state is S.ESCALATED


# --- Operators ---

OPEN_STATES = sorted(set(S) - ENDS)


def world_of(state: IncidentState) -> tuple[Incident, Situation]:
    """An incident in that state and the world that fits it."""
    match state:
        case S.DETECTED | S.AWAITING_APPROVAL:
            return incident(state), situation()
        case S.STOPPING:
            return planned(state), situation(stopping(lost_rank_1()), preparing(PLAN))
        case S.PLACING:
            return planned(state), situation(OLD, preparing(PLAN))
        case S.WAITING_FOR_CAPACITY:
            return incident(state), situation(OLD, fleet=fleet(node("gpu-01")))
        case S.WAITING_FOR_CHECKPOINT:
            return incident(state), situation(OLD, checkpoints=())
        case S.LAUNCHING:
            return planned(state), situation(OLD, running())
        case S.VERIFYING:
            return planned(state), situation(OLD, trains())
        case _:
            escalation = "why" if state is S.ESCALATED else ""
            return planned(state, deadline_at=None, escalation=escalation), situation(
                stopping(lost_rank_1()), prepared(PLAN)
            )


@pytest.mark.parametrize("state", OPEN_STATES)
@pytest.mark.parametrize("command", sorted(Command))
def test_every_command_in_every_state_is_obeyed_or_ignored_within_the_table(
    state: IncidentState, command: Command
) -> None:
    start, world = world_of(state)
    outcome = step(start, replace(world, command=command), NOW)
    after = outcome.incident.state
    assert after is state or after in TRANSITIONS[state]
    expected = {
        Command.PAUSE: S.PAUSED if state not in (S.PAUSED, S.ESCALATED) else state,
        Command.RESUME: S.STOPPING if state is S.PAUSED else state,
        Command.RETRY: S.STOPPING if state in (S.PAUSED, S.ESCALATED) else state,
        Command.CLOSE: S.CLOSED_BY_OPERATOR,
    }
    assert after is expected[command]
    assert RunPlan not in kinds(outcome)


def test_pause_while_detected_does_not_lose_the_cause() -> None:
    paused = step(incident(), replace(situation(), command=Command.PAUSE), NOW)
    assert paused.incident.state is S.PAUSED
    assert paused.incident.cause is not None
    assert "killed by signal 9" in words(paused)
    resumed = step(paused.incident, replace(situation(), command=Command.RESUME), NOW)
    stops = step(resumed.incident, situation(), NOW)
    assert stops.instructions == (StopGeneration(job="job-1", generation=1),)


def test_paused_orders_nothing_until_it_is_resumed() -> None:
    start = planned(S.PAUSED)
    assert waits(step(start, situation(OLD, prepared(PLAN)), NOW), start)


def test_resume_takes_up_a_launch_that_went_on_without_a_second_order() -> None:
    start = planned(S.PAUSED, run_ordered_at=NOW - 5)
    outcome = step(start, replace(situation(OLD, trains()), command=Command.RESUME), NOW)
    later = settle(outcome.incident, lambda: situation(OLD, trains(), verdict=verdict()))
    assert later.incident.state is S.RECOVERED
    assert later.incident.run_ordered_at == NOW - 5
    assert later.incident.reached_step == 50


def test_resume_finds_that_the_new_generation_died_meanwhile() -> None:
    dead = trains()
    dead = replace(dead, ranks=(killed(dead.ranks[0]), dead.ranks[1]))
    start = step(planned(S.PAUSED), replace(situation(OLD, dead), command=Command.RESUME), NOW).incident
    seen = [start.state]
    while (after := step(start, situation(OLD, dead), NOW).incident).state is not start.state:
        start = after
        seen.append(start.state)
    assert seen == [S.STOPPING, S.PLACING, S.LAUNCHING, S.STOPPING]


def test_retry_begins_anew_with_fresh_budgets_and_stops_everything() -> None:
    start = planned(
        S.ESCALATED, attempt=3, plans_made=5, excluded_nodes=("gpu-02",), avoided_nodes=("gpu-01",), escalation="why"
    )
    outcome = step(start, replace(situation(OLD, trains()), command=Command.RETRY), NOW)
    after = outcome.incident
    assert (after.state, after.attempt, after.plans_made, after.plan, after.escalation) == (S.STOPPING, 0, 0, None, "")
    assert (after.excluded_nodes, after.avoided_nodes) == ((), ())
    assert outcome.instructions == (StopGeneration(job="job-1", generation=2),)


def test_retry_of_a_generation_that_is_proven_broken_marks_it_first() -> None:
    world = situation(OLD, trains(), verdict=verdict(VerdictKind.BROKEN), command=Command.RETRY)
    outcome = step(planned(S.PAUSED), world, NOW)
    assert kinds(outcome) == [MarkContinuityBroken, StopGeneration]


def test_close_leaves_a_job_that_trains_running() -> None:
    outcome = step(planned(S.VERIFYING), situation(OLD, trains(), command=Command.CLOSE), NOW)
    assert outcome.incident.state is S.CLOSED_BY_OPERATOR
    assert outcome.instructions == (
        MarkJob(job="job-1", state=JobState.RUNNING),
        ReleaseNodes(job="job-1", keep=("gpu-01", "gpu-02")),
    )


@pytest.mark.parametrize("view", [running(), replace(trains(), ranks=(killed(trains().ranks[0]),)), prepared(PLAN)])
def test_close_stops_a_job_that_does_not_train(view: GenerationView) -> None:
    state = S.LAUNCHING if view.run_ordered else S.PLACING
    outcome = step(planned(state), situation(OLD, view, command=Command.CLOSE), NOW)
    assert StopGeneration(job="job-1", generation=2) in outcome.instructions
    mark = only(outcome, MarkJob)
    assert isinstance(mark, MarkJob)
    assert mark.state is JobState.STOPPING


def test_close_never_leaves_a_job_running_whose_continuity_is_broken() -> None:
    world = situation(OLD, trains(), verdict=verdict(VerdictKind.BROKEN), command=Command.CLOSE)
    outcome = step(planned(S.VERIFYING), world, NOW)
    assert kinds(outcome) == [MarkContinuityBroken, StopGeneration, MarkJob]


# --- The job is stopped meanwhile ---


@pytest.mark.parametrize("state", OPEN_STATES)
def test_stop_wanted_ends_as_cancelled_only_after_everything_is_proven_gone(state: IncidentState) -> None:
    start, world = world_of(state)
    wanted = replace(world, job=job(stop_wanted=True))
    first = step(start, wanted, NOW)
    assert first.incident.state is state
    assert RunPlan not in kinds(first)
    assert MarkJob(job="job-1", state=JobState.STOPPING) in first.instructions
    still = tuple(stopping(g) for g in wanted.generations)
    stopped = replace(wanted, job=job(stop_wanted=True, state=JobState.STOPPING), generations=still)
    if not all(g.fenced for g in still):
        assert waits(step(first.incident, stopped, NOW), first.incident)
    gone = replace(stopped, generations=tuple(fenced(g) for g in still))
    last = step(first.incident, gone, NOW)
    assert last.incident.state is S.CANCELLED
    cause = first.incident.cause
    reason = f"Stopped on request during recovery: {cause.sentence}" if cause else ""
    assert last.instructions == (
        MarkJob(job="job-1", state=JobState.STOPPED, reason=reason),
        ReleaseNodes(job="job-1"),
    )


def test_stop_wanted_while_detected_still_tells_what_broke_once() -> None:
    outcome = step(incident(), situation(job=job(stop_wanted=True)), NOW)
    assert "killed by signal 9" in words(outcome)
    assert outcome.incident.cause is not None
    again = step(
        outcome.incident, situation(stopping(lost_rank_1()), job=job(stop_wanted=True, state=JobState.STOPPING)), NOW
    )
    assert again.entries == ()


def test_stop_that_is_never_proven_pages_at_the_deadline() -> None:
    wanted = job(stop_wanted=True, state=JobState.STOPPING)
    start = incident(S.STOPPING, cause=step(incident(), situation(), NOW).incident.cause)
    outcome = step(start, situation(stopping(lost_rank_1()), job=wanted), NOW + 61)
    assert outcome.incident.state is S.WAITING_FOR_FENCE
    assert kinds(outcome) == [PageOperator]


def test_stop_wins_over_a_command() -> None:
    world = situation(OLD, prepared(PLAN), job=job(stop_wanted=True), command=Command.RETRY)
    outcome = step(planned(S.ESCALATED, deadline_at=None, escalation="why"), world, NOW)
    assert kinds(outcome) == [StopGeneration, MarkJob]


# --- Always ---


@pytest.mark.parametrize("state", sorted(ENDS))
def test_an_ended_incident_does_nothing_whatever_comes_late(state: IncidentState) -> None:
    over = planned(state, deadline_at=NOW - 1)
    for command in (None, *Command):
        assert waits(step(over, situation(lost_rank_1(), trains(), command=command), NOW), over)


@pytest.mark.parametrize("state", OPEN_STATES)
def test_the_same_look_twice_gives_the_same_outcome(state: IncidentState) -> None:
    start, world = world_of(state)
    assert step(start, world, NOW) == step(start, world, NOW)


def test_escalated_waits_for_a_human_and_does_not_page_again() -> None:
    start = planned(S.ESCALATED, deadline_at=None, escalation="why")
    assert waits(step(start, situation(OLD, prepared(PLAN)), NOW + 10_000), start)


def test_a_step_that_kills_its_workers_goes_to_a_human() -> None:
    outcome = escalate_poisoned(planned(S.PLACING), situation(OLD, prepared(PLAN)), NOW, attempts=5)
    assert outcome.incident.state is S.ESCALATED
    assert "killed its worker 5 times" in outcome.incident.escalation
    assert kinds(outcome) == [PageOperator]


def test_paused_escalates_after_its_deadline() -> None:
    start = planned(S.PAUSED)
    assert step(start, situation(OLD, prepared(PLAN)), NOW + 86_401).incident.state is S.ESCALATED


def test_the_whole_line_from_fault_to_receipt() -> None:
    story = []
    current = incident()
    views = [
        situation(lost_rank_1()),
        situation(stopping(lost_rank_1())),
        situation(OLD, prepared(PLAN)),
        situation(OLD, prepared(PLAN)),
        situation(OLD, trains()),
        situation(OLD, trains(), verdict=verdict()),
    ]
    for view in views:
        made = current.plan
        if made is not None:
            view = replace(
                view, generations=tuple(replace(g, plan=made) if g.number == 2 else g for g in view.generations)
            )
        current = step(current, view, NOW).incident
        story.append(current.state)
    assert story == [S.STOPPING, S.STOPPING, S.PLACING, S.LAUNCHING, S.VERIFYING, S.RECOVERED]
    assert CHECKPOINTS[-1] == current.plan.parent if current.plan else False
    assert AssignmentPhase.RUN is trains().wanted


# --- Late words ---


def test_page_for_want_of_a_proof_is_taken_back_when_the_proof_comes() -> None:
    unproven = stopping(lost_rank_1())
    waiting = incident(S.STOPPING, cause=None)
    paged = step(waiting, situation(unproven), waiting.deadline_at or NOW).incident
    while paged.state is not S.WAITING_FOR_FENCE:
        paged = step(replace(paged, deadline_at=NOW), situation(unproven), NOW).incident
    assert step(paged, situation(unproven), NOW).incident == paged
    outcome = step(paged, situation(OLD), NOW)
    assert (outcome.incident.state, outcome.incident.escalation) == (S.STOPPING, "")


def test_page_for_another_reason_stays_when_everything_is_fenced() -> None:
    paged = incident(S.ESCALATED, deadline_at=None, escalation="why")
    assert step(paged, situation(OLD), NOW) == Outcome(incident=paged)


def test_echo_that_was_heard_first_is_corrected_once_every_node_has_told() -> None:
    base = generation(1)
    echo = exited(base.ranks[0], code=1, at=NOW - 0.4, detail="Connection closed by peer")
    heard = step(incident(), situation(replace(base, ranks=(echo, base.ranks[1]))), NOW).incident
    assert heard.cause is not None
    assert heard.cause.rank == 0
    world = situation(fenced(replace(base, ranks=(echo, killed(base.ranks[1])))))
    outcome = step(replace(heard, plan=None), world, NOW)
    while outcome.incident.state is S.STOPPING:
        outcome = step(outcome.incident, world, NOW)
    assert outcome.incident.cause is not None
    assert (outcome.incident.cause.rank, outcome.incident.cause.kind) == (1, CauseKind.RANK_KILLED)
    assert "On a second look" in outcome.entries[0].text


def test_receipt_quotes_the_fences_of_its_own_incident_only() -> None:
    long_gone = fenced(generation(1))
    broken = replace(lost_rank_1(), plan=plan(2, parent=PARENT))
    third = generation(3, of=plan(3, parent=PARENT))
    start = incident(S.VERIFYING, broken_generation=2, plan=third.plan, cause=None)
    outcome = step(start, situation(long_gone, fenced(broken), third, verdict=verdict(caught_up=True)), NOW)
    (receipt,) = [i.receipt for i in outcome.instructions if isinstance(i, IssueReceipt)]
    assert len(receipt.fences) == len(broken.plan.nodes)
    assert receipt.attempts == 1
