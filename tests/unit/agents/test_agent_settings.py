"""The command line: what does not make sense is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.errors import SettingsInvalid
from agents.settings import is_safe_name, parse_settings

BASE = ["--server", "http://127.0.0.1:8400/", "--name", "gpu-01", "--state", "/s"]


def test_addresses_follow_from_the_server() -> None:
    settings = parse_settings(BASE, {})
    assert settings.socket_url == "ws://127.0.0.1:8400/ws/agent"
    assert settings.join_url == "http://127.0.0.1:8400/api/v1/agents/join"
    secure = parse_settings([*BASE, "--server", "https://everstep.example"], {})
    assert secure.socket_url == "wss://everstep.example/ws/agent"


def test_the_token_comes_from_a_file_or_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    assert parse_settings(BASE, {"EVERSTEP_JOIN_TOKEN": "from-environment"}).join_token == "from-environment"
    file = tmp_path / "token"
    file.write_text("from-file\n")
    settings = parse_settings([*BASE, "--join-token-file", str(file)], {})
    assert settings.join_token == "from-file"
    assert "from-file" not in repr(settings)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--server", "127.0.0.1:8400"],
        ["--server", "http://user:secret@host"],
        ["--name", "../x"],
        ["--name", ""],
        ["--port-range", "20000"],
        ["--port-range", "30-20"],
        ["--port-range", "80-90"],
        ["--join-token-file", "/no/such/file"],
    ],
)
def test_refuses_what_makes_no_sense(wrong: list[str]) -> None:
    with pytest.raises(SettingsInvalid):
        parse_settings([*BASE, *wrong], {})


def test_names_that_may_become_paths() -> None:
    assert all(map(is_safe_name, ("gpu-01", "a", "A.b_c-9")))
    assert not any(map(is_safe_name, ("", ".", "..", "-a", "a/b", "a b", "\u00e4", "a\n", "x" * 101)))
