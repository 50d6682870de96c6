"""What `everstep job submit` captures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.client import WrongUsage
from everstep.cli.jobs import absolute_program, environment_from, job_request, script_name
from everstep.cli.main import build_parser


def request(*words: str, cwd: Path) -> dict[str, Any]:
    line = ["job", "submit", *words]
    return job_request(build_parser(line).parse_args(line), working_directory=cwd)


def test_captures_directory_interpreter_and_arguments(tmp_path: Path) -> None:
    body = request(
        "--checkpoint-dir", "ckpt", "--nodes", "3", "--env", "A=b=c", "--total-steps", "9",
        "--", sys.executable, "train.py", "--lr", "0.1", "--", "-x",
        cwd=tmp_path,
    )  # fmt: skip
    assert body == {
        "name": "train",
        "argv": [sys.executable, "train.py", "--lr", "0.1", "--", "-x"],
        "working_directory": str(tmp_path.resolve()),
        "checkpoint_directory": str(tmp_path.resolve() / "ckpt"),
        "environment": {"A": "b=c"},
        "nodes": 3,
        "ranks_per_node": 1,
        "total_steps": 9,
        "user": "",
        "stop_limit_s": 30.0,
        "synchronous": True,
        "phase_limits_s": {},
    }


def test_absolute_checkpoint_directory_stays_as_it_is(tmp_path: Path) -> None:
    body = request("--checkpoint-dir", "/shared/c", "--name", "x", "--", "python3", "a.py", cwd=tmp_path)
    assert (body["checkpoint_directory"], body["name"]) == ("/shared/c", "x")
    assert Path(body["argv"][0]).is_absolute()


def test_interpreter_of_a_virtual_environment_is_not_resolved_to_the_system_one(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert absolute_program("bin/python", tmp_path) == str(tmp_path / "bin" / "python")


def test_program_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="no-such-program"):
        absolute_program("no-such-program", tmp_path)


@pytest.mark.parametrize("pair", ["A", "=x", ""])
def test_environment_that_is_no_pair_is_wrong_usage(pair: str) -> None:
    with pytest.raises(WrongUsage, match="NAME=VALUE"):
        environment_from([pair])


@pytest.mark.parametrize(
    ("command", "name"),
    [(["python", "/a/train_gpt.py", "b.py"], "train_gpt"), (["python", "-m", "mod"], "python"), (["/x/run"], "run")],
)
def test_job_is_named_after_its_script(command: list[str], name: str) -> None:
    assert script_name(command) == name


def test_range_of_nodes_and_limits_of_phases_are_captured(tmp_path: Path) -> None:
    body = request(
        "--checkpoint-dir", "c", "--nodes", "2..4", "--multiple-of", "2", "--step-limit", "40",
        "--compile-limit", "900", "--asynchronous", "--", "python3", "a.py",
        cwd=tmp_path,
    )  # fmt: skip
    assert body["nodes"] == {"min": 2, "max": 4, "multiple_of": 2}
    assert (body["synchronous"], body["phase_limits_s"]) == (False, {"step_s": 40.0, "compile_s": 900.0})


@pytest.mark.parametrize("words", [("two",), ("2..",), ("2..x",), ("4", "--multiple-of", "2")])
def test_nodes_that_are_no_number_and_no_range_are_wrong_usage(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(WrongUsage, match="--nodes"):
        request("--checkpoint-dir", "c", "--nodes", *words, "--", "python3", "a.py", cwd=tmp_path)
