"""Every POST of the REST API: its effect, who may, and that repeats have no second effect."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client

from dashboard.api import idempotency
from dashboard.api.agents import join_limit
from dashboard.api.app import openapi_document
from recovery import queries
from recovery.access import create_api_token, create_join_token, node_for_credential
from recovery.models import Drill, IdempotencyRecord, Job, Node
from tests.integration.api_rows import (
    Caller,
    make_generation,
    make_incident,
    make_job,
    make_node,
    make_story,
    make_user,
)
from tests.integration.test_api_reads import assert_problem

pytestmark = pytest.mark.django_db

JOB = {
    "name": "tiny",
    "argv": ["/usr/bin/python3", "train.py", "--steps", "10"],
    "working_directory": "/work",
    "checkpoint_directory": "/checkpoints",
}


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture(autouse=True)
def fresh_rates() -> None:
    join_limit.forget()


def running_job() -> Job:
    """A job on two nodes that a drill may break."""
    job = make_job(generation=1)
    make_generation(job, 1, [make_node("gpu-01"), make_node("gpu-02")], reached=10)
    return job


def test_submitted_job_belongs_to_its_caller_and_keeps_its_spec(caller: Caller) -> None:
    response = caller.post("/api/v1/jobs", {**JOB, "total_steps": 10, "environment": {"SEED": "1"}})
    assert response.status_code == 201
    job = queries.get_job(response.json()["id"])
    assert (job.owner, job.total_steps, job.nodes_max) == ("operator", 10, 2)
    assert (job.argv, job.spec["environment"]) == (tuple(JOB["argv"]), {"SEED": "1"})


def test_invalid_job_is_told_where_it_is_wrong(caller: Caller) -> None:
    response = caller.post("/api/v1/jobs", {**JOB, "nodes": 0, "argv": ["/bin/x", 3], "shell": True})
    problem = assert_problem(response, status=422, kind="validation")
    assert {one["pointer"] for one in problem["errors"]} == {"#/nodes", "#/argv/1", "#/shell"}


def test_job_that_recovery_refuses_is_a_problem_with_its_sentence(caller: Caller) -> None:
    response = caller.post("/api/v1/jobs", {**JOB, "argv": ["python"]})
    problem = assert_problem(response, status=422, kind="job_refused")
    assert "absolute path" in problem["detail"]


def test_body_that_is_no_json_is_refused(caller: Caller) -> None:
    response = caller.client.post("/api/v1/jobs", "{", content_type="application/json")
    assert_problem(response, status=400, kind="bad_request")


def test_stop_is_wanted_at_once_and_refused_after_the_end(caller: Caller) -> None:
    make_job("job_a")
    make_job("job_b", state="succeeded")
    response = caller.post("/api/v1/jobs/job_a/actions", {"kind": "stop"})
    assert (response.status_code, response.json()["stop_wanted"]) == (202, True)
    assert Job.objects.get(pk="job_a").stop_wanted
    ended = caller.post("/api/v1/jobs/job_b/actions", {"kind": "stop"})
    assert_problem(ended, status=409, kind="command_refused")
    assert_problem(caller.post("/api/v1/jobs/none/actions", {"kind": "stop"}), status=404, kind="not_found")
    assert_problem(caller.post("/api/v1/jobs/job_a/actions", {"kind": "fly"}), status=422, kind="validation")


def test_operator_pauses_an_open_incident_but_not_one_that_ended(caller: Caller) -> None:
    job, ended = make_story()
    make_incident(job, "inc_b")
    response = caller.post("/api/v1/incidents/inc_b/actions", {"kind": "pause"})
    assert (response.status_code, response.json()["id"]) == (202, "inc_b")
    refused = caller.post(f"/api/v1/incidents/{ended.pk}/actions", {"kind": "pause"})
    assert_problem(refused, status=409, kind="command_refused")


def test_drill_needs_an_idempotency_key(caller: Caller) -> None:
    running_job()
    response = caller.post("/api/v1/drills", {"kind": "kill-rank", "job": "job_a"})
    problem = assert_problem(response, status=400, kind="key_required")
    assert "Idempotency-Key" in problem["detail"]
    assert not Drill.objects.exists()


def test_repeated_drill_request_gets_the_stored_answer_and_injects_nothing_more(caller: Caller) -> None:
    running_job()
    body = {"kind": "kill-rank", "job": "job_a", "rank": 1}
    first = caller.post("/api/v1/drills", body, key="k1")
    again = caller.post("/api/v1/drills", dict(reversed(body.items())), key="k1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert ("Idempotent-Replayed" in first, again["Idempotent-Replayed"]) == (False, "true")
    assert Drill.objects.count() == 1


def test_key_with_another_body_is_refused(caller: Caller) -> None:
    running_job()
    caller.post("/api/v1/drills", {"kind": "kill-rank", "job": "job_a", "rank": 1}, key="k1")
    other = caller.post("/api/v1/drills", {"kind": "kill-rank", "job": "job_a", "rank": 0}, key="k1")
    assert_problem(other, status=422, kind="key_reused")
    assert Drill.objects.count() == 1


def test_key_belongs_to_its_caller_and_address(caller: Caller) -> None:
    other = Caller(make_user("second"))
    ids = {
        caller.post("/api/v1/jobs", JOB, key="k1").json()["id"],
        caller.post("/api/v1/jobs", JOB, key="k1").json()["id"],
        other.post("/api/v1/jobs", JOB, key="k1").json()["id"],
    }
    assert len(ids) == 2
    stopped = caller.post(f"/api/v1/jobs/{ids.pop()}/actions", {"kind": "stop"}, key="k1")
    assert stopped.status_code == 202


def test_refused_request_leaves_no_record_so_that_it_may_be_tried_again(caller: Caller) -> None:
    job = running_job()
    Job.objects.update(state="recovering")
    body = {"kind": "kill-rank", "job": job.id}
    problem = assert_problem(caller.post("/api/v1/drills", body, key="k1"), status=409, kind="drill_refused")
    assert problem["guard"] == "steady_state"
    assert not IdempotencyRecord.objects.exists()
    Job.objects.update(state="running")
    assert caller.post("/api/v1/drills", body, key="k1").status_code == 201


def test_key_is_forgotten_after_a_day(caller: Caller) -> None:
    first = caller.post("/api/v1/jobs", JOB, key="k1").json()["id"]
    IdempotencyRecord.objects.update(created_at=IdempotencyRecord.objects.get().created_at - 24 * 3600 - 1)
    assert caller.post("/api/v1/jobs", JOB, key="k1").json()["id"] != first
    assert IdempotencyRecord.objects.count() == 1


@pytest.mark.parametrize("key", ["", "two words", "x" * 201, "schl\u00fcssel"])
def test_key_of_a_strange_form_is_refused(caller: Caller, key: str) -> None:
    response = caller.client.post(
        "/api/v1/jobs", JOB, content_type="application/json", headers={"Idempotency-Key": key}
    )
    assert_problem(response, status=400, kind="bad_request")
    assert not Job.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_duplicates_at_the_same_moment_have_one_effect() -> None:
    caller = Caller()
    ready = threading.Barrier(4)
    answers: list[Any] = []

    def send() -> None:
        client = Client(headers={"Authorization": f"Bearer {caller.token}"})
        ready.wait()
        answers.append(
            client.post("/api/v1/jobs", JOB, content_type="application/json", headers={"Idempotency-Key": "k1"})
        )
        connection.close()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [201] * 4
    assert len({answer.json()["id"] for answer in answers}) == Job.objects.count() == 1
    assert sum("Idempotent-Replayed" in answer for answer in answers) == 3


def test_request_that_lost_the_race_to_begin_gets_the_first_ones_answer(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on PostgreSQL, where both look for the record before either has written it."""
    first = caller.post("/api/v1/jobs", JOB, key="k1").json()
    looks: list[None] = []
    really_look = idempotency._kept

    def look_too_early(*args: Any, **kwargs: Any) -> IdempotencyRecord | None:
        looks.append(None)
        return None if len(looks) == 1 else really_look(*args, **kwargs)

    monkeypatch.setattr(idempotency, "_kept", look_too_early)
    second = caller.post("/api/v1/jobs", JOB, key="k1")
    assert (second.status_code, second.json(), second["Idempotent-Replayed"]) == (201, first, "true")
    assert Job.objects.count() == 1


