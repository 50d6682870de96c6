"""Proofs of stop as rows: who may bring which, what they end, and what they do not end."""

from __future__ import annotations

import time

import pytest

from agents.protocol.messages import AGENT_PROOFS, AssignmentPhase, AssignmentReport, ProofKind, SeenPhase, StopProof
from recovery import jobs, queries
from recovery.models import CheckpointRow, GenerationRow, IncidentRow, Job, Node, ShareRow, StepRow, TimelineEntry
from recovery.orders import order_for
from recovery.proofs import fence_node
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC, advance, run_generation

pytestmark = [pytest.mark.django_db, pytest.mark.job_trains]


def say_stopped(fleet: ToldFleet, name: str, kind: ProofKind, *, boot: str = "") -> None:
    row = GenerationRow.objects.get(number=1)
    proof = StopProof(kind=kind, at=time.time(), evidence="said so")
    fleet.nodes[name].tell(
        AssignmentReport(
            job=fleet.job, generation=1, plan_id=row.plan_id, phase=SeenPhase.STOPPED, at=time.time(), proof=proof,
            boot_id=boot or f"boot-{name}",
        )
    )  # fmt: skip


def share(name: str) -> ShareRow:
    return ShareRow.objects.get(generation__number=1, node__name=name)


def kind_of(name: str) -> str | None:
    proof = share(name).proof
    return proof and proof["kind"]


def told(fleet: ToldFleet, name: str) -> dict[int, AssignmentPhase]:
    return {one.generation: one.phase for one in order_for(fleet.nodes[name].row.pk).assignments}


def fence(fleet: ToldFleet, name: str, kind: ProofKind = ProofKind.ATTESTATION) -> None:
    fence_node(fleet.nodes[name].row, kind=kind, at=time.time() - 0.5, evidence="a person said so")


def texts() -> list[str]:
    return list(TimelineEntry.objects.order_by("seq").values_list("text", flat=True))


@pytest.fixture
def broken(fleet: ToldFleet, job: Job) -> ToldFleet:
    """gpu-02 is silent; the rank on gpu-01 died of it, and everything of generation 1 is to be stopped."""
    fleet.fall_silent("gpu-02", for_s=12)
    fleet.die("gpu-01", 1, 0, signal=None, exit_code=1, detail="Connection closed by peer [10.0.0.2]:4711")
    advance(job)
    assert IncidentRow.objects.get().state == "stopping"
    return fleet


# --- Whose word --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(set(ProofKind) - AGENT_PROOFS))
def test_agent_cannot_bring_a_proof_that_only_the_server_can_find(broken: ToldFleet, kind: ProofKind) -> None:
    say_stopped(broken, "gpu-01", kind)
    assert (kind_of("gpu-01"), share("gpu-01").confirmed_at) == (None, None)
    assert told(broken, "gpu-01")[1] is AssignmentPhase.STOP


@pytest.mark.parametrize("kind", [ProofKind.CGROUP_EMPTY, ProofKind.PROC_SCAN_EMPTY, ProofKind.BOOT_CHANGED])
def test_agents_own_proof_ends_its_order_to_stop(broken: ToldFleet, kind: ProofKind) -> None:
    say_stopped(broken, "gpu-01", kind)
    assert kind_of("gpu-01") == kind.value
    assert 1 not in told(broken, "gpu-01")


def test_first_proof_stays_and_the_agents_own_word_confirms_it(broken: ToldFleet) -> None:
    fence(broken, "gpu-02")
    fence(broken, "gpu-02", ProofKind.PROVIDER)
    assert kind_of("gpu-02") == "attestation"
    assert share("gpu-02").confirmed_at is None
    broken.connect("gpu-02", boot="boot-later")
    say_stopped(broken, "gpu-02", ProofKind.BOOT_CHANGED)
    assert (kind_of("gpu-02"), share("gpu-02").confirmed_at is not None) == ("attestation", True)


# --- What a proof does not end -----------------------------------------------------------------------------------


def test_fenced_node_is_told_to_stop_and_takes_nothing_until_its_own_agent_has_proven_it(
    broken: ToldFleet, job: Job
) -> None:
    say_stopped(broken, "gpu-01", ProofKind.CGROUP_EMPTY)
    fence(broken, "gpu-02")
    advance(job)
    row = run_generation(broken, job, 2)
    assert row.plan["nodes"] == ["gpu-01", "gpu-03"]
    assert {(one["node"], one["kind"], one["generation"]) for one in row.plan["fences"]} == {
        ("gpu-01", "cgroup_empty", 1),
        ("gpu-02", "attestation", 1),
    }
    broken.connect("gpu-02", boot="boot-later")
    broken.beat()
    assert told(broken, "gpu-02") == {1: AssignmentPhase.STOP}
    other = jobs.submit_job({**SPEC, "nodes": 1}, owner="tests")
    advance(other)
    other.refresh_from_db()
    assert "gpu-02 (its agent has not said yet that generation 1" in other.reason
    say_stopped(broken, "gpu-02", ProofKind.PROC_SCAN_EMPTY, boot="boot-later")
    assert told(broken, "gpu-02") == {}
    Node.objects.filter(name="gpu-02").update(claimed_by=None)  # as at the end of the incident
    advance(other)
    assert GenerationRow.objects.get(job=other).plan["nodes"] == ["gpu-02"]


