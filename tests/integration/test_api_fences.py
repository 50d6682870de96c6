"""Fences and the control plane over REST: attestations, the provider, silent nodes, and the breaker."""

from __future__ import annotations

import time
from typing import Any

import pytest

from recovery.models import FenceAction, GenerationRow, Job, Probe, RankRow, ShareRow
from tests.integration.api_rows import (
    Caller,
    make_control_plane_incident,
    make_generation,
    make_incident,
    make_job,
    make_node,
)
from tests.integration.test_api_reads import assert_problem

pytestmark = pytest.mark.django_db

ATTESTATIONS = "/api/v1/nodes/gpu-02/attestations"
FENCE = "/api/v1/nodes/gpu-02/fence"


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture
def job(settings: Any) -> Job:
    """Generation 1 runs on gpu-01 and gpu-02, and gpu-02 has been silent for a minute."""
    settings.EVERSTEP_FENCE_COMMAND = ["/bin/false", "{node}"]
    job = make_job(generation=1)
    nodes = [make_node("gpu-01"), make_node("gpu-02", last_heard_at=time.time() - 60, boot_id="boot-2")]
    row = make_generation(job, 1, nodes, reached=10)
    GenerationRow.objects.filter(pk=row.pk).update(run_ordered_at=1.0)
    make_node("gpu-03")
    return job


def test_attestation_is_kept_with_its_caller_and_repeated_by_its_key(caller: Caller, job: Job) -> None:
    body = {"confirm": "gpu-02", "statement": "pulled the plug"}
    response = caller.post(ATTESTATIONS, body, key="k1")
    assert response.status_code == 201
    action = response.json()
    assert (action["kind"], action["state"], action["requested_by"]) == ("attestation", "fenced", "operator")
    assert "operator attested at" in action["evidence"] and "'pulled the plug'" in action["evidence"]
    again = caller.post(ATTESTATIONS, body, key="k1")
    assert (again.status_code, again.json(), FenceAction.objects.count()) == (201, action, 1)
    assert ShareRow.objects.get(node__name="gpu-02").proof["kind"] == "attestation"
    node = caller.get("/api/v1/nodes/gpu-02").json()
    assert (node["fence_actions"], node["state"], node["contact"]) == ([action], "unknown", "lost")
    assert [(one["generation"], one["proof"]) for one in node["unconfirmed"]] == [(1, "attestation")]
    assert node["fence_refusal"].startswith("Nothing waits for a proof of gpu-02")


@pytest.mark.parametrize("address", [ATTESTATIONS, FENCE])
def test_name_that_is_not_typed_to_the_letter_is_not_confirmed(caller: Caller, job: Job, address: str) -> None:
    problem = assert_problem(caller.post(address, {"confirm": "gpu-2"}), status=422, kind="not_confirmed")
    assert "exact name, gpu-02" in problem["detail"]
    assert_problem(caller.post(address, {}), status=422, kind="validation")
    assert not FenceAction.objects.exists()


@pytest.mark.parametrize("action", ["attestations", "fence"])
def test_node_in_contact_is_not_fenced(caller: Caller, job: Job, action: str) -> None:
    response = caller.post(f"/api/v1/nodes/gpu-01/{action}", {"confirm": "gpu-01"})
    assert "gpu-01 is in contact" in assert_problem(response, status=409, kind="fence_refused")["detail"]
    response = caller.post(f"/api/v1/nodes/none/{action}", {"confirm": "none"})
    assert_problem(response, status=404, kind="not_found")


@pytest.mark.parametrize("statement", ["x" * 1001, "a\0b", 3])
def test_statement_is_text_of_some_length(caller: Caller, job: Job, statement: object) -> None:
    response = caller.post(ATTESTATIONS, {"confirm": "gpu-02", "statement": statement})
    assert_problem(response, status=422, kind="validation")


