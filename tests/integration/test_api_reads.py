"""Every GET of the REST API: what it answers, how it pages, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from recovery.models import Node
from tests.integration.api_rows import RECEIPT, T0, Caller, make_drill, make_incident, make_job, make_node, make_story

pytestmark = pytest.mark.django_db

LISTS = ("nodes", "jobs", "incidents", "drills", "jobs/job_a/checkpoints")


@pytest.fixture
def caller() -> Caller:
    return Caller()


def assert_problem(response: Any, *, status: int, kind: str) -> dict[str, Any]:
    """RFC 9457: the right media type and members, and a request id that is also in the header."""
    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert set(problem) >= {"type", "title", "status", "detail", "instance"}
    assert (problem["type"], problem["status"]) == (f"/docs/errors#{kind}", status)
    assert problem["instance"] == response["X-Request-Id"]
    return problem


def test_nodes_are_listed_by_name_and_shown_with_their_gpus(caller: Caller) -> None:
    make_node("gpu-02")
    make_node("gpu-01", gpus=[{"uuid": "GPU-1", "index": 0, "at": T0, "power_w": None}])
    listed = caller.get("/api/v1/nodes").json()
    assert [node["name"] for node in listed["items"]] == ["gpu-01", "gpu-02"]
    assert listed["next"] is None
    node = caller.get("/api/v1/nodes/gpu-01").json()
    assert (node["state"], node["gpus"][0]["uuid"], node["gpus"][0]["power_w"]) == ("ready", "GPU-1", None)
    assert node["gpus"][0]["at"] == "2030-03-17T17:46:40.000000Z"


def test_job_has_the_members_of_the_contract(caller: Caller) -> None:
    make_story()
    job = caller.get("/api/v1/jobs/job_a").json()
    contract = {
        "id", "name", "owner", "state", "reason", "generation", "last_step", "total_steps", "nodes", "ranks_per_node",
        "submitted_at", "started_at", "ended_at", "open_incident", "last_checkpoint_step",
    }  # fmt: skip
    assert contract <= set(job)
    assert (job["nodes"], job["last_checkpoint_step"], job["submitted_at"]) == (
        ["gpu-01", "gpu-03"],
        100,
        "2030-03-17T17:46:40.000000Z",
    )
    assert [one["number"] for one in job["generations"]] == [1, 2]
    assert contract <= set(caller.get("/api/v1/jobs").json()["items"][0])


def test_metrics_have_one_series_per_generation_or_the_canonical_curve(caller: Caller) -> None:
    make_story()
    raw = caller.get("/api/v1/jobs/job_a/metrics").json()
    assert [(one["generation"], len(one["points"])) for one in raw["series"]] == [(1, 154), (2, 60)]
    curve = caller.get("/api/v1/jobs/job_a/metrics", canonical="true").json()
    steps = [point["step"] for one in curve["series"] for point in one["points"]]
    assert steps == list(range(1, 161))
    part = caller.get("/api/v1/jobs/job_a/metrics", generation=2, rank=1, after_step=158, limit=1).json()
    assert ([point["step"] for point in part["series"][0]["points"]], part["more"]) == ([159], True)


def test_checkpoints_are_listed_newest_first(caller: Caller) -> None:
    make_story()
    items = caller.get("/api/v1/jobs/job_a/checkpoints").json()["items"]
    assert [(one["generation"], one["step"]) for one in items] == [(1, 100), (1, 50)]


def test_incident_shows_phases_and_receipt_and_its_timeline_goes_on_after_a_seq(caller: Caller) -> None:
    make_story()
    incident = caller.get("/api/v1/incidents/inc_a").json()
    assert [phase["state"] for phase in incident["phases"]][-1] == "verifying"
    assert (incident["broken_generation"], incident["generation"], incident["entries_count"]) == (1, 2, 8)
    assert incident["receipt"] == RECEIPT
    assert caller.get("/api/v1/incidents/inc_a/receipt").json() == RECEIPT
    timeline = caller.get("/api/v1/incidents/inc_a/timeline", after_seq=6).json()
    assert ([entry["seq"] for entry in timeline["items"]], timeline["last_seq"]) == ([7, 8], 8)
    assert set(timeline["items"][0]) == {"seq", "occurred_at", "recorded_at", "kind", "text", "data", "hash"}


def test_incidents_are_filtered_by_end_and_state(caller: Caller) -> None:
    job, _ = make_story()
    make_incident(job, "inc_b", opened_at=T0 + 50, state="escalated")

    def found(**query: str) -> list[str]:
        return [one["id"] for one in caller.get("/api/v1/incidents", **query).json()["items"]]

    assert found() == ["inc_b", "inc_a"]
    assert found(ended="false") == ["inc_b"]
    assert found(state="recovered") == ["inc_a"]
    assert found(job="job_none") == []


def test_drill_is_shown_with_promise_and_result(caller: Caller) -> None:
    job, incident = make_story()
    drill = make_drill(job, Node.objects.get(name="gpu-02"), ended=True, state="passed", result={"passed": True})
    incident.drill = drill
    incident.save()
    shown = caller.get("/api/v1/drills/drl_a").json()
    assert (shown["incident"], shown["node"], shown["result"]) == ("inc_a", "gpu-02", {"passed": True})
    assert caller.get("/api/v1/drills").json()["items"] == [shown]


def test_pages_are_stable_under_inserts(caller: Caller) -> None:
    for index in range(5):
        make_job(f"job_{index}", submitted_at=T0 + index)
    first = caller.get("/api/v1/jobs", limit=2)
    assert [job["id"] for job in first.json()["items"]] == ["job_4", "job_3"]
    assert f"cursor={first.json()['next']}" in first["Link"]
    assert first["Link"].endswith('rel="next"')
    make_job("job_new", submitted_at=T0 + 100)
    second = caller.get("/api/v1/jobs", limit=2, cursor=first.json()["next"]).json()
    third = caller.get("/api/v1/jobs", limit=2, cursor=second["next"]).json()
    assert [job["id"] for job in (*second["items"], *third["items"])] == ["job_2", "job_1", "job_0"]
    assert third["next"] is None


@pytest.mark.parametrize("address", LISTS)
@pytest.mark.parametrize("cursor", ["%%%", "bm9uc2Vuc2U", "W251bGxd", "eyJhIjoxfQ", "W3RydWUsImEiXQ"])
def test_cursor_that_no_list_gave_is_refused(caller: Caller, address: str, cursor: str) -> None:
    make_story()
    assert_problem(caller.get(f"/api/v1/{address}", cursor=cursor), status=400, kind="bad_cursor")


@pytest.mark.parametrize(
    "query",
    [
        "jobs/%00",
        "jobs?state=a%00b",
        "incidents?job=a%00b",
        "jobs/job_a/metrics?generation=99999999999999999999",
        "jobs/job_a/metrics?after_step=99999999999999999999&rank=99999999999999999999",
        "incidents/inc_a/timeline?after_seq=99999999999999999999",
        "jobs/job_a/checkpoints?cursor=Wzk5OTk5OTk5OTk5OTk5OTk5OTk5LDFd",
        "jobs?cursor=WzFlNDAwLCJhIl0",
        "incidents?ended=perhaps",
    ],
)
def test_values_beyond_all_bounds_are_refused_or_find_nothing(caller: Caller, query: str) -> None:
    make_story()
    assert caller.client.get(f"/api/v1/{query}").status_code in (200, 400, 404, 422)


@pytest.mark.parametrize("address", LISTS)
def test_limit_is_at_most_200(caller: Caller, address: str) -> None:
    make_story()
    problem = assert_problem(caller.get(f"/api/v1/{address}", limit=201), status=400, kind="bad_parameter")
    assert [one["parameter"] for one in problem["errors"]] == ["limit"]


@pytest.mark.parametrize("address", LISTS)
def test_limit_is_at_least_1(caller: Caller, address: str) -> None:
    make_story()
    problem = assert_problem(caller.get(f"/api/v1/{address}", limit=0), status=400, kind="bad_parameter")
    assert problem["detail"] == "limit: Input should be greater than or equal to 1"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("jobs?state=bogus", {"pending", "running", "stopped"}),
        ("drills?state=bogus", {"requested", "armed", "applied", "undone", "passed", "failed", "refused", "expired"}),
        ("incidents?state=bogus", {"detected", "escalated", "breaker_open", "rearmed"}),
        ("incidents?kind=bogus", {"job", "control_plane"}),
    ],
)
def test_filter_by_a_value_that_there_is_not_is_refused_and_told_those_that_there_are(
    caller: Caller, query: str, named: set[str]
) -> None:
    make_story()
    problem = assert_problem(caller.client.get(f"/api/v1/{query}"), status=400, kind="bad_parameter")
    assert [one["parameter"] for one in problem["errors"]] == [query.partition("?")[2].partition("=")[0]]
    assert all(f"'{value}'" in problem["detail"] for value in named)


@pytest.mark.parametrize("address", [*LISTS, "jobs/job_a", "jobs/job_a/metrics", "incidents/inc_a/timeline"])
def test_unknown_query_parameter_is_refused_by_name(caller: Caller, address: str) -> None:
    make_story()
    problem = assert_problem(caller.get(f"/api/v1/{address}", stat="running"), status=400, kind="unknown_parameter")
    assert problem["parameters"] == ["stat"]


@pytest.mark.parametrize(
    "address",
    [
        "nodes/none",
        "jobs/none",
        "jobs/none/metrics",
        "jobs/none/checkpoints",
        "incidents/none",
        "incidents/none/timeline",
        "incidents/none/receipt",
        "drills/none",
        "nothing",
        "jobs/job_a/nothing",
    ],
)
def test_what_is_not_there_is_a_problem_document(caller: Caller, address: str) -> None:
    assert_problem(caller.get(f"/api/v1/{address}"), status=404, kind="not_found")


def test_wrong_method_is_a_problem_document_that_names_the_right_ones(caller: Caller) -> None:
    response = caller.client.delete("/api/v1/jobs")
    assert_problem(response, status=405, kind="method_not_allowed")
    assert set(response["Allow"].split(", ")) == {"GET", "POST"}


def test_refused_host_is_a_problem_document(caller: Caller) -> None:
    assert_problem(caller.client.get("/api/v1/jobs", headers={"Host": "evil.example"}), status=400, kind="bad_request")


def test_surprise_inside_the_server_says_nothing_but_its_request_id(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("recovery.queries.get_job", fail)
    response = caller.get("/api/v1/jobs/job_a")
    problem = assert_problem(response, status=500, kind="internal_error")
    assert "secret detail" not in response.content.decode()
    assert problem["instance"] in caplog.text
    assert "secret detail" in caplog.text


def test_health_needs_no_credentials_and_readiness_does_not_need_the_broker() -> None:
    client = Client()
    assert client.get("/healthz").json() == {"status": "ok"}
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert ready.json()["checks"] == {"database": "ok", "migrations": "ok", "broker": "no answer"}


def test_not_ready_while_a_migration_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = "django.db.migrations.executor.MigrationExecutor.migration_plan"
    monkeypatch.setattr(plan, lambda self, targets: ["one"])
    ready = Client().get("/readyz")
    assert (ready.status_code, ready.json()["checks"]["migrations"]) == (503, "1 not applied")


def test_every_kind_of_error_has_its_place_on_the_page_that_type_names() -> None:
    from dashboard.api.problems import KINDS

    page = Client().get("/docs/errors").content.decode()
    assert all(f'id="{kind}"' in page for kind in KINDS)
