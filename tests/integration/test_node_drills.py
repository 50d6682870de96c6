"""Drills on nodes and on the server, told by a fleet without processes: their guards, their reports and their ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from agents.protocol.messages import FaultKind, FaultReport, FaultState, OutboxGap, SeenPhase
from recovery import absence
from recovery.domain.drill_promises import SETTLE_S, SETTLED_WITHIN_S
from recovery.drill_outcomes import settle_drill
from recovery.drills import trigger_drill
from recovery.errors import DrillRefused
from recovery.models import Claim, Drill, GenerationRow, IncidentRow, Job, Node, Observer, TimelineEntry
from recovery.orders import order_for
from recovery.store.timelines import first_broken_link
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import advance, replay

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.job_trains]


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Iterator[Path]:
    """A home in which a supervisor lives: this process."""
    settings.EVERSTEP_HOME = str(tmp_path)
    (tmp_path / "supervised").write_text(f"{os.getpid()}\n")
    yield tmp_path


def ask(job: Job, kind: str, **more: Any) -> Drill:
    return trigger_drill(kind=kind, job_id=job.id, requested_by="tests", **more)


def report(fleet: ToldFleet, drill: Drill, state: FaultState, *, node: str = "gpu-02", detail: str = "so") -> None:
    fleet.nodes[node].tell(FaultReport(drill=drill.id, state=state, at=time.time(), detail=detail))


def settled(drill: Drill) -> Drill:
    settle_drill(drill.id)
    drill.refresh_from_db()
    return drill


def after_the_undoing(drill: Drill, seconds: float) -> None:
    """Let time pass since the drill's fault was undone."""
    drill.refresh_from_db()
    assert drill.undone_at is not None
    Drill.objects.filter(pk=drill.pk).update(undone_at=time.time() - seconds)


def test_node_drill_is_ordered_of_the_last_ranks_node_with_its_duration(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "freeze-node", steps_after_save=3)
    (fault,) = order_for(fleet.nodes["gpu-02"].row.pk).faults
    assert (fault.kind, fault.rank, fault.duration_s, fault.steps_after_save) == (FaultKind.FREEZE_NODE, 1, 75.0, 3)
    assert order_for(fleet.nodes["gpu-01"].row.pk).faults == []
    assert drill.promise == {"kind": "recovered", "recovered_within_s": 120.0, "continuity": "proven"}
    assert drill.before["last_steps"] == {"0": 30, "1": 30}


@pytest.mark.parametrize(("where", "node", "rank"), [({"node": "gpu-01"}, "gpu-01", 0), ({"rank": 0}, "gpu-01", 0)])
def test_node_is_chosen_by_name_or_by_rank(
    job: Job, fleet: ToldFleet, where: dict[str, Any], node: str, rank: int
) -> None:
    drill = ask(job, "partition", **where)
    assert drill.node is not None
    assert (drill.node.name, drill.rank, drill.duration_s) == (node, rank, 30.0)


@pytest.mark.parametrize(
    ("kind", "more", "guard"),
    [
        ("melt-node", {}, "kind"),
        ("partition", {"node": "gpu-03"}, "node"),
        ("partition", {"node": "gpu-01", "rank": 1}, "rank"),
        ("kill-rank", {"rank": 7}, "rank"),
        ("partition", {"duration_s": 601.0}, "duration"),
        ("server-down", {"node": "gpu-01"}, "target"),
        ("server-down", {}, "supervised"),
    ],
)
def test_guards_refuse_with_their_name(job: Job, fleet: ToldFleet, kind: str, more: dict[str, Any], guard: str) -> None:
    with pytest.raises(DrillRefused) as refused:
        ask(job, kind, **more)
    assert refused.value.guard == guard
    assert not Drill.objects.exists()


def test_open_control_plane_incident_refuses_every_drill(job: Job, fleet: ToldFleet) -> None:
    IncidentRow.objects.create(id="inc_cp", kind="control_plane", state="breaker_open", opened_at=1.0, body={})
    with pytest.raises(DrillRefused, match="inc_cp of the control plane") as refused:
        ask(job, "kill-rank")
    assert refused.value.guard == "open_incident"


