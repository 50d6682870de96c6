from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from everstep.elastic.launch import Launch
from everstep.errors import BadLaunch


def put(directory: Path, **changes: Any) -> Path:
    content = {
        "protocol": 2,
        "job": "j1",
        "generation": 2,
        "plan_id": "p1",
        "argv": ["python", "train.py"],
        "working_directory": "/work",
        "environment": {"PATH": "/bin"},
        "run_id": "r1",
        "node_rank": 1,
        "node_count": 2,
        "ranks_per_node": 2,
        "first_rank": 2,
        "world_size": 4,
        "master_address": "10.0.0.1",
        "master_port": 20000,
        "checkpoint_directory": "/shared/c",
        "parent_generation": None,
        "parent_step": None,
        "socket": None,
        "mark": "j1:2:p1",
        "stop_limit_s": 30.0,
        "log_directory": "/state/logs",
        "cgroup": None,
        "contact": None,
        "progress": None,
        "lease": None,
    }
    (directory / "launch.json").write_text(json.dumps({**content, **changes}))
    return directory


def test_a_newer_agent_may_say_more(tmp_path: Path) -> None:
    launch = Launch.read(put(tmp_path, something_new=1))
    assert (launch.job, launch.world_size) == ("j1", 4)
    assert "something_new" not in {field.name for field in fields(launch)}


def test_rank_environment_is_the_jobs_with_ours_on_top(tmp_path: Path) -> None:
    launch = Launch.read(put(tmp_path, environment={"PATH": "/bin", "EVERSTEP_JOB": "liar", "OMP_NUM_THREADS": "4"}))
    environment = launch.rank_environment(runner_pid=7)
    assert environment["EVERSTEP_JOB"] == "j1"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["EVERSTEP_RESUME"] == ""
    assert "EVERSTEP_SOCKET" not in environment


LEASE = {"contact": "/run/contact", "progress": "/run/progress", "lease": "/run/lease.json"}


def test_lease_is_handed_to_the_ranks_and_one_that_was_brought_along_is_not(tmp_path: Path) -> None:
    stale = {"EVERSTEP_CONTACT": "/old", "EVERSTEP_PROGRESS": "/old", "EVERSTEP_LEASE": "/old"}
    leased = Launch.read(put(tmp_path, environment=stale, **LEASE)).rank_environment(runner_pid=7)
    assert (leased["EVERSTEP_CONTACT"], leased["EVERSTEP_LEASE"]) == ("/run/contact", "/run/lease.json")
    unleased = Launch.read(put(tmp_path, environment=stale)).rank_environment(runner_pid=7)
    assert not stale.keys() & unleased.keys()


def test_launch_of_the_protocol_before_has_no_lease(tmp_path: Path) -> None:
    content = json.loads((put(tmp_path, protocol=1) / "launch.json").read_text())
    (tmp_path / "launch.json").write_text(json.dumps({k: v for k, v in content.items() if k not in LEASE}))
    assert Launch.read(tmp_path).lease_paths is None
    assert Launch.read(put(tmp_path, protocol=1, **LEASE)).lease_paths is None
    (tmp_path / "launch.json").write_text(
        json.dumps({k: v for k, v in content.items() if k != "lease"} | {"protocol": 2})
    )
    with pytest.raises(BadLaunch, match="lease"):
        Launch.read(tmp_path)


def test_step_zero_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    launch = Launch.read(put(tmp_path, parent_generation=1, parent_step=0))
    assert launch.rank_environment(runner_pid=7)["EVERSTEP_RESUME"] == "1:0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contact": "/run/contact"}, "belong together"),
        ({"protocol": 3}, "protocol 3"),
        ({"protocol": 0}, "protocol 0"),
        ({"argv": []}, "argv is empty"),
        ({"first_rank": 1}, "cannot start at rank 1"),
    ],
)
def test_refuses_a_launch_that_cannot_be_run(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadLaunch, match=words):
        Launch.read(put(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"protocol": 1}'])
def test_refuses_a_file_that_is_no_launch(tmp_path: Path, text: str) -> None:
    (tmp_path / "launch.json").write_text(text)
    with pytest.raises(BadLaunch, match="does not describe a launch"):
        Launch.read(tmp_path)
