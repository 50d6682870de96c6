"""What the demo says once it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.cli.demo import _welcome
from everstep.cli.up import ControlPlane


def welcome(home: Path) -> str:
    home.mkdir(parents=True, exist_ok=True)
    (home / "login.json").write_text(json.dumps({"user": "operator", "password": "secret"}))
    plane = ControlPlane(home=home.absolute(), port=8400, environment={}, broker_socket=None)
    return _welcome(plane, None)


def test_says_how_the_command_line_finds_a_demo_whose_home_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTEP_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert f"  EVERSTEP_HOME={tmp_path}/place everstep job list\n" in welcome(tmp_path / "place")
    assert f"  EVERSTEP_HOME='{tmp_path}/a place' everstep job list\n" in welcome(tmp_path / "a place")


def test_command_line_finds_a_demo_in_the_default_home_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTEP_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    text = welcome(tmp_path / ".everstep")
    assert "  everstep job list\n" in text
    assert "EVERSTEP_HOME" not in text