def test_step_after_a_fence_is_ignored_and_told(broken: ToldFleet, job: Job) -> None:
    fence(broken, "gpu-02")
    before = StepRow.objects.count()
    broken.train("gpu-02", 1, 1, range(31, 33))
    assert StepRow.objects.count() == before
    assert queries.get_job(job.id).last_step == 30
    said = [text for text in texts() if text.startswith("After generation 1 was fenced on gpu-02")]
    assert said and "rank 1 made step" in said[0]


def test_step_from_before_the_fence_that_comes_late_is_kept(broken: ToldFleet) -> None:
    row = broken.nodes["gpu-02"].row
    fence_node(row, kind=ProofKind.ATTESTATION, at=time.time() + 5, evidence="as if the report had been under way")
    broken.train("gpu-02", 1, 1, range(31, 33))
    assert StepRow.objects.filter(rank=1, step=32).exists()
    assert not any("After generation 1" in text for text in texts())


def test_checkpoint_after_a_fence_is_kept_apart_and_never_resumed_from(broken: ToldFleet, job: Job) -> None:
    fence(broken, "gpu-02")
    broken.save("gpu-02", 1, 29)
    assert CheckpointRow.objects.get(step=29).after_fence
    assert any("the checkpoint of step 29 was written; it is never resumed from" in text for text in texts())
    seen = queries.get_job(job.id)
    assert (seen.last_checkpoint_step, seen.last_checkpoint and seen.last_checkpoint.step) == (20, 20)
    assert {one.step: one.after_fence for one in queries.job_checkpoints(job.id)} == {29: True, 20: False}
    say_stopped(broken, "gpu-01", ProofKind.CGROUP_EMPTY)
    advance(job)
    assert run_generation(broken, job, 2).plan["parent"] == {"generation": 1, "step": 20}


def test_agents_own_proof_makes_no_step_late(broken: ToldFleet) -> None:
    """What it reports of before it stopped comes after its proof only by the clock."""
    say_stopped(broken, "gpu-01", ProofKind.CGROUP_EMPTY)
    broken.train("gpu-01", 1, 0, range(31, 33))
    assert StepRow.objects.filter(rank=0, step=32).exists()


# --- Boots --------------------------------------------------------------------------------------------------------


def test_other_boot_fences_what_ran_before_it(broken: ToldFleet) -> None:
    ShareRow.objects.filter(node__name="gpu-02").update(boot_id="boot-gpu-02")
    broken.connect("gpu-02", boot="boot-later")
    proof = share("gpu-02").proof
    assert proof["kind"] == "boot_changed"
    assert proof["evidence"] == "it ran in boot boot-gpu-02; the node is in boot boot-later now"
    assert told(broken, "gpu-02")[1] is AssignmentPhase.STOP, "its agent has still to say so"


def test_same_boot_and_a_boot_that_nobody_knows_fence_nothing(broken: ToldFleet) -> None:
    ShareRow.objects.filter(node__name="gpu-02").update(boot_id="boot-gpu-02")
    broken.connect("gpu-02")
    assert kind_of("gpu-02") is None
    ShareRow.objects.filter(node__name="gpu-02").update(boot_id="")
    broken.connect("gpu-02", boot="boot-later")
    assert kind_of("gpu-02") is None


def test_what_is_stuck_in_the_kernel_is_proof_for_others_and_quarantines_the_node_until_it_reboots(
    broken: ToldFleet, job: Job
) -> None:
    fence(broken, "gpu-02")
    say_stopped(broken, "gpu-01", ProofKind.UNKILLABLE)
    assert (kind_of("gpu-01"), share("gpu-01").confirmed_at) == ("unkillable", None)
    node = queries.get_node("gpu-01")
    assert (node.state.value, node.quarantine_reason) == (
        "unhealthy",
        "processes of generation 1 are stuck in its kernel",
    )
    assert told(broken, "gpu-01")[1] is AssignmentPhase.STOP
    advance(job)
    assert IncidentRow.objects.get().state == "waiting_for_capacity"
    broken.connect("gpu-01")
    assert queries.get_node("gpu-01").quarantine_reason != "", "it is still in the same boot"
    broken.connect("gpu-01", boot="boot-later")
    broken.beat()
    assert queries.get_node("gpu-01").quarantine_reason == ""
    say_stopped(broken, "gpu-01", ProofKind.BOOT_CHANGED, boot="boot-later")
    advance(job)
    assert GenerationRow.objects.latest("number").plan["nodes"] == ["gpu-01", "gpu-03"]


def test_attestation_of_one_node_proves_nothing_of_another(broken: ToldFleet, job: Job) -> None:
    fence(broken, "gpu-02")
    advance(job)
    assert (kind_of("gpu-01"), IncidentRow.objects.get().state) == (None, "stopping")
    assert not Node.objects.exclude(quarantined_boot_id="").exists()