def test_database_that_stays_busy_is_a_conflict_to_try_again(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("database is locked")

    monkeypatch.setattr("recovery.jobs.submit_job", busy)
    response = caller.post("/api/v1/jobs", JOB, key="k1")
    assert_problem(response, status=409, kind="in_progress")
    assert response["Retry-After"] == "1"


def test_agent_joins_once_with_a_token_and_gets_a_credential_of_its_own() -> None:
    token = create_join_token(node_name="gpu-01")
    client = Client()
    body = {"token": token, "node": "gpu-01"}
    joined = client.post("/api/v1/agents/join", body, content_type="application/json")
    assert (joined.status_code, joined.json()["node"]) == (201, "gpu-01")
    node = node_for_credential(joined.json()["credential"])
    assert node is not None and node.name == "gpu-01"
    again = client.post("/api/v1/agents/join", body, content_type="application/json")
    assert_problem(again, status=403, kind="join_refused")
    assert not IdempotencyRecord.objects.exists()


def test_joins_are_limited_by_address() -> None:
    client = Client()
    body = {"token": "wrong", "node": "gpu-01"}
    for _ in range(60):
        assert client.post("/api/v1/agents/join", body, content_type="application/json").status_code == 403
    refused = client.post("/api/v1/agents/join", body, content_type="application/json")
    assert_problem(refused, status=429, kind="too_many_requests")
    assert refused["Retry-After"] == "60"
    other = client.post("/api/v1/agents/join", body, content_type="application/json", REMOTE_ADDR="10.0.0.9")
    assert other.status_code == 403
    assert not Node.objects.exists()


def operations(*, changing: bool) -> list[tuple[str, str]]:
    """(method, address) of every operation that needs credentials, as the OpenAPI document lists them."""
    return [
        (method, path.replace("{", "").replace("}", ""))
        for path, methods in openapi_document()["paths"].items()
        for method, operation in methods.items()
        if "security" in operation and (method not in ("get", "head")) == changing
    ]


def test_only_joining_needs_no_credentials() -> None:
    open_operations = [
        operation["operationId"]
        for methods in openapi_document()["paths"].values()
        for operation in methods.values()
        if "security" not in operation
    ]
    assert open_operations == ["join_agent"]
    assert len(operations(changing=True)) == 7


@pytest.mark.parametrize(("method", "address"), operations(changing=True) + operations(changing=False))
@pytest.mark.parametrize("authorization", [None, "Bearer est_api_wrong", "Bearer ", "Basic YTpi", "est_api_wrong"])
def test_every_operation_is_refused_without_credentials(method: str, address: str, authorization: str | None) -> None:
    headers = {"Idempotency-Key": "k1"} | ({"Authorization": authorization} if authorization else {})
    response = Client().generic(method.upper(), address, "{}", content_type="application/json", headers=headers)
    assert_problem(response, status=401, kind="unauthenticated")
    assert response["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize(("method", "address"), operations(changing=True))
def test_session_without_csrf_token_changes_nothing(method: str, address: str) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user())
    headers = {"Idempotency-Key": "k1"}
    response = client.generic(method.upper(), address, "{}", content_type="application/json", headers=headers)
    assert_problem(response, status=403, kind="csrf")


def test_session_with_csrf_token_may_submit() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user())
    client.cookies["csrftoken"] = "a" * 32
    assert client.get("/api/v1/jobs").status_code == 200
    response = client.post("/api/v1/jobs", JOB, content_type="application/json", headers={"X-CSRFToken": "a" * 32})
    assert response.status_code == 201