def test_provider_is_asked_and_a_second_request_is_refused(caller: Caller, job: Job, settings: Any) -> None:
    response = caller.post(FENCE, {"confirm": "gpu-02"})
    assert response.status_code == 202
    assert (response.json()["state"], response.json()["attempts"]) == ("requested", 0)
    problem = assert_problem(caller.post(FENCE, {"confirm": "gpu-02"}), status=409, kind="fence_refused")
    assert "being fenced already" in problem["detail"]
    settings.EVERSTEP_FENCE_COMMAND = []
    problem = assert_problem(caller.post(FENCE, {"confirm": "gpu-02"}), status=409, kind="fence_refused")
    assert "EVERSTEP_FENCE_COMMAND" in problem["detail"]


def test_node_shows_its_silence_what_may_run_on_it_and_who_looked(caller: Caller, job: Job) -> None:
    asked = time.time() - 5
    prober = make_node("gpu-04")
    lost = ShareRow.objects.get(node__name="gpu-02").node
    Probe.objects.create(
        id="prb_a",
        node=lost,
        prober=prober,
        asked_at=asked,
        not_after=asked + 8,
        outcome="unreachable",
        detail="timeout",
    )
    node = caller.get("/api/v1/nodes/gpu-02").json()
    assert (node["contact"], node["state"], 55 < node["silent_s"] < 120) == ("lost", "unknown", True)
    assert node["since"] == node["last_heard_at"]
    assert [(one["job"], one["generation"], one["proof"]) for one in node["unproven"]] == [("job_a", 1, None)]
    assert [(one["prober"], one["outcome"], one["detail"]) for one in node["probes"]] == [
        ("gpu-04", "unreachable", "timeout")
    ]
    assert (node["fence_provider"], node["fence_refusal"]) == ("command", "")
    listed = {one["name"]: one for one in caller.get("/api/v1/nodes").json()["items"]}
    assert {name: one["contact"] for name, one in listed.items()} == {
        "gpu-01": "seen", "gpu-02": "lost", "gpu-03": "seen", "gpu-04": "seen",
    }  # fmt: skip


@pytest.mark.parametrize("trains_on", [True, False])
def test_job_shows_unseen_nodes_and_whether_they_are_known_to_train(caller: Caller, job: Job, trains_on: bool) -> None:
    at = time.time() - (0 if trains_on else 100)
    RankRow.objects.filter(rank=0).update(
        phase="step", progress_at=at, progress_seen_at=at, pace_s=30.0 if trains_on else 0.5
    )
    for shown in (caller.get("/api/v1/jobs/job_a").json(), caller.get("/api/v1/jobs").json()["items"][0]):
        (unseen,) = shown["unseen"]
        assert (unseen["node"], unseen["contact"], unseen["trains_on"]) == ("gpu-02", "lost", trains_on)
        assert (shown["nodes_min"], shown["nodes_max"], shown["multiple_of"]) == (2, 2, 1)
    GenerationRow.objects.update(wanted="stop")
    assert caller.get("/api/v1/jobs/job_a").json()["unseen"] == []


def test_incident_shows_what_it_waits_for_and_what_would_help(caller: Caller, job: Job) -> None:
    GenerationRow.objects.update(wanted="stop")
    incident = make_incident(job, state="waiting_for_fence", opened_at=time.time() - 30)
    incident.body.pop("plan")
    incident.save()
    seen, lost = caller.get("/api/v1/incidents/inc_a").json()["waiting_for"]
    assert (seen["node"], seen["helps"]) == ("gpu-01", ["stop"])
    assert (lost["node"], lost["helps"], lost["fence_action"]) == (
        "gpu-02",
        ["return", "provider", "attestation"],
        None,
    )
    caller.post(FENCE, {"confirm": "gpu-02"})
    assert caller.get("/api/v1/incidents/inc_a").json()["waiting_for"][1]["fence_action"] == "requested"
    caller.post(ATTESTATIONS, {"confirm": "gpu-02"})
    shown = caller.get("/api/v1/incidents/inc_a").json()
    assert [one["node"] for one in shown["waiting_for"]] == ["gpu-01"]
    assert [(one["node"], one["kind"], one["generation"], one["confirmed"]) for one in shown["fences"]] == [
        ("gpu-02", "attestation", 1, False)
    ]
    proofs = caller.get("/api/v1/jobs/job_a").json()["generations"][0]["proofs"]
    assert proofs == shown["fences"]


