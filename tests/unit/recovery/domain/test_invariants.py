"""Each rule is broken once on purpose: a check that cannot fail is a defect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from domain_scenes import (
    CHECKPOINTS,
    NOW,
    PARENT,
    POLICY,
    ended_well,
    fenced,
    fleet,
    generation,
    incident,
    leased,
    lost_rank_1,
    node,
    plan,
    prepared,
    proven,
    stopping,
    training,
    verdict,
)

from recovery.domain.fleet import NodeHealth
from recovery.domain.generations import FenceProof, GenerationView, ProofKind
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import Instruction, JobState, PreparePlan, RecordProof, RunPlan
from recovery.domain.invariants import (
    IncidentHistory,
    JobHistory,
    LivingRank,
    Violation,
    violations_among_living,
    violations_of_job,
    violations_of_step,
)
from recovery.domain.plan import CheckpointRef
from recovery.domain.receipt import Receipt

S = IncidentState
HELD = fleet(node("gpu-01", claimed_by="job-1"), node("gpu-02", claimed_by="job-1"), node("gpu-03"))
GONE = fenced(lost_rank_1())
RUN = RunPlan(job="job-1", generation=2, master_port=1, fences=GONE.proofs)


def rules(found: Sequence[Violation]) -> set[str]:
    assert all(violation.sentence.endswith(".") for violation in found)
    return {violation.rule for violation in found}


def of_job(*generations: GenerationView, state: JobState = JobState.RUNNING, **changes: Any) -> set[str]:
    snapshot = changes.pop("fleet", HELD)
    history = JobHistory(job="job-1", state=state, generations=generations, **changes)
    return rules(violations_of_job(history, fleet=snapshot, policy=POLICY))


def of_step(instruction: Instruction, *generations: GenerationView, **changes: Any) -> set[str]:
    base = {"job": "job-1", "checkpoints": CHECKPOINTS, "fleet": HELD, "instructions": [instruction], "sane_steps": 10}
    return rules(violations_of_step(generations=generations, **{**base, **changes}))


def told(state: IncidentState, **changes: Any) -> IncidentHistory:
    beside = {name: changes.pop(name) for name in ("states", "receipt", "opened_after_end") if name in changes}
    return IncidentHistory(incident=incident(state, **changes), states=beside.pop("states", (state,)), **beside)


def receipt() -> Receipt:
    return Receipt(
        incident="inc-1", job="job-1", state="recovered", verdict=verdict(), cause=None, drill=None,
        broken_generation=1, generation=2, old_nodes=(), new_nodes=(), parent=PARENT, reached_step=50, detect_s=0.1,
        stop_s=0.2, launch_s=0.3, first_step_s=1.0, caught_up_s=2.0, total_s=2.1, attempts=1, fences=(), issued_at=NOW,
    )  # fmt: skip


def test_a_sound_history_breaks_no_rule() -> None:
    recovered = told(
        S.RECOVERED,
        states=(S.DETECTED, S.STOPPING, S.PLACING, S.LAUNCHING, S.VERIFYING, S.RECOVERED),
        receipt=receipt(),
    )
    assert of_job(GONE, generation(2, of=plan(2, parent=PARENT)), incidents=(recovered,)) == set()
    assert (
        of_step(
            RUN,
            GONE,
            prepared(plan(2, parent=PARENT)),
        )
        == set()
    )
    assert of_step(PreparePlan(plan=plan(2, parent=PARENT)), GONE) == set()


def test_finds_two_generations_alive() -> None:
    both = [LivingRank(job="job-1", generation=g, node="gpu-01", rank=0) for g in (1, 2)]
    assert rules(violations_among_living(both)) == {"one-generation-alive"}
    assert violations_among_living(both[:1]) == ()


def test_finds_two_jobs_on_one_node() -> None:
    both = [LivingRank(job=job, generation=1, node="gpu-01", rank=0) for job in ("job-1", "job-2")]
    assert rules(violations_among_living(both)) == {"one-job-per-node"}


def test_finds_a_run_before_the_older_generation_is_fenced() -> None:
    assert "fenced-before-run" in of_job(stopping(lost_rank_1()), generation(2, of=plan(2)))
    assert of_step(RUN, stopping(lost_rank_1()), prepared(plan(2, parent=PARENT))) == {"fenced-before-run"}


def test_finds_a_run_of_what_was_not_prepared() -> None:
    assert of_step(RUN, GONE) == {"run-what-was-prepared"}
    assert of_step(RUN, GONE, stopping(prepared(plan(2, parent=PARENT)))) == {"run-what-was-prepared"}


def test_finds_numbers_that_do_not_rise() -> None:
    assert "numbers-rise" in of_job(GONE, GONE)
    assert "numbers-rise" in of_step(PreparePlan(plan=plan(1, parent=PARENT)), GONE)
    assert "numbers-rise" in of_job(GONE, incidents=(told(S.PLACING, plan=plan(1)),))


def test_finds_a_claim_that_was_given_up_too_early() -> None:
    assert of_job(generation(1), fleet=fleet()) == {"claimed-while-in-use"}
    taken = fleet(node("gpu-01", claimed_by="job-1"), node("gpu-02", claimed_by="job-2"))
    assert of_job(generation(1), fleet=taken) == {"claimed-while-in-use"}
    assert of_job(fenced(generation(1)), fleet=fleet()) == set()


def test_finds_a_parent_that_cannot_be_older() -> None:
    assert "parent-is-older" in of_job(generation(2, of=plan(2, parent=CheckpointRef(generation=2, step=1))))


def test_finds_a_success_that_is_none() -> None:
    base = fenced(generation(1))
    assert "success-is-proven" in of_job(base, state=JobState.SUCCEEDED)
    assert "success-is-proven" in of_job(state=JobState.SUCCEEDED)
    well = replace(base, ranks=tuple(ended_well(rank) for rank in base.ranks))
    assert of_job(well, state=JobState.SUCCEEDED) == set()


@pytest.mark.parametrize("state", [JobState.STOPPED, JobState.FAILED])
def test_finds_an_ended_job_that_still_wants_ranks(state: JobState) -> None:
    assert "ended-jobs-want-nothing" in of_job(generation(1), state=state)


@pytest.mark.parametrize(
    ("history", "rule"),
    [
        (told(S.LAUNCHING, states=(S.DETECTED, S.LAUNCHING)), "transitions-hold"),
        (told(S.PLACING, deadline_at=None), "open-means-deadline"),
        (told(S.ESCALATED), "escalation-has-a-reason"),
        (told(S.RECOVERED), "recovered-has-a-receipt"),
        (told(S.DETECTED, opened_after_end=True), "normal-end-is-no-incident"),
        (told(S.PLACING, attempt=4), "budgets-hold"),
        (told(S.PLACING, plans_made=13), "budgets-hold"),
        (told(S.PLACING, rollbacks=2), "budgets-hold"),
    ],
)
def test_finds_an_incident_that_breaks_a_rule(history: IncidentHistory, rule: str) -> None:
    assert of_job(GONE, incidents=(history,)) == {rule}


def test_finds_two_open_incidents_of_one_job() -> None:
    assert of_job(GONE, incidents=(told(S.PLACING), told(S.STOPPING))) == {"one-open-incident"}


@pytest.mark.parametrize(
    "change",
    [
        {"health": NodeHealth.UNKNOWN},
        {"health": NodeHealth.UNHEALTHY},
        {"cordoned": True},
        {"claimed_by": "job-2"},
        {"slots": 0},
    ],
)
def test_finds_a_placement_on_a_node_that_may_not_be_used(change: dict[str, Any]) -> None:
    world = fleet(node("gpu-01"), node("gpu-02", **change))
    assert of_step(PreparePlan(plan=plan(2, parent=PARENT)), GONE, fleet=world) == {"placement"}


def test_finds_a_placement_on_a_node_that_never_joined_or_twice_on_one() -> None:
    assert of_step(PreparePlan(plan=plan(2, parent=PARENT)), GONE, fleet=fleet(node("gpu-01"))) == {"placement"}
    twice = plan(2, parent=PARENT, nodes=("gpu-01", "gpu-01"))
    assert of_step(PreparePlan(plan=twice), GONE) == {"placement"}


def test_finds_a_silent_start_from_the_beginning() -> None:
    assert of_step(PreparePlan(plan=plan(2)), GONE) == {"no-silent-start"}
    assert of_step(RUN, GONE, prepared(plan(2))) == {"no-silent-start"}
    assert of_step(PreparePlan(plan=plan(2)), replace(GONE, ranks=())) == set()


def test_finds_a_parent_that_was_never_complete() -> None:
    lost = plan(2, parent=CheckpointRef(generation=1, step=41))
    assert of_step(PreparePlan(plan=lost), GONE) == {"parent-is-complete"}


def test_finds_a_parent_off_the_lineage() -> None:
    second = fenced(generation(2, of=plan(2, parent=CheckpointRef(generation=1, step=20))))
    assert of_step(PreparePlan(plan=plan(3, parent=PARENT)), GONE, second) == {"parent-is-on-the-lineage"}
    assert of_step(PreparePlan(plan=plan(3, parent=CheckpointRef(generation=1, step=20))), GONE, second) == set()


def test_finds_a_parent_that_descends_from_a_broken_generation() -> None:
    broken = fenced(generation(2, of=plan(2, parent=PARENT), broken_continuity=True))
    saved = CheckpointRef(generation=2, step=60)
    resumed = PreparePlan(plan=plan(3, parent=saved))
    assert "parent-is-trusted" in of_step(resumed, GONE, broken, checkpoints=(*CHECKPOINTS, saved))


def test_finds_a_parent_whose_ranks_had_not_restored_a_part() -> None:
    made = plan(2, parent=PARENT)
    forgot = replace(training(0, of=made), saved_digest={"optimizer": "a"}, live_digest={"optimizer": "b"})
    second = fenced(generation(2, of=made, ranks=(forgot, training(1, of=made))))
    saved = CheckpointRef(generation=2, step=60)
    found = of_step(PreparePlan(plan=plan(3, parent=saved)), GONE, second, checkpoints=(*CHECKPOINTS, saved))
    assert found == {"parent-is-trusted"}


def test_finds_a_plan_for_another_job() -> None:
    assert of_step(PreparePlan(plan=replace(plan(2, parent=PARENT), job="job-2")), GONE) >= {"own-job-only"}


# --- Fences ---


def lease_word(node_name: str = "gpu-02", *, kind: ProofKind = ProofKind.LEASE_EXPIRED) -> RecordProof:
    made = FenceProof(node=node_name, kind=kind, at=NOW, evidence="time", generation=1)
    return RecordProof(job="job-1", generation=1, proof=made)


def test_finds_an_order_to_run_that_names_no_proof_for_a_node() -> None:
    run = replace(RUN, fences=GONE.proofs[:1])
    assert of_step(run, GONE, prepared(plan(2, parent=PARENT))) == {"run-stands-on-proofs"}


def test_a_first_launch_stands_on_nothing() -> None:
    assert of_step(RunPlan(job="job-1", generation=1, master_port=1), prepared(plan(1))) == set()


def test_finds_a_lease_that_is_believed_without_a_stopped_peer() -> None:
    assert of_step(lease_word(), stopping(leased(1))) == {"lease-needs-a-stopped-peer"}
    for kind in (ProofKind.NEVER_STARTED, ProofKind.LEASE_EXPIRED):
        only = proven(stopping(leased(1)), "gpu-01", at=NOW, kind=kind)
        assert of_step(lease_word(), only) == {"lease-needs-a-stopped-peer"}
    assert of_step(lease_word(), proven(stopping(leased(1)), "gpu-01", at=NOW)) == set()


def test_finds_a_lease_that_nobody_keeps() -> None:
    stopped = proven(stopping(generation(1)), "gpu-01", at=NOW)
    assert of_step(lease_word(), stopped) == {"lease-is-kept"}
    assert of_step(lease_word("gpu-09"), stopped) == {"lease-is-kept"}


def test_other_proofs_need_no_lease() -> None:
    assert of_step(lease_word(kind=ProofKind.ATTESTATION), stopping(generation(1))) == set()


def test_a_generation_that_was_found_running_stood_on_proofs_that_are_lost() -> None:
    found = generation(2, of=plan(2, parent=CheckpointRef(generation=9, step=3)))
    assert of_job(stopping(lost_rank_1()), found, adopted=frozenset({2})) == set()
    assert "fenced-before-run" in of_job(stopping(lost_rank_1()), found)


@pytest.mark.parametrize("state", [S.ESCALATED, S.WAITING_FOR_FENCE])
def test_finds_an_incident_that_waits_for_a_human_without_a_reason(state: IncidentState) -> None:
    assert "escalation-has-a-reason" in of_job(lost_rank_1(), incidents=(told(state, escalation=""),))
    assert "escalation-has-a-reason" not in of_job(lost_rank_1(), incidents=(told(state, escalation="why"),))


@pytest.mark.parametrize(
    ("lost_at", "step", "found"), [(48, 40, True), (51, 40, False), (40, 40, True), (48, 20, False)]
)
def test_what_was_loaded_soon_before_the_loss_was_lost_or_saved_after_it_is_never_loaded(
    lost_at: int, step: int, found: bool
) -> None:
    first = fenced(generation(1))
    second = fenced(generation(2, of=plan(2, parent=PARENT)))
    ranks = tuple(replace(rank, nonfinite_since=lost_at, nonfinite_count=3) for rank in second.ranks)
    lines = (first, replace(second, ranks=ranks))
    parent = CheckpointRef(generation=1, step=step)
    broken = of_step(PreparePlan(plan=plan(3, parent=parent)), *lines)
    assert ("tainted-is-never-loaded" in broken) is found
    own = CheckpointRef(generation=2, step=lost_at)
    assert "tainted-is-never-loaded" in of_step(PreparePlan(plan=plan(3, parent=own)), *lines)