@pytest.mark.parametrize("change", ["revoked", "expired", "inactive"])
def test_token_that_ended_is_refused(change: str) -> None:
    user = make_user()
    token = create_api_token(user=user, name="short", ttl_s=-1 if change == "expired" else None)
    if change == "revoked":
        user.api_tokens.update(revoked=True)
    if change == "inactive":
        user.is_active = False
        user.save()
    response = Client(headers={"Authorization": f"Bearer {token}"}).get("/api/v1/jobs")
    assert_problem(response, status=401, kind="unauthenticated")


def test_wrong_token_is_not_helped_by_a_session() -> None:
    client = Client(headers={"Authorization": "Bearer est_api_wrong"})
    client.force_login(make_user())
    assert_problem(client.get("/api/v1/jobs"), status=401, kind="unauthenticated")


def test_token_in_the_address_is_no_credential() -> None:
    token = Caller().token
    assert Client().get("/api/v1/jobs", {"token": token}).status_code in (400, 401)


def test_committed_openapi_document_is_current() -> None:
    from dashboard.management.commands.export_openapi import PATH, rendered

    assert json.loads(PATH.read_text()) == json.loads(rendered()), "run: manage.py export_openapi"


def test_openapi_document_is_served_to_callers(caller: Caller) -> None:
    assert caller.get("/api/v1/openapi.json").json()["openapi"].startswith("3.1")
    assert Client().get("/api/v1/openapi.json").status_code == 401
