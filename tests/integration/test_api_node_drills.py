"""Drills on nodes over REST and on the command line: what is asked, what is refused, and how it is shown."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from everstep.cli.main import main
from recovery.models import Drill, Node
from tests.integration.api_rows import Caller, make_generation, make_job, make_node
from tests.integration.test_api_reads import assert_problem

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def caller() -> Caller:
    """A job trains on gpu-01 and gpu-02; gpu-03 is a spare. All are in contact."""
    job = make_job(generation=1)
    nodes = [make_node(name, protocol=2) for name in ("gpu-01", "gpu-02", "gpu-03")]
    Node.objects.filter(name__in=("gpu-01", "gpu-02")).update(claimed_by=job)
    make_generation(job, 1, nodes[:2], reached=10)
    return Caller()


def post(caller: Caller, **body: Any) -> Any:
    return caller.post("/api/v1/drills", {"job": "job_a", **body}, key=uuid.uuid4().hex)


def test_node_drill_is_shown_with_its_node_duration_and_promise(caller: Caller) -> None:
    shown = post(caller, kind="freeze-node", node="gpu-01", duration_s=40).json()
    assert (shown["node"], shown["rank"], shown["duration_s"], shown["undone_at"]) == ("gpu-01", 0, 40.0, None)
    assert shown["promise"] == {"kind": "recovered", "recovered_within_s": 120.0, "continuity": "proven"}
    Drill.objects.all().delete()
    shown = post(caller, kind="partition").json()
    assert (shown["node"], shown["rank"], shown["duration_s"]) == ("gpu-02", 1, 30.0)
    assert shown["promise"] == {"kind": "unharmed"}


def test_guards_answer_409_with_their_name(caller: Caller) -> None:
    for guard, body in {
        "would_wait": {"kind": "kill-agent"},
        "duration": {"kind": "server-down", "duration_s": 121},
        "supervised": {"kind": "server-down"},
        "kind": {"kind": "melt-node"},
    }.items():
        if guard == "would_wait":
            Node.objects.filter(name="gpu-03").update(cordoned=True)
        problem = assert_problem(post(caller, **body), status=409, kind="drill_refused")
        assert problem["guard"] == guard
    assert post(caller, kind="kill-agent", allow_waiting=True).json()["promise"]["allow_waiting"] is True


def test_durations_beyond_reason_are_no_valid_request(caller: Caller) -> None:
    for wrong in (-1, 601):
        assert_problem(post(caller, kind="partition", duration_s=wrong), status=422, kind="validation")


def test_drills_of_every_target_are_told_on_the_command_line(
    caller: Caller, live_server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERSTEP_SERVER", live_server.url)
    monkeypatch.setenv("EVERSTEP_TOKEN", caller.token)

    def told(*words: str) -> str:
        assert main(["drill", *words]) == 0
        return capsys.readouterr().out

    asked = told("run", "--job", "job_a", "--kind", "partition", "--node", "gpu-01", "--duration", "12")
    assert "partition on node gpu-01 of job" in asked
    assert "for 12 s" in asked
    numbers = {"steps_lost": 0, "events_lost": 0, "incidents": 0, "largest_step_gap_s": 0.4, "silent_s": 13.0}
    Drill.objects.update(state="passed", ended=True, result={"passed": True, "reasons": [], **numbers})
    drill = Drill.objects.get()
    shown = told("show", drill.id)
    assert "unharmed: no step lost, no event lost, no incident" in shown
    assert "0 steps lost, 0 events lost, 0 incidents; silent for 13.0 s, longest time without a step 0.4 s" in shown
    Drill.objects.update(kind="server-down", node=None, rank=None)
    assert "the server under job" in told("show", drill.id)
    assert "(server)" in told("list")