def test_incident_of_the_control_plane_is_listed_shown_filtered_and_rearmed(caller: Caller, job: Job) -> None:
    make_incident(job, "inc_job")
    make_control_plane_incident()
    shown = caller.get("/api/v1/incidents/inc_plane").json()
    assert (shown["kind"], shown["job"], shown["job_name"], shown["nodes"], shown["fleet_size"]) == (
        "control_plane", None, "", ["gpu-01", "gpu-02"], 3,
    )  # fmt: skip
    assert (shown["state"], shown["needs_human"], shown["still_silent"]) == ("breaker_open", True, ["gpu-02"])
    assert (shown["broken_generation"], shown["waiting_for"], shown["receipt"]) == (None, [], None)
    listed = caller.get("/api/v1/incidents", kind="control_plane").json()["items"]
    assert [one["id"] for one in listed] == ["inc_plane"]
    listed = caller.get("/api/v1/incidents", state="breaker_open").json()["items"]
    assert [one["id"] for one in listed] == ["inc_plane"]
    assert caller.get("/api/v1/incidents/inc_plane/timeline").json()["items"] == []
    refused = caller.post("/api/v1/incidents/inc_plane/actions", {"kind": "close"})
    assert "`rearm`" in assert_problem(refused, status=409, kind="command_refused")["detail"]
    rearmed = caller.post("/api/v1/incidents/inc_plane/actions", {"kind": "rearm"})
    assert (rearmed.status_code, rearmed.json()["state"], rearmed.json()["ended"]) == (202, "rearmed", True)
    for incident in ("inc_plane", "inc_job"):
        refused = caller.post(f"/api/v1/incidents/{incident}/actions", {"kind": "rearm"})
        assert_problem(refused, status=409, kind="command_refused")


JOB = {
    "name": "llm", "argv": ["/usr/bin/python3", "train.py"], "working_directory": "/w", "checkpoint_directory": "/c",
}  # fmt: skip


def test_job_may_be_submitted_with_a_range_of_nodes_and_limits_of_phases(caller: Caller) -> None:
    wishes = {"nodes": {"min": 2, "max": 4, "multiple_of": 2}, "phase_limits_s": {"save_s": 120}, "synchronous": False}
    shown = caller.post("/api/v1/jobs", {**JOB, **wishes}).json()
    assert (shown["nodes_min"], shown["nodes_max"], shown["multiple_of"]) == (2, 4, 2)
    assert (shown["phase_limits_s"], shown["synchronous"]) == ({"save_s": 120.0}, False)
    assert Job.objects.get().spec["nodes"] == {"min": 2, "max": 4, "multiple_of": 2}


@pytest.mark.parametrize(
    ("wrong", "pointer"),
    [
        ({"nodes": 0}, "#/nodes"),
        ({"nodes": "two"}, "#/nodes"),
        ({"nodes": {"min": 0, "max": 2}}, "#/nodes/min"),
        ({"nodes": {"min": 1}}, "#/nodes/max"),
        ({"nodes": {"min": 1, "max": 2, "step": 1}}, "#/nodes/step"),
        ({"phase_limits_s": {"step_s": 1}}, "#/phase_limits_s/step_s"),
        ({"phase_limits_s": {"lunch_s": 100}}, "#/phase_limits_s/lunch_s"),
    ],
)
def test_wish_that_is_wrong_is_pointed_to(caller: Caller, wrong: dict[str, object], pointer: str) -> None:
    problem = assert_problem(caller.post("/api/v1/jobs", {**JOB, **wrong}), status=422, kind="validation")
    assert [one["pointer"] for one in problem["errors"]] == [pointer]


def test_range_whose_ends_do_not_fit_is_refused_with_a_sentence(caller: Caller) -> None:
    nodes = {"min": 3, "max": 4, "multiple_of": 2}
    problem = assert_problem(caller.post("/api/v1/jobs", {**JOB, "nodes": nodes}), status=422, kind="job_refused")
    assert "min 3 is no multiple of 2" in problem["detail"]
