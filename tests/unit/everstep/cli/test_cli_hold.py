"""Which wishes to hold services down are followed, and for how long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.cli.hold import Hold, read_hold


def ask(path: Path, **changes: object) -> list[str]:
    path.write_text(json.dumps({"drill": "d", "roles": ["web", "beat"], "until": 1030.0, "by": "ann", **changes}))
    return []


def read(path: Path, said: list[str]) -> Hold | None:
    return read_hold(path, now=1000.0, monotonic=50.0, say=said.append)


def test_lasts_until_its_time(tmp_path: Path) -> None:
    said = ask(path := tmp_path / "hold.json")
    assert read(path, said) == Hold(drill="d", roles=("web", "beat"), left_s=30.0, ends_at=80.0)
    assert path.exists()
    assert said == []


def test_never_lasts_longer_than_two_minutes(tmp_path: Path) -> None:
    said = ask(path := tmp_path / "hold.json", until=1e12)
    hold = read(path, said)
    assert hold is not None
    assert hold.ends_at == 170.0


@pytest.mark.parametrize("until", [1000.0, 999.0, float("nan")])
def test_what_is_over_is_removed(tmp_path: Path, until: float) -> None:
    said = ask(path := tmp_path / "hold.json", until=until)
    assert read(path, said) is None
    assert not path.exists()


@pytest.mark.parametrize(
    "changes", [{"roles": ["broker"]}, {"roles": []}, {"roles": 3}, {"until": "soon"}, {"until": None}]
)
def test_what_cannot_be_followed_is_removed_and_said(tmp_path: Path, changes: dict[str, object]) -> None:
    said = ask(path := tmp_path / "hold.json", **changes)
    assert read(path, said) is None
    assert not path.exists()
    assert "asks for nothing that can be done" in said[0]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_file_that_is_none_of_ours_is_removed_and_said(tmp_path: Path, text: str) -> None:
    path, said = tmp_path / "hold.json", list[str]()
    path.write_text(text)
    assert read(path, said) is None
    assert not path.exists()
    assert said


def test_no_file_no_hold(tmp_path: Path) -> None:
    assert read(tmp_path / "hold.json", []) is None
