"""A request under a foreign name: what it is answered, and how often that is logged."""

from __future__ import annotations

import json
import logging

import pytest
from django.http import HttpResponse
from django.test import Client, RequestFactory

from dashboard.known_hosts import MOST_TOLD, TOLD_AGAIN_AFTER_S, KnownHosts


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refuse(middleware: KnownHosts, host: str) -> HttpResponse:
    return middleware(RequestFactory().get("/jobs", headers={"Host": host}))


def test_page_and_api_answer_400_with_the_setting_that_would_allow_the_name() -> None:
    for path in ("/jobs", "/healthz", "/api/v1/jobs"):
        answer = Client().get(path, headers={"Host": "evil.example:8400"})
        said = json.loads(answer.content)["detail"] if path.startswith("/api/") else answer.content.decode()
        assert answer.status_code == 400
        assert "not reached as evil.example: " in said
        assert "EVERSTEP_ALLOWED_HOSTS" in said


def test_refused_requests_are_one_line_in_the_log_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            client.get("/jobs", headers={"Host": "once.example"})
            client.get("/api/v1/jobs", headers={"Host": "once.example"})
    assert [(one.name, one.exc_info) for one in caplog.records] == [("dashboard.known_hosts", None)]
    assert "once.example" in caplog.text


def test_name_is_told_again_after_an_hour_and_many_names_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    middleware = KnownHosts(lambda request: HttpResponse("page"), clock=clock)
    for index in range(2 * MOST_TOLD):
        refuse(middleware, f"host-{index}.example")
        refuse(middleware, "host-0.example")
    assert len(caplog.records) == MOST_TOLD
    clock.now = TOLD_AGAIN_AFTER_S
    refuse(middleware, "host-0.example")
    assert len(caplog.records) == MOST_TOLD + 1


@pytest.mark.parametrize("host", ["evil\r\nX: y", "a b", "\x1b[31m", "<b>", ""])
def test_header_that_is_no_name_is_refused_and_cannot_forge_a_line(host: str, caplog: pytest.LogCaptureFixture) -> None:
    middleware = KnownHosts(lambda request: HttpResponse("page"))
    request = RequestFactory().get("/jobs")
    request.META["HTTP_HOST"] = host
    answer = middleware(request)
    assert (answer.status_code, "EVERSTEP_ALLOWED_HOSTS" in answer.content.decode()) == (400, True)
    assert "\n" not in caplog.records[0].getMessage()
    assert "\x1b" not in caplog.records[0].getMessage()


def test_own_name_passes() -> None:
    assert refuse(KnownHosts(lambda request: HttpResponse("page")), "localhost:8400").content == b"page"
