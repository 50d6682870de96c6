"""What every response gets."""

from __future__ import annotations

import io
from types import SimpleNamespace

from django.http import HttpResponse
from django.test import RequestFactory

from dashboard.middleware import CONTENT_POLICY, ContentPolicy, StaticFiles


def test_pages_carry_the_content_policy_and_are_not_kept_by_the_browser() -> None:
    answer = ContentPolicy(lambda request: HttpResponse("page"))(RequestFactory().get("/jobs"))
    assert answer["Content-Security-Policy"] == CONTENT_POLICY
    assert answer["Cache-Control"] == "no-store"


def test_policy_allows_no_inline_script_or_style_and_no_framing() -> None:
    assert "unsafe" not in CONTENT_POLICY
    for rule in ("script-src 'self'", "style-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in CONTENT_POLICY.split("; ")


def test_static_files_keep_their_own_caching() -> None:
    answer = ContentPolicy(lambda request: HttpResponse("file"))(RequestFactory().get("/static/dashboard/css/base.css"))
    assert "Cache-Control" not in answer


def test_static_file_replaced_since_the_start_is_served_whole() -> None:
    made = SimpleNamespace(status=200, headers=[("Content-Length", "3")], file=io.BytesIO(b"longer than before"))
    file = SimpleNamespace(get_response=lambda method, environment: made)
    answer = StaticFiles.serve(file, RequestFactory().get("/static/a.css"))
    assert answer.content == b"longer than before"
    assert answer["Content-Length"] == "18"
