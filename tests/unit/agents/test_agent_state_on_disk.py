"""What the agent must not forget: highest generations, drills, run records, and files that are never half written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from agents.durable import read_json, write_json
from agents.errors import StateUnusable
from agents.faults.drill_record import DrillRecord, DrillStep, DrillStore
from agents.supervisor.highest import HighestStore, HighWater


def test_files_are_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    with pytest.raises(StateUnusable, match="Free space"):
        write_json(tmp_path / "none" / "x.json", {})


def test_a_missing_file_is_empty_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(StateUnusable, match="will not guess"):
        read_json(tmp_path / "bad.json")


def test_the_highest_generation_survives_and_never_falls(tmp_path: Path) -> None:
    store = HighestStore(tmp_path)
    store.load()
    store.merge({"j": HighWater(generation=3, plan_id="p3", stopped=2)})
    store.merge({"j": HighWater(generation=2, plan_id="p2")})
    again = HighestStore(tmp_path)
    again.load()
    assert again.jobs == {"j": HighWater(generation=3, plan_id="p3", stopped=2)}
    assert [(known.job, known.generation, known.plan_id) for known in again.for_hello()] == [("j", 3, "p3")]


def test_damaged_memory_of_generations_stops_the_agent(tmp_path: Path) -> None:
    for text in ("{", '{"j": {"generation": 3}}', '{"j": 3}', "[1]"):
        (tmp_path / "highest.json").write_text(text)
        with pytest.raises(StateUnusable):
            HighestStore(tmp_path).load()


def test_memory_of_generations_stays_small(tmp_path: Path) -> None:
    store = HighestStore(tmp_path)
    store.merge({f"j{number}": HighWater(generation=1, plan_id="p") for number in range(1500)})
    store.merge({"newest": HighWater(generation=1, plan_id="p")})
    assert len(store.jobs) == 1000
    assert "newest" in store.jobs


def test_drills_survive(tmp_path: Path) -> None:
    store = DrillStore(tmp_path)
    store.load()
    record = DrillRecord(
        drill="d", job="j", generation=1, rank=0, not_after=5.0, steps_after_save=3, step=DrillStep.ARMED, at=1.0
    )
    store.put(record)
    again = DrillStore(tmp_path)
    again.load()
    assert again.get("d") == record
    (tmp_path / "drills.json").write_text('[{"drill": 3}]')
    with pytest.raises(StateUnusable):
        DrillStore(tmp_path).load()


def test_generation_that_could_not_be_written_down_does_not_count_as_known(tmp_path: Path) -> None:
    state = tmp_path / "state"
    store = HighestStore(state)
    for _ in range(2):
        with pytest.raises(StateUnusable):
            store.merge({"j": HighWater(generation=2, plan_id="p2")})
    assert store.jobs == {}
    state.mkdir()
    store.merge({"j": HighWater(generation=2, plan_id="p2")})
    again = HighestStore(state)
    again.load()
    assert again.jobs == {"j": HighWater(generation=2, plan_id="p2")}
