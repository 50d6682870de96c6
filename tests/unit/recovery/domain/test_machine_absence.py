"""The incident machine when nodes fall silent: what it does, what it leaves alone, and what it waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import (
    ECHO,
    NOW,
    PARENT,
    POLICY,
    TERMS,
    at_step,
    exited,
    fenced,
    fleet,
    generation,
    incident,
    job,
    killed,
    leased,
    lost,
    node,
    plan,
    prepared,
    preparing,
    proven,
    situation,
    stopping,
)

from recovery.domain.detection import find_fault
from recovery.domain.fences import LEASE_SLACK_S, PROOF_WORDS
from recovery.domain.fleet import FleetSnapshot, NodeView
from recovery.domain.generations import AssignmentPhase, GenerationView, ProofKind, SeenPhase
from recovery.domain.incident import CauseKind, Incident, IncidentState
from recovery.domain.instructions import (
    Instruction,
    JobState,
    MarkJob,
    PageOperator,
    PreparePlan,
    RecordProof,
    RunPlan,
    StopGeneration,
)
from recovery.domain.lease import DRIFT, MARGIN_S
from recovery.domain.machine import step
from recovery.domain.moves import Outcome
from recovery.domain.silence import Contact
from recovery.domain.situation import Command, Situation
from recovery.domain.timeline import EntryKind
from recovery.domain.witnesses import ProbeView

S = IncidentState
GONE = fleet(node("gpu-01"), lost("gpu-02"), node("gpu-03"))
LONGEST = 30.0 * (1 + DRIFT) + MARGIN_S
PLAN = plan(2, nodes=("gpu-01", "gpu-03"), parent=PARENT)


def kinds(outcome: Outcome) -> list[type[Instruction]]:
    return [type(instruction) for instruction in outcome.instructions]


def words(outcome: Outcome) -> str:
    return " ".join(entry.text for entry in outcome.entries)


def opened(world: Situation, *, now: float = NOW) -> Incident:
    """The incident that the look at a job opens; there must be one."""
    fault = find_fault(replace(world, job=replace(world.job, state=JobState.RUNNING)), now)
    assert fault is not None
    return incident(broken_generation=fault.generation, opened_at=now, fault_at=now if fault.at is None else fault.at)


def no_fault(world: Situation, *, state: JobState = JobState.RUNNING) -> bool:
    return find_fault(replace(world, job=replace(world.job, state=state)), NOW) is None


# --- A node is lost ---


def test_peers_that_died_and_a_silent_node_stop_the_job_for_the_node_not_for_the_peers() -> None:
    view = leased()
    view = replace(view, ranks=(exited(view.ranks[0], code=1, detail=ECHO), view.ranks[1]))
    outcome = step(incident(), situation(view, fleet=GONE), NOW)
    assert outcome.incident.state is S.STOPPING
    assert outcome.incident.cause is not None
    assert (outcome.incident.cause.kind, outcome.incident.cause.node) == (CauseKind.NODE_LOST, "gpu-02")
    assert outcome.incident.cause.cascade == (0,)


def test_peers_that_stall_and_a_silent_node_open_an_incident_at_the_last_word_and_stop_the_survivors() -> None:
    world = situation(leased(ago_s=9), fleet=GONE)
    start = opened(world)
    assert start.fault_at == NOW - 12
    outcome = step(start, world, NOW)
    assert (outcome.incident.state, kinds(outcome)) == (S.STOPPING, [StopGeneration])
    assert "gpu-02 is gone: gpu-02 has been silent for 12 s and the ranks on the other nodes" in words(outcome)


def test_a_silent_node_whose_peers_step_on_is_no_fault_for_minutes_or_ever() -> None:
    for silent_s in (12, 300, 86_400):
        away = fleet(node("gpu-01"), lost("gpu-02", heard_at=NOW - silent_s), node("gpu-03"))
        assert no_fault(situation(leased(ago_s=0.4), fleet=away))


def test_an_incident_whose_node_is_back_before_it_was_looked_at_is_a_false_alarm() -> None:
    start = opened(situation(leased(ago_s=9), fleet=GONE))
    outcome = step(start, situation(leased(ago_s=0.2)), NOW + 1)
    assert outcome.incident.state is S.FALSE_ALARM
    assert outcome.instructions == (MarkJob(job="job-1", state=JobState.RUNNING),)


def test_the_survivors_alone_prove_nothing_of_the_lost_node_which_needs_a_fence_of_its_own() -> None:
    view = proven(stopping(leased(ago_s=9)), "gpu-01", at=NOW)
    first = step(incident(S.STOPPING), situation(view, fleet=GONE), NOW)
    assert kinds(first) == [PreparePlan]  # the plan is made while the lease runs out, without the lost node
    assert first.incident.plan is not None
    assert first.incident.plan.nodes == ("gpu-01", "gpu-03")
    again = step(first.incident, situation(view, preparing(first.incident.plan), fleet=GONE), NOW)
    assert again == Outcome(incident=first.incident)


def lease_world(now: float, **silent: object) -> Situation:
    view = proven(stopping(leased(ago_s=9)), "gpu-01", at=NOW)
    away = lost("gpu-02", **{"observed_until": now, **silent})  # type: ignore[arg-type]
    return situation(view, preparing(PLAN), fleet=fleet(node("gpu-01"), away, node("gpu-03")))


def test_a_lease_that_has_run_out_is_recorded_as_the_proof_and_recovery_goes_on() -> None:
    start = incident(S.STOPPING, plan=PLAN, reached_step=50)
    over = NOW + LONGEST + 0.1
    outcome = step(start, lease_world(over), over)
    (recorded,) = outcome.instructions
    assert isinstance(recorded, RecordProof)
    assert recorded.proof.kind is ProofKind.LEASE_EXPIRED
    kept = proven(lease_world(over).generations[0], "gpu-02", at=recorded.proof.at, kind=ProofKind.LEASE_EXPIRED)
    after = step(outcome.incident, replace(lease_world(over), generations=(kept, preparing(PLAN))), over)
    assert after.incident.state is S.PLACING
    assert PROOF_WORDS[ProofKind.LEASE_EXPIRED] in words(after)
    launched = step(after.incident, replace(lease_world(over), generations=(kept, prepared(PLAN))), over)
    (run,) = [one for one in launched.instructions if isinstance(one, RunPlan)]
    assert [(proof.node, proof.kind) for proof in run.fences] == [
        ("gpu-01", ProofKind.CGROUP_EMPTY),
        ("gpu-02", ProofKind.LEASE_EXPIRED),
    ]


def test_an_overdue_stop_waits_for_a_lease_that_still_runs_and_pages_nobody() -> None:
    start = incident(S.STOPPING, plan=PLAN, deadline_at=NOW + 5)
    outcome = step(start, lease_world(NOW + 6), NOW + 6)
    assert (outcome.incident.state, outcome.instructions) == (S.STOPPING, ())
    assert outcome.incident.deadline_at == pytest.approx(NOW + LONGEST + LEASE_SLACK_S)


def test_an_overdue_stop_without_a_lease_waits_for_a_fence_and_pages() -> None:
    start = incident(S.STOPPING, plan=PLAN, deadline_at=NOW + 5)
    outcome = step(start, lease_world(NOW + 6, heard_at_most=None), NOW + 6)
    assert (outcome.incident.state, kinds(outcome)) == (S.WAITING_FOR_FENCE, [PageOperator])
    assert "gone from gpu-02" in outcome.incident.escalation
    assert "gpu-01" not in outcome.incident.escalation


def test_a_lease_of_a_setup_is_waited_for_but_a_human_is_told_at_once() -> None:
    start = incident(S.STOPPING, plan=PLAN, deadline_at=NOW + 5)
    world = lease_world(NOW + 6)
    young = tuple(replace(rank, resumed_step=49) for rank in world.generations[0].ranks)
    view = replace(world.generations[0], ranks=young)
    outcome = step(start, replace(world, generations=(view, preparing(PLAN))), NOW + 6)
    assert (outcome.incident.state, kinds(outcome)) == (S.WAITING_FOR_FENCE, [PageOperator])
    over = NOW + TERMS.compile_s * (1 + DRIFT) + MARGIN_S + 1
    later = replace(lease_world(over), generations=(view, preparing(PLAN)))
    assert kinds(step(outcome.incident, later, over)) == [RecordProof]


def test_a_node_in_contact_that_cannot_stop_pages_at_the_deadline_whatever_its_lease() -> None:
    view = proven(stopping(leased(ago_s=9)), "gpu-01", at=NOW)
    start = incident(S.STOPPING, plan=PLAN, deadline_at=NOW)
    outcome = step(start, situation(view, preparing(PLAN)), NOW + 1)
    assert (outcome.incident.state, kinds(outcome)) == (S.WAITING_FOR_FENCE, [PageOperator])


def test_waiting_for_a_fence_pages_again_each_hour_and_never_gives_up() -> None:
    current = incident(S.WAITING_FOR_FENCE, plan=PLAN, escalation="No proof.")
    world = lease_world(NOW, heard_at_most=None)
    for hour in (1, 2, 30):
        at = (current.deadline_at or 0.0) + 1
        outcome = step(current, world, at)
        assert (outcome.incident.state, kinds(outcome)) == (S.WAITING_FOR_FENCE, [PageOperator])
        assert outcome.entries[0].kind is EntryKind.PAGE
        assert f"for {hour if hour < 3 else 3}" in words(outcome)
        assert outcome.incident.deadline_at == at + POLICY.deadlines_s[S.WAITING_FOR_FENCE]
        assert step(outcome.incident, world, at) == Outcome(incident=outcome.incident)
        current = outcome.incident


@pytest.mark.parametrize(
    "kind", [ProofKind.ATTESTATION, ProofKind.PROVIDER, ProofKind.BOOT_CHANGED, ProofKind.CGROUP_EMPTY]
)
def test_any_proof_that_comes_while_waiting_lets_recovery_go_on(kind: ProofKind) -> None:
    start = incident(S.WAITING_FOR_FENCE, plan=PLAN, escalation="No proof.")
    old = proven(lease_world(NOW).generations[0], "gpu-02", at=NOW, kind=kind)
    outcome = step(start, replace(lease_world(NOW), generations=(old, preparing(PLAN))), NOW)
    assert (outcome.incident.state, outcome.incident.escalation) == (S.STOPPING, "")
    assert step(
        outcome.incident, replace(lease_world(NOW), generations=(old, preparing(PLAN))), NOW
    ).incident.state is (S.PLACING)


def test_a_lease_proof_alone_never_comes_while_a_second_node_is_unproven_and_in_contact() -> None:
    three = plan(1, nodes=("gpu-01", "gpu-02", "gpu-03"))
    view = stopping(leased(1, of=three, ago_s=9))
    over = NOW + 500
    snapshot = fleet(node("gpu-01"), lost("gpu-02", observed_until=over), node("gpu-03"))
    assert kinds(step(incident(S.STOPPING), situation(view, fleet=snapshot), over)) != [RecordProof]


def test_an_echo_that_opened_the_incident_before_the_silence_is_corrected_to_the_lost_node() -> None:
    base = leased()
    echo = exited(base.ranks[0], code=1, at=NOW - 11, detail=ECHO)
    heard = step(incident(opened_at=NOW - 11), situation(replace(base, ranks=(echo, base.ranks[1]))), NOW - 11).incident
    assert heard.cause is not None
    assert heard.cause.kind is CauseKind.RANK_FAILED
    old = fenced(replace(base, ranks=(echo, replace(base.ranks[1], exited_at=NOW, detail="gone without a report"))))
    outcome = step(heard, situation(old, fleet=GONE), NOW)
    assert outcome.incident.state is S.PLACING
    assert outcome.incident.cause is not None
    assert (outcome.incident.cause.kind, outcome.incident.cause.node) == (CauseKind.NODE_LOST, "gpu-02")
    assert "On a second look" in words(outcome)
    assert (heard.fault_at, outcome.incident.fault_at) == (NOW - 1, NOW - 12)  # it was gone before its peer died of it


def test_survivors_that_our_own_stop_killed_do_not_become_the_cause_of_a_lost_node() -> None:
    world = situation(leased(ago_s=9), fleet=GONE)
    stopped = step(opened(world), world, NOW).incident
    base = leased(ago_s=9)
    own_work = killed(base.ranks[0], at=NOW + 0.4)
    gone = replace(base.ranks[1], exited_at=NOW + 35, detail="gone without a report")
    old = fenced(replace(base, ranks=(own_work, gone)), at=NOW + 35)
    outcome = step(stopped, situation(old, fleet=GONE), NOW + 35)
    assert outcome.incident.state is S.PLACING
    assert outcome.incident.cause == stopped.cause


def test_the_lost_node_tells_later_what_killed_its_rank_before_and_that_becomes_the_cause() -> None:
    world = situation(leased(ago_s=9), fleet=GONE)
    stopped = step(opened(world), world, NOW).incident
    base = leased(ago_s=9)
    old = fenced(replace(base, ranks=(base.ranks[0], killed(base.ranks[1], signal=11, at=NOW - 11.5))), at=NOW + 20)
    outcome = step(stopped, situation(old), NOW + 20)
    assert outcome.incident.cause is not None
    assert (outcome.incident.cause.kind, outcome.incident.cause.rank) == (CauseKind.RANK_KILLED, 1)


# --- None of a job's nodes can be seen ---


def alone() -> GenerationView:
    return leased(1, of=plan(1, nodes=("gpu-01",)))


def silent_world(*, silent_s: float = 31.0, view: GenerationView | None = None, **changes: object) -> Situation:
    snapshot = fleet(lost("gpu-01", heard_at=NOW - silent_s), node("gpu-02"), node("gpu-03"))
    return situation(view or alone(), **{"fleet": snapshot, "job": job(node_count=1), **changes})  # type: ignore[arg-type]


def waiting_for_word() -> Incident:
    world = silent_world()
    return step(opened(world), world, NOW).incident


def test_a_single_node_job_that_went_silent_is_shown_paged_and_not_stopped() -> None:
    assert no_fault(silent_world(silent_s=29.0))
    world = silent_world()
    outcome = step(opened(world), world, NOW)
    assert (outcome.incident.state, kinds(outcome)) == (S.WAITING_FOR_FENCE, [PageOperator])
    assert outcome.incident.cause is not None
    assert outcome.incident.cause.kind is CauseKind.NODE_SILENT
    assert not outcome.incident.stop_ordered
    assert "no other node that could tell" in words(outcome)
    assert outcome.incident.deadline_at == NOW + POLICY.deadlines_s[S.WAITING_FOR_FENCE]


def test_a_silent_single_node_job_is_never_relaunched_by_time_alone() -> None:
    current, world = waiting_for_word(), silent_world()
    for hours in (1, 10, 100):
        outcome = step(current, world, NOW + hours * 3600)
        assert outcome.incident.state is S.WAITING_FOR_FENCE
        assert set(kinds(outcome)) <= {PageOperator}
        current = outcome.incident


def test_a_job_that_comes_back_and_has_trained_on_is_a_false_alarm_that_stopped_nothing() -> None:
    on = replace(alone(), ranks=(at_step(alone().ranks[0], ago_s=0.3),))
    outcome = step(waiting_for_word(), situation(on, job=job(node_count=1)), NOW)
    assert outcome.incident.state is S.FALSE_ALARM
    assert outcome.instructions == (MarkJob(job="job-1", state=JobState.RUNNING),)
    assert outcome.incident.escalation == ""


def test_a_job_that_comes_back_without_a_step_since_is_waited_for() -> None:
    idle = replace(alone(), ranks=(at_step(alone().ranks[0], ago_s=40),))
    start = waiting_for_word()
    assert step(start, situation(idle, job=job(node_count=1)), NOW) == Outcome(incident=start)


def test_what_it_did_before_it_died_in_silence_does_not_make_it_healthy() -> None:
    start = replace(waiting_for_word(), fault_at=NOW - 300)
    stale = replace(alone(), ranks=(replace(at_step(alone().ranks[0], ago_s=200), progress_seen_at=NOW),))
    assert step(start, situation(stale, job=job(node_count=1)), NOW) == Outcome(incident=start)


def test_one_node_of_many_that_is_back_and_steps_vouches_for_all() -> None:
    two = replace(leased(), ranks=tuple(at_step(rank, ago_s=0.3) for rank in leased().ranks))
    start = incident(S.WAITING_FOR_FENCE, stop_ordered=False, fault_at=NOW - 40)
    outcome = step(start, situation(two, fleet=GONE), NOW)
    assert outcome.incident.state is S.FALSE_ALARM
    assert words(outcome).startswith("gpu-01 can be seen again")


def test_one_node_of_many_that_is_back_and_stalls_is_the_second_witness_against_the_others() -> None:
    start = incident(S.WAITING_FOR_FENCE, stop_ordered=False, fault_at=NOW - 40)
    outcome = step(start, situation(leased(ago_s=45), fleet=GONE), NOW)
    assert (outcome.incident.state, kinds(outcome)) == (S.STOPPING, [StopGeneration])
    assert outcome.incident.cause is not None
    assert outcome.incident.cause.kind is CauseKind.NODE_LOST


@pytest.mark.parametrize("kind", [ProofKind.ATTESTATION, ProofKind.PROVIDER, ProofKind.BOOT_CHANGED])
def test_a_proof_lets_a_silent_job_be_recovered_and_its_story_is_kept(kind: ProofKind) -> None:
    view = proven(alone(), "gpu-01", at=NOW, kind=kind)
    gone = replace(view.ranks[0], exited_at=NOW, detail="gone without a report")
    start = waiting_for_word()
    outcome = step(start, silent_world(view=replace(view, ranks=(gone,))), NOW)
    assert (outcome.incident.state, kinds(outcome)) == (S.STOPPING, [StopGeneration])
    assert outcome.incident.cause == start.cause
    assert "proven gone" in words(outcome)


def test_what_the_returned_agent_saw_itself_becomes_the_cause() -> None:
    dead = replace(alone(), ranks=(killed(alone().ranks[0], at=NOW - 20),))
    outcome = step(waiting_for_word(), situation(dead, job=job(node_count=1)), NOW)
    assert (outcome.incident.state, kinds(outcome)) == (S.STOPPING, [StopGeneration])
    assert outcome.incident.cause is not None
    assert outcome.incident.cause.kind is CauseKind.RANK_KILLED


def test_a_runner_that_the_returned_agent_finds_gone_becomes_the_cause() -> None:
    dead = replace(alone(), shares=(replace(alone().shares[0], seen=SeenPhase.STOPPED, reason="runner"),))
    outcome = step(waiting_for_word(), situation(dead, job=job(node_count=1)), NOW)
    assert outcome.incident.cause is not None
    assert outcome.incident.cause.kind is CauseKind.RUNNER_LOST


def test_a_silent_node_whose_peer_had_done_its_last_step_is_proven_by_its_lease() -> None:
    base = leased(ago_s=38.5)
    done = replace(base.ranks[0], finished_step=50, exited_at=NOW - 40, exit_code=0)
    view = replace(base, ranks=(done, base.ranks[1]))
    snapshot = fleet(node("gpu-01"), lost("gpu-02", heard_at=NOW - 38), node("gpu-03"))
    world = situation(view, fleet=snapshot)
    paged = step(opened(world), world, NOW).incident
    assert paged.state is S.WAITING_FOR_FENCE
    assert kinds(step(paged, world, NOW)) == [RecordProof]


def test_the_owner_can_stop_a_silent_job_and_the_incident_ends_once_it_is_proven_gone() -> None:
    start, wanted = waiting_for_word(), job(node_count=1, stop_wanted=True)
    asked = step(start, silent_world(job=wanted), NOW)
    assert kinds(asked) == [StopGeneration, MarkJob]
    stopped = replace(wanted, state=JobState.STOPPING)
    view = stopping(alone())
    assert step(asked.incident, silent_world(view=view, job=stopped), NOW) == Outcome(incident=asked.incident)
    gone = proven(view, "gpu-01", at=NOW, kind=ProofKind.ATTESTATION)
    assert step(asked.incident, silent_world(view=gone, job=stopped), NOW).incident.state is S.CANCELLED


# --- Operators ---


@pytest.mark.parametrize("kind", [CauseKind.NODE_SILENT, CauseKind.NODE_LOST])
def test_resuming_a_pause_stops_nothing_that_can_be_seen_to_train(kind: CauseKind) -> None:
    world = silent_world() if kind is CauseKind.NODE_SILENT else situation(leased(ago_s=9), fleet=GONE)
    paused = step(opened(world), replace(world, command=Command.PAUSE), NOW).incident
    assert (paused.state, paused.cause and paused.cause.kind) == (S.PAUSED, kind)
    healthy = situation(leased() if kind is CauseKind.NODE_LOST else alone(), command=Command.RESUME)
    resumed = step(paused, healthy, NOW)
    assert (resumed.incident.state, resumed.instructions) == (S.DETECTED, ())
    assert step(resumed.incident, replace(healthy, command=None), NOW).incident.state is S.FALSE_ALARM


def test_resuming_a_pause_of_a_silent_job_waits_for_a_fence_as_before() -> None:
    world = silent_world()
    paused = step(opened(world), replace(world, command=Command.PAUSE), NOW).incident
    resumed = step(paused, replace(world, command=Command.RESUME), NOW).incident
    assert step(resumed, world, NOW).incident.state is S.WAITING_FOR_FENCE


# --- The breaker ---


def crowd(silent: int, count: int = 20, **changes: object) -> FleetSnapshot:
    nodes = [lost(f"gpu-{n:02d}") if n <= silent else node(f"gpu-{n:02d}") for n in range(1, count + 1)]
    return FleetSnapshot(nodes=tuple(nodes), **changes)  # type: ignore[arg-type]


def test_all_agents_cut_at_once_stop_no_job_and_open_no_incident_against_one() -> None:
    for number in range(1, 21, 2):
        pair = leased(1, of=plan(1, nodes=(f"gpu-{number:02d}", f"gpu-{number + 1:02d}")), ago_s=60)
        assert no_fault(situation(pair, fleet=crowd(20)))
        assert no_fault(situation(pair, fleet=crowd(20, breaker_open=True)))


def test_a_breaker_that_opens_before_the_first_look_makes_a_false_alarm_not_a_stop() -> None:
    start = opened(situation(leased(ago_s=9), fleet=GONE))
    outcome = step(start, situation(leased(ago_s=9), fleet=replace(GONE, breaker_open=True)), NOW)
    assert outcome.incident.state is S.FALSE_ALARM
    assert StopGeneration not in kinds(outcome)


def test_an_open_breaker_does_not_hide_what_a_live_agent_says_itself() -> None:
    view = leased()
    dead = replace(view, ranks=(killed(view.ranks[0]), view.ranks[1]))
    outcome = step(incident(), situation(dead, fleet=replace(GONE, breaker_open=True)), NOW)
    assert outcome.incident.state is S.STOPPING


def test_three_unrelated_deaths_among_twenty_are_all_acted_on() -> None:
    dead = ("gpu-01", "gpu-05", "gpu-09")
    nodes = [lost(f"gpu-{n:02d}") if f"gpu-{n:02d}" in dead else node(f"gpu-{n:02d}") for n in range(1, 21)]
    snapshot = FleetSnapshot(nodes=tuple(nodes))
    for name in dead:
        partner = f"gpu-{int(name[-2:]) + 1:02d}"
        world = situation(leased(1, of=plan(1, nodes=(name, partner)), ago_s=9), fleet=snapshot)
        outcome = step(opened(world), world, NOW)
        assert outcome.incident.state is S.STOPPING
        assert outcome.incident.cause is not None
        assert outcome.incident.cause.node == name


# --- The new generation loses a node ---


def launched(**changes: object) -> GenerationView:
    return replace(leased(2, of=PLAN), **changes)  # type: ignore[arg-type]


def after_loss(view: GenerationView, state: IncidentState, **changes: object) -> Outcome:
    start = incident(state, plan=PLAN, plans_made=1, attempt=1, reached_step=50)
    snapshot = fleet(node("gpu-01"), node("gpu-02"), lost("gpu-03"), node("gpu-04"))
    world = situation(fenced(leased(1)), view, fleet=snapshot, **changes)
    return step(start, world, NOW)


@pytest.mark.parametrize("state", [S.LAUNCHING, S.VERIFYING])
def test_a_node_that_goes_missing_from_the_new_generation_costs_no_attempt_and_is_avoided(
    state: IncidentState,
) -> None:
    outcome = after_loss(launched(ranks=tuple(at_step(rank, ago_s=9) for rank in launched().ranks)), state)
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 1)
    assert outcome.incident.avoided_nodes == ("gpu-03",)
    assert kinds(outcome) == [StopGeneration]


@pytest.mark.parametrize("state", [S.LAUNCHING, S.VERIFYING])
def test_a_silent_node_of_a_new_generation_that_steps_is_left_alone(state: IncidentState) -> None:
    outcome = after_loss(launched(), state)
    assert StopGeneration not in kinds(outcome)


def test_a_probe_finds_a_node_that_dies_while_its_peers_still_set_up() -> None:
    probe = ProbeView(node="gpu-03", prober="gpu-02", asked_at=NOW - 2, reachable=False)
    assert kinds(after_loss(launched(ranks=()), S.LAUNCHING)) == []
    outcome = after_loss(launched(ranks=()), S.LAUNCHING, probes=(probe,))
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 1)


def overdue(snapshot: FleetSnapshot, view: GenerationView | None = None) -> Outcome:
    start = incident(S.LAUNCHING, plan=PLAN, plans_made=1, state_since=NOW - 181, deadline_at=NOW - 1)
    return step(start, situation(fenced(leased(1)), view or launched(ranks=()), fleet=snapshot), NOW)


def test_an_overdue_launch_is_taken_from_a_lost_node_that_its_peers_wait_for() -> None:
    outcome = overdue(fleet(node("gpu-01"), lost("gpu-03"), node("gpu-04")))
    assert (outcome.incident.state, outcome.incident.attempt) == (S.STOPPING, 0)
    assert outcome.incident.avoided_nodes == ("gpu-03",)


@pytest.mark.parametrize(
    "snapshot",
    [
        fleet(lost("gpu-01"), lost("gpu-03")),
        replace(fleet(node("gpu-01"), lost("gpu-03")), breaker_open=True),
        fleet(node("gpu-01"), lost("gpu-03", contact=Contact.UNOBSERVED)),
    ],
)
def test_an_overdue_launch_that_cannot_be_seen_is_waited_for_once_and_then_paged(snapshot: FleetSnapshot) -> None:
    outcome = overdue(snapshot)
    assert (outcome.incident.state, outcome.instructions) == (S.LAUNCHING, ())
    assert "Nothing is stopped" in words(outcome)
    late = step(outcome.incident, situation(fenced(leased(1)), launched(ranks=()), fleet=snapshot), NOW + 61)
    assert (late.incident.state, kinds(late)) == (S.ESCALATED, [PageOperator])


def test_a_planned_node_that_only_reconnects_is_waited_for_and_not_replaced() -> None:
    shaky = node("gpu-03", health=lost("gpu-03").health, contact=Contact.SUSPECT)
    start = incident(S.PLACING, plan=PLAN, plans_made=1)
    world = situation(fenced(leased(1)), prepared(PLAN), fleet=fleet(node("gpu-01"), shaky))
    assert step(start, world, NOW) == Outcome(incident=start)


# --- The lost node comes back ---


def back(**changes: object) -> NodeView:
    return node("gpu-02", **changes)


def test_node_lost_told_again_after_the_replacement_trains_is_a_no_op() -> None:
    old = proven(proven(stopping(leased(1)), "gpu-01", at=NOW - 60), "gpu-02", at=NOW - 30)
    world = situation(old, launched(), fleet=fleet(node("gpu-01"), lost("gpu-02"), node("gpu-03")))
    for _ in range(3):
        assert no_fault(world)


@pytest.mark.parametrize("why", ["unconfirmed", "quarantined"])
def test_a_node_that_came_back_is_no_spare_before_its_agent_has_proven_itself(why: str) -> None:
    world = situation(
        fenced(leased(1)),
        fleet=fleet(node("gpu-01"), back(**{why: "generation 1 of job-1"})),
    )
    outcome = step(incident(S.PLACING), world, NOW)
    assert outcome.incident.state is S.WAITING_FOR_CAPACITY
    free = replace(world, fleet=fleet(node("gpu-01"), back()))
    assert step(outcome.incident, free, NOW).incident.state is S.PLACING


def test_a_stop_that_is_never_acknowledged_ends_in_a_fence_and_a_relaunch_elsewhere() -> None:
    # The whole story of a dead node: stalled peers, stop, lease, spare.
    world = situation(leased(ago_s=9), fleet=GONE)
    current = step(opened(world), world, NOW).incident
    story = [current.state]
    stopped = proven(stopping(leased(ago_s=9)), "gpu-01", at=NOW + 1)
    now = NOW + 2
    views: tuple[GenerationView, ...] = (stopped,)
    while now < NOW + 60 and current.state is not S.LAUNCHING:
        now += 2
        snapshot = fleet(node("gpu-01"), lost("gpu-02", observed_until=now), node("gpu-03"))
        outcome = step(current, situation(*views, fleet=snapshot), now)
        for wanted in outcome.instructions:
            match wanted:
                case PreparePlan(plan=made):
                    views = (views[0], prepared(made))
                case RecordProof(proof=proof):
                    views = (proven(views[0], "gpu-02", at=proof.at, kind=proof.kind), views[1])
        if outcome.incident.state is not current.state:
            story.append(outcome.incident.state)
        current = outcome.incident
    assert story == [S.STOPPING, S.PLACING, S.LAUNCHING]
    assert now < NOW + 45
    assert current.plan is not None
    assert current.plan.nodes == ("gpu-01", "gpu-03")


# --- Looking at a job ---


def test_a_first_launch_on_a_silent_node_is_told_to_a_human_once_it_is_overdue() -> None:
    launching = job(node_count=1, state=JobState.LAUNCHING, state_since=NOW - 60)
    view = replace(alone(), ranks=())
    assert find_fault(silent_world(view=view, job=launching), NOW) is None
    late = replace(launching, state_since=NOW - 181)
    fault = find_fault(silent_world(view=view, job=late), NOW)
    assert fault is not None
    assert fault.node == "gpu-01"


@pytest.mark.parametrize("wanted", [AssignmentPhase.STOP, AssignmentPhase.PREPARE])
def test_no_absence_is_a_fault_where_nothing_should_run(wanted: AssignmentPhase) -> None:
    assert no_fault(situation(replace(leased(ago_s=60), wanted=wanted), fleet=GONE))


def test_old_deaths_of_a_generation_that_was_replaced_open_nothing() -> None:
    base = leased(1)
    replayed = fenced(replace(base, ranks=(killed(base.ranks[0], at=NOW - 5000), base.ranks[1])))
    assert no_fault(situation(replayed, generation(2, of=PLAN)))


# --- What a node still has to tell ---


def returned(kind: ProofKind, *, at: float = NOW - 1, **changes: object) -> GenerationView:
    """Generation 1 of a single-node job, fenced without its node's own word."""
    view = proven(stopping(alone()), "gpu-01", at=at, kind=kind)
    return replace(view, shares=tuple(replace(part, **changes) for part in view.shares))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", [ProofKind.BOOT_CHANGED, ProofKind.LEASE_EXPIRED, ProofKind.PROVIDER, ProofKind.ATTESTATION]
)
def test_a_node_that_is_back_is_listened_to_before_anything_is_launched_without_it(kind: ProofKind) -> None:
    start = incident(S.STOPPING, plan=PLAN, reached_step=50)
    waiting = step(start, situation(returned(kind), preparing(PLAN), job=job(node_count=1)), NOW)
    assert waiting == Outcome(incident=start)
    told = situation(returned(kind, confirmed=True), preparing(PLAN), job=job(node_count=1))
    assert step(start, told, NOW).incident.state is S.PLACING


