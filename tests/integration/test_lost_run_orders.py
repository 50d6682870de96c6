"""A backup may be older than the order to run a generation that it knows, or than the plan that has its number."""

from __future__ import annotations

import time

import pytest

from agents.protocol.messages import (
    Assignment,
    AssignmentPhase,
    AssignmentReport,
    ProofKind,
    RankStarted,
    SeenPhase,
    StopProof,
)
from recovery import queries
from recovery.models import GenerationRow, IncidentRow, Job, ShareRow, StepRow, Stray, TimelineEntry
from recovery.orders import order_for
from recovery.queries import NodeState
from recovery.store.situations import load_fleet, load_generations
from recovery.sweep import sweep
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import advance, running
from tests.integration.test_strays import launch, says_it_runs, wait_60_s, wanted

pytestmark = pytest.mark.django_db

PREPARE, RUN, STOP = AssignmentPhase.PREPARE, AssignmentPhase.RUN, AssignmentPhase.STOP


@pytest.fixture
def prepared(job: Job, fleet: ToldFleet) -> GenerationRow:
    """Generation 2 is being prepared for an incident whose old ranks are not proven gone: so the backup has it."""
    running(fleet, job)
    fleet.die("gpu-02", 1, 1)
    advance(job)
    row = GenerationRow.objects.get(job=job, number=2)
    assert (row.wanted, row.plan["nodes"]) == ("prepare", ["gpu-01", "gpu-02"])
    return row


def first_prepared(job: Job) -> GenerationRow:
    advance(job)
    row = GenerationRow.objects.get(job=job)
    assert (row.wanted, row.plan["nodes"]) == ("prepare", ["gpu-01", "gpu-02"])
    return row


def runs_by(fleet: ToldFleet, name: str, row: GenerationRow, node_rank: int) -> None:
    fleet.report(name, row.number, row.plan_id, SeenPhase.RUNNING, launch=launch(node_rank), boot_id=f"boot-{name}")


def test_launch_that_is_found_running_goes_on_as_if_it_had_been_ordered(job: Job, fleet: ToldFleet) -> None:
    row = first_prepared(job)
    for rank, name in enumerate(row.plan["nodes"]):
        runs_by(fleet, name, row, rank)
        fleet.start(name, 1, rank)
        fleet.train(name, 1, rank, range(1, 5))
    row.refresh_from_db()
    assert (row.wanted, row.adopted, row.master_port, row.lease) == ("run", True, 20002, None)
    assert row.run_ordered_at is not None
    sweep()
    job.refresh_from_db()
    assert job.state == "running"
    fleet.die("gpu-02", 1, 1)
    advance(job)
    assert IncidentRow.objects.get().state == "stopping"


def test_one_node_that_runs_has_the_order_given_to_the_others_again(job: Job, fleet: ToldFleet) -> None:
    row = first_prepared(job)
    fleet.report("gpu-02", 1, row.plan_id, SeenPhase.PREPARED)
    runs_by(fleet, "gpu-01", row, 0)
    assert wanted(fleet, "gpu-02") == {1: RUN}


def test_old_ranks_are_still_proven_gone_and_what_replaced_them_is_not_stopped(
    job: Job, fleet: ToldFleet, prepared: GenerationRow
) -> None:
    for rank, name in enumerate(("gpu-01", "gpu-02")):
        runs_by(fleet, name, prepared, rank)
        fleet.start(name, 2, rank, step=20)
    sweep()
    assert wanted(fleet, "gpu-01") == {1: STOP, 2: RUN}
    assert IncidentRow.objects.get().state == "stopping"
    for name in ("gpu-01", "gpu-02"):
        fleet.report(name, 1, GenerationRow.objects.get(number=1).plan_id, SeenPhase.STOPPED)
    for rank, name in enumerate(("gpu-01", "gpu-02")):
        fleet.train(name, 2, rank, range(21, 33))
    for _ in range(3):
        sweep()
    assert IncidentRow.objects.get().state == "recovered"
    told = TimelineEntry.objects.filter(text__contains="this database never ordered it to run")
    assert [entry.text for entry in told] == [
        "Generation 2 runs on gpu-01, though this database never ordered it to run: it was restored from a backup that "
        "is older. It goes on, and needs a proof of stop from each of its nodes before anything replaces it."
    ]


@pytest.mark.parametrize("word", ["rank", "step", "checkpoint", "stopped"])
def test_any_word_of_ranks_makes_proofs_of_all_nodes_due(
    job: Job, fleet: ToldFleet, prepared: GenerationRow, word: str
) -> None:
    match word:
        case "rank":
            fleet.nodes["gpu-01"].tell(RankStarted(job=job.id, generation=2, rank=0, pid=7, at=time.time()))
        case "step":
            fleet.train("gpu-01", 2, 0, range(21, 22))
        case "checkpoint":
            fleet.save("gpu-01", 2, 40)
        case "stopped":
            fleet.report("gpu-01", 2, prepared.plan_id, SeenPhase.STOPPED)
    prepared.refresh_from_db()
    assert prepared.run_ordered_at is not None
    view = load_generations(job)[-1]
    assert not view.fenced
    assert "gpu-02" in view.unfenced_nodes


