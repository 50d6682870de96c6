"""By which names the server may be reached."""

from __future__ import annotations

import pytest

from dashboard.env import Environment


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("", []),
        ("everstep.example.org", ["everstep.example.org"]),
        (" a.example , ,b.example", ["a.example", "b.example"]),
    ],
)
def test_names_are_added_to_loopback_at_which_everstep_up_asks_itself(said: str, more: list[str]) -> None:
    assert Environment({"EVERSTEP_ALLOWED_HOSTS": said}).allowed_hosts == ["127.0.0.1", "localhost", "[::1]", *more]
