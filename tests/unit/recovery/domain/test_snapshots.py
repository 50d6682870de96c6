"""What nodes hold in memory, and when a plan goes on from it."""

from __future__ import annotations

from dataclasses import replace

from domain_scenes import CHECKPOINTS, PARENT, fenced, fleet, generation, incident, job, lost, node, situation

from recovery.domain.generations import GenerationView
from recovery.domain.incident import IncidentState
from recovery.domain.instructions import JobState
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.planning import is_stale, make_plan, parent_words
from recovery.domain.situation import Situation
from recovery.domain.snapshots import SnapshotPart, newest_whole
from recovery.domain.trust import UNKNOWN, Health, Trust, appraise

NEWER = CheckpointRef(generation=1, step=44)


def part(rank: int, node_name: str, *, ref: CheckpointRef = NEWER, boot_id: str | None = None) -> SnapshotPart:
    boot = node(node_name).boot_id if boot_id is None else boot_id
    return SnapshotPart(ref=ref, world_size=2, rank=rank, node=node_name, boot_id=boot)


BOTH = (part(0, "gpu-01"), part(1, "gpu-02"))
COPIED = (*BOTH, part(1, "gpu-01"), part(0, "gpu-02"))
FLEET = fleet(node("gpu-01"), node("gpu-02"), node("gpu-03"))


def held(*parts: SnapshotPart, nodes: tuple[str, ...] = ("gpu-01", "gpu-02")) -> CheckpointRef | None:
    return newest_whole(parts, nodes=nodes, fleet=FLEET)


def test_snapshot_is_whole_where_the_nodes_hold_every_part() -> None:
    assert held(*BOTH) == NEWER
    assert held(BOTH[0]) is None
    assert held(*BOTH, nodes=("gpu-01", "gpu-03")) is None
    assert held(*COPIED, nodes=("gpu-01", "gpu-03")) == NEWER


def test_newest_whole_one_is_taken_and_not_one_that_is_half_there() -> None:
    assert held(*BOTH, part(0, "gpu-01", ref=replace(NEWER, step=48))) == NEWER


def test_boot_since_then_means_that_it_is_gone() -> None:
    assert held(BOTH[0], part(1, "gpu-02", boot_id="another boot")) is None


def world(*parts: SnapshotPart, of: GenerationView | None = None, without: str = "") -> Situation:
    nodes = [lost(name) if name == without else node(name) for name in ("gpu-01", "gpu-02", "gpu-03")]
    generations = (of or fenced(generation(1)),)
    known: dict[CheckpointRef, Trust] = dict.fromkeys((*CHECKPOINTS, *(one.ref for one in parts)), UNKNOWN)
    return situation(
        *generations,
        fleet=fleet(*nodes),
        job=job(state=JobState.RECOVERING),
        snapshots=parts,
        trust=appraise(known, generations),
    )


def planned(there: Situation) -> RecoveryPlan:
    made = make_plan(incident(IncidentState.PLACING), there)
    assert isinstance(made, RecoveryPlan)
    return made


def test_plan_goes_on_from_a_snapshot_that_is_newer_than_the_disk() -> None:
    plan = planned(world(*BOTH))
    assert (plan.parent, plan.parent_in_memory) == (NEWER, True)
    assert "held in the memory of its nodes" in plan.parent_reason
    assert parent_words(plan) == "step 44 of generation 1, in memory"
    assert not is_stale(plan, incident(IncidentState.PLACING, plan=plan), world(*BOTH))


def test_plan_without_a_node_that_alone_held_a_part_goes_on_from_disk() -> None:
    plan = planned(world(*BOTH, without="gpu-02"))
    assert (plan.nodes, plan.parent, plan.parent_in_memory) == (("gpu-01", "gpu-03"), PARENT, False)


def test_plan_without_a_node_goes_on_from_its_partners_copy() -> None:
    plan = planned(world(*COPIED, without="gpu-02"))
    assert (plan.nodes, plan.parent, plan.parent_in_memory) == (("gpu-01", "gpu-03"), NEWER, True)


def test_snapshot_that_is_older_than_the_disk_is_no_reason() -> None:
    old = CheckpointRef(generation=1, step=36)
    plan = planned(world(part(0, "gpu-01", ref=old), part(1, "gpu-02", ref=old)))
    assert (plan.parent, plan.parent_in_memory) == (PARENT, False)


def test_snapshot_off_the_lineage_is_no_reason() -> None:
    ghost = CheckpointRef(generation=7, step=99)
    plan = planned(world(part(0, "gpu-01", ref=ghost), part(1, "gpu-02", ref=ghost)))
    assert plan.parent == PARENT


def test_snapshot_that_holds_a_lost_loss_is_tainted_like_one_on_disk() -> None:
    whole = fenced(generation(1))
    sick = replace(whole, ranks=tuple(replace(rank, nonfinite_since=42, nonfinite_count=3) for rank in whole.ranks))
    there = world(*BOTH, of=sick)
    assert there.trust[NEWER].health is Health.TAINTED
    plan = planned(there)
    assert (plan.parent, plan.parent_in_memory) == (PARENT, False)