def test_preparing_and_never_starting_are_no_word_of_ranks(job: Job, fleet: ToldFleet, prepared: GenerationRow) -> None:
    fleet.report("gpu-01", 2, prepared.plan_id, SeenPhase.PREPARED)
    never = StopProof(kind=ProofKind.NEVER_STARTED, at=time.time(), evidence="no process of it was started here")
    fleet.nodes["gpu-02"].tell(
        AssignmentReport(
            job=job.id, generation=2, plan_id=prepared.plan_id, phase=SeenPhase.STOPPED, at=time.time(), proof=never
        )
    )
    prepared.refresh_from_db()
    assert (prepared.run_ordered_at, prepared.adopted, prepared.wanted) == (None, False, "prepare")


def test_generation_that_is_not_the_newest_is_not_ordered_to_run_again(
    job: Job, fleet: ToldFleet, prepared: GenerationRow
) -> None:
    """An agent knows generation 3: what still runs of generation 2 was left behind by it."""
    Job.objects.filter(pk=job.pk).update(generation=3, behind_since=time.time())
    runs_by(fleet, "gpu-02", prepared, 1)
    prepared.refresh_from_db()
    assert prepared.run_ordered_at is not None
    assert prepared.wanted == "prepare"


def test_lease_of_a_lost_order_proves_nothing(job: Job, fleet: ToldFleet) -> None:
    """The lost database may have raised it since."""
    row = first_prepared(job)
    assert row.lease is not None
    runs_by(fleet, "gpu-01", row, 0)
    fleet.train("gpu-01", 1, 0, range(1, 5))
    assert load_generations(job)[0].lease is None


def test_decision_that_was_made_before_the_word_came_is_not_saved_after_it(
    job: Job, fleet: ToldFleet, prepared: GenerationRow
) -> None:
    before = (Job.objects.get().version, IncidentRow.objects.get().version)
    runs_by(fleet, "gpu-01", prepared, 0)
    after = (Job.objects.get().version, IncidentRow.objects.get().version)
    assert all(new > old for old, new in zip(before, after, strict=True))


# --- Another plan of the same number ------------------------------------------------------------------------------


def test_other_plan_of_a_known_number_is_a_stray_that_is_shown_and_told_to_stop(
    job: Job, fleet: ToldFleet, prepared: GenerationRow
) -> None:
    says_it_runs(fleet, "gpu-02", 1)
    assert Stray.objects.get().plan_id == "plan-2"
    assert ShareRow.objects.get(generation=prepared, node__name="gpu-02").seen == ""
    old = GenerationRow.objects.get(number=1)
    orders = {(one.plan_id, one.phase) for one in order_of(fleet, "gpu-02")}
    assert orders == {(old.plan_id, STOP), (prepared.plan_id, PREPARE), ("plan-2", STOP)}
    node = load_fleet(time.time()).node("gpu-02")
    assert node is not None
    assert node.unconfirmed == f"generation 2 of {job.id}"
    shown = queries.get_node("gpu-02")
    assert shown.state is NodeState.HELD
    assert shown.reason == "Its agent has not said yet that generation 2 of tiny is gone."
    assert [(one.generation, one.proof) for one in shown.unproven] == [(1, None), (2, None)]


def order_of(fleet: ToldFleet, name: str) -> list[Assignment]:
    return list(order_for(fleet.nodes[name].row.pk).assignments)


def test_what_ranks_of_the_other_plan_say_is_not_taken_for_the_known_ones(
    job: Job, fleet: ToldFleet, prepared: GenerationRow
) -> None:
    says_it_runs(fleet, "gpu-02", 1)
    fleet.train("gpu-02", 2, 1, range(21, 30))
    prepared.refresh_from_db()
    assert prepared.run_ordered_at is None
    assert not StepRow.objects.filter(generation_number=2).exists()
    fleet.report("gpu-02", 2, "plan-2", SeenPhase.STOPPED)
    assert not Stray.objects.exists()
    runs_by(fleet, "gpu-02", prepared, 1)
    fleet.train("gpu-02", 2, 1, range(21, 30))
    assert StepRow.objects.filter(generation_number=2).count() == 9


def test_nothing_is_launched_before_the_other_plan_is_gone(job: Job, fleet: ToldFleet, prepared: GenerationRow) -> None:
    says_it_runs(fleet, "gpu-02", 1)
    fleet.report("gpu-02", 2, prepared.plan_id, SeenPhase.REFUSED, reason="older_generation")
    for name in ("gpu-01", "gpu-02"):
        fleet.report(name, 1, GenerationRow.objects.get(number=1).plan_id, SeenPhase.STOPPED)
    for _ in range(3):
        sweep()
    assert GenerationRow.objects.latest("number").number == 2
    wait_60_s(job)
    sweep()
    assert "Waiting for gpu-02 to stop" in Job.objects.get().reason
    fleet.report("gpu-02", 2, "plan-2", SeenPhase.STOPPED)
    for _ in range(4):
        sweep()
    newest = GenerationRow.objects.latest("number")
    assert (newest.number, newest.wanted, newest.plan["nodes"]) == (3, "prepare", ["gpu-01", "gpu-02"])


def test_word_that_the_known_plan_runs_there_ends_the_other(
    job: Job, fleet: ToldFleet, prepared: GenerationRow
) -> None:
    """An agent runs one plan of a number: its last word of the other was lost."""
    says_it_runs(fleet, "gpu-02", 1)
    runs_by(fleet, "gpu-02", prepared, 1)
    assert not Stray.objects.exists()


def test_end_of_a_third_plan_does_not_end_the_other(job: Job, fleet: ToldFleet, prepared: GenerationRow) -> None:
    says_it_runs(fleet, "gpu-02", 1)
    fleet.report("gpu-02", 2, "plan-x", SeenPhase.STOPPED)
    assert Stray.objects.get().plan_id == "plan-2"