@pytest.mark.parametrize("kind", [ProofKind.CGROUP_EMPTY, ProofKind.UNKILLABLE])
def test_a_nodes_own_proof_comes_after_all_that_it_had_to_tell(kind: ProofKind) -> None:
    start = incident(S.STOPPING, plan=PLAN, reached_step=50)
    assert step(start, situation(returned(kind), preparing(PLAN)), NOW).incident.state is S.PLACING


def test_a_node_that_is_away_or_says_nothing_is_not_waited_for() -> None:
    start = incident(S.STOPPING, plan=PLAN, reached_step=50)
    away = silent_world(view=returned(ProofKind.ATTESTATION))
    assert step(start, replace(away, generations=(*away.generations, preparing(PLAN))), NOW).incident.state is S.PLACING
    mute = situation(returned(ProofKind.BOOT_CHANGED, at=NOW - 11), preparing(PLAN))
    assert step(start, mute, NOW).incident.state is S.PLACING


def test_a_plan_that_a_returned_nodes_words_have_overtaken_is_made_anew_before_it_runs() -> None:
    from_the_beginning = plan(2, nodes=("gpu-01", "gpu-03"))
    start = incident(S.PLACING, plan=from_the_beginning, plans_made=1)
    world = situation(fenced(leased(1)), prepared(from_the_beginning))
    outcome = step(start, world, NOW)
    assert outcome.incident.plan is None
    assert kinds(outcome) == [StopGeneration]
    assert "had saved or done more" in words(outcome)


def test_a_generation_that_a_node_says_runs_needs_proof_though_nobody_here_ordered_it_to_run() -> None:
    unknown = leased(1, run_ordered=False)
    assert not unknown.fenced
    assert fenced(unknown).fenced
    assert leased(1, run_ordered=False, shares=prepared(plan(1)).shares).fenced