def test_partition_that_nobody_noticed_passes_with_its_numbers(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "partition")
    report(fleet, drill, FaultState.ARMED)
    report(fleet, drill, FaultState.APPLIED)
    assert order_for(fleet.nodes["gpu-02"].row.pk).faults == []
    report(fleet, drill, FaultState.UNDONE)
    for rank, name in enumerate(("gpu-01", "gpu-02")):
        fleet.train(name, 1, rank, range(31, 61))
    assert settled(drill).state == "undone"
    after_the_undoing(drill, SETTLE_S + 1)
    assert settled(drill).state == "passed", drill.result
    result = drill.result
    assert (result["steps_lost"], result["events_lost"], result["incidents"]) == (0, 0, 0)
    assert (result["steps_made"], result["incident"]) == (30, None)


def test_partition_fails_for_a_step_that_never_arrives(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "partition")
    report(fleet, drill, FaultState.APPLIED)
    report(fleet, drill, FaultState.UNDONE)
    fleet.train("gpu-01", 1, 0, range(31, 61))
    fleet.train("gpu-02", 1, 1, range(31, 45))
    fleet.train("gpu-02", 1, 1, range(46, 61))
    after_the_undoing(drill, SETTLE_S + 1)
    assert settled(drill).state == "undone"
    after_the_undoing(drill, SETTLED_WITHIN_S + 1)
    assert settled(drill).state == "failed"
    assert drill.result["events_lost"] == 1
    assert drill.result["reasons"] == ["Of rank 1, 1 steps before step 60 never arrived."]


def test_partition_fails_for_messages_that_an_agent_had_to_drop(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "partition")
    report(fleet, drill, FaultState.APPLIED)
    fleet.nodes["gpu-02"].tell(OutboxGap(first_seq=3, last_seq=5, reason="disk full"))
    report(fleet, drill, FaultState.UNDONE)
    for rank, name in enumerate(("gpu-01", "gpu-02")):
        fleet.train(name, 1, rank, range(31, 61))
    after_the_undoing(drill, SETTLE_S + 1)
    assert settled(drill).state == "failed"
    assert drill.result["reasons"] == ["The agent of gpu-02 had to drop messages 1 time."]


def test_partition_fails_for_an_incident_against_the_job(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "partition")
    report(fleet, drill, FaultState.APPLIED)
    fleet.die("gpu-02", 1, 1)
    incident = IncidentRow.objects.get(job=job)
    assert incident.drill_id == drill.id  # the rank is on the node that it cut
    report(fleet, drill, FaultState.UNDONE)
    after_the_undoing(drill, SETTLED_WITHIN_S + 1)
    assert settled(drill).state == "failed"
    assert any("An incident was opened against the job" in reason for reason in drill.result["reasons"])


def test_drill_of_a_frozen_node_is_found_by_its_effect_and_waits_for_the_thaw(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "freeze-node")
    fleet.die("gpu-01", 1, 0, signal=None, exit_code=1)  # it died of its peer's silence, and is heard of first
    advance(job)
    incident = IncidentRow.objects.get(job=job)
    assert incident.drill is None
    assert settled(drill).state == "requested"
    cause = incident.body["cause"] | {"kind": "node_lost", "rank": None, "node": "gpu-02"}
    IncidentRow.objects.update(body={**incident.body, "cause": cause})
    assert settled(drill).state == "applied"
    incident.refresh_from_db()
    assert (incident.drill_id, incident.body["drill"]) == (drill.id, drill.id)
    row = GenerationRow.objects.get(job=job, number=1)
    for name in row.plan["nodes"]:
        fleet.report(name, 1, row.plan_id, SeenPhase.STOPPED)
    advance(job)
    assert replay(fleet, job).state == "recovered"
    assert settled(drill).state == "applied"
    report(fleet, drill, FaultState.APPLIED, detail="SIGSTOP to 5 processes")
    report(fleet, drill, FaultState.UNDONE, detail="SIGCONT to 5 processes.")
    assert settled(drill).state == "passed", drill.result
    assert drill.result["incident"] == incident.pk
    assert drill.result["fence"] == {"gpu-01": "cgroup_empty", "gpu-02": "cgroup_empty"}
    told = list(TimelineEntry.objects.filter(kind="drill").order_by("seq").values_list("text", flat=True))
    assert told == [
        f"This is a drill ({drill.id}): freeze-node on gpu-02, asked for by tests.",
        f"The fault of drill {drill.id} was applied: SIGSTOP to 5 processes.",
        f"The fault of drill {drill.id} was undone: SIGCONT to 5 processes.",
        f"Drill {drill.id} passed: the promise was kept.",
    ]
    assert first_broken_link(incident.pk) is None


def test_drill_whose_node_never_tells_of_its_end_fails_and_says_so(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "partition")
    report(fleet, drill, FaultState.APPLIED)
    Drill.objects.update(applied_at=time.time() - 30 - 121)
    assert settled(drill).state == "failed"
    assert "look at the node" in drill.result["reasons"][0]


def test_agents_refusal_ends_the_drill_with_its_words(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "isolate-node")
    report(fleet, drill, FaultState.REFUSED, detail="a filter may not be attached here")
    drill.refresh_from_db()
    assert (drill.state, drill.ended) == ("refused", True)
    assert drill.result["reasons"] == ["a filter may not be attached here"]


def test_server_is_held_down_by_a_file_and_back_with_a_fresh_web_process(
    job: Job, fleet: ToldFleet, home: Path
) -> None:
    drill = ask(job, "server-down")
    assert (drill.node, drill.rank, drill.duration_s) == (None, None, 30.0)
    began = time.time()
    assert settled(drill).state == "applied"
    asked = json.loads((home / "hold.json").read_text())
    assert (asked["drill"], asked["roles"], asked["by"]) == (drill.id, ["web", "worker", "beat"], "tests")
    assert began + 30 <= asked["until"] <= time.time() + 30
    (home / "hold.json").unlink()
    assert settled(drill).state == "applied"
    assert not (home / "hold.json").exists()  # asked once only
    Drill.objects.update(applied_at=time.time() - 40)
    fleet.beat()
    assert settled(drill).state == "applied"  # the process that listens was there before: nothing was down
    Observer.objects.create(name="obs-fresh", since=time.time() - 1, beat_at=time.time())
    assert settled(drill).state == "undone"
    for rank, name in enumerate(("gpu-01", "gpu-02")):
        fleet.train(name, 1, rank, range(31, 61))
    after_the_undoing(drill, SETTLE_S + 1)
    assert settled(drill).state == "passed", drill.result


def test_server_without_a_living_supervisor_is_left_up(job: Job, fleet: ToldFleet, home: Path) -> None:
    for content in ("", "no number", "0", str(2**22 + 1)):
        (home / "supervised").write_text(content)
        with pytest.raises(DrillRefused) as refused:
            ask(job, "server-down")
        assert refused.value.guard == "supervised"


def test_hold_that_cannot_be_written_refuses_the_drill(job: Job, fleet: ToldFleet, home: Path) -> None:
    drill = ask(job, "server-down")
    settings.EVERSTEP_HOME = str(home / "gone")
    assert settled(drill).state == "refused"
    assert "could not be asked to hold the server down" in drill.result["reasons"][0]


def test_time_in_which_nobody_looked_is_no_time_of_a_drill(job: Job, fleet: ToldFleet) -> None:
    drill = ask(job, "partition")
    report(fleet, drill, FaultState.APPLIED)
    absence.note_presence()
    Claim.objects.filter(name="presence").update(last_done_at=time.time() - 200)
    Drill.objects.update(applied_at=time.time() - 30 - 121)
    absence.note_presence()
    assert settled(drill).state == "applied"
    drill.refresh_from_db()
    assert 200 <= drill.away_s <= 260
    Drill.objects.update(applied_at=time.time() - 30 - 121 - 260)
    assert settled(drill).state == "failed"


def test_node_of_an_old_agent_gets_no_fault_that_it_cannot_undo(job: Job, fleet: ToldFleet) -> None:
    Node.objects.filter(name="gpu-02").update(protocol=1)
    with pytest.raises(DrillRefused) as refused:
        ask(job, "kill-agent")
    assert refused.value.guard == "agent"
    assert ask(job, "kill-agent", node="gpu-01").node == fleet.nodes["gpu-01"].row
