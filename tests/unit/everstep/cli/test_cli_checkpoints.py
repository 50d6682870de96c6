"""`everstep checkpoint list|verify` over small checkpoints: what it says, and its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.lineage import record_lineage
from everstep.checkpoint.manifest import CheckpointName
from everstep.cli.main import main
from tests.fakes.small_checkpoints import write_checkpoint

PARENT = CheckpointName(generation=1, step=20)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Generation 2 went on from 1:20; a ghost of generation 1 wrote 1:40 meanwhile."""
    monkeypatch.delenv("EVERSTEP_RUN_DIR", raising=False)
    root = tmp_path / "checkpoints"
    root.mkdir()
    record_lineage(root, 1, parent=None)
    write_checkpoint(root, "1:20")
    write_checkpoint(root, "1:40")
    record_lineage(root, 2, parent=PARENT)
    write_checkpoint(root, "2:30", parent="1:20")
    return root


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def listed(run: Any, *words: object) -> dict[str, dict[str, Any]]:
    code, out, _ = run("list", *words, "-o", "json")
    assert code == 0
    return {one["checkpoint"]: one for one in json.loads(out)}


def test_list_tells_what_training_went_through_from_a_ghosts_writing(root: Path, run: Any) -> None:
    found = listed(run, root)
    assert {name: (one["state"], one["on_line"]) for name, one in found.items()} == {
        "1:20": ("complete", True),
        "1:40": ("complete", False),
        "2:30": ("complete", True),
    }
    assert found["2:30"]["parent"] == "1:20" and found["2:30"]["world_size"] == 2
    assert found["2:30"]["pinned"] is None, "nobody said where pins are"
    code, out, _ = run("list", root)
    assert code == 0
    assert out.splitlines()[0].split() == ["CHECKPOINT", "STATE", "WORLD", "SIZE", "AGE", "ON", "LINE", "PINNED", "WHY"]
    assert "no" in out.splitlines()[2].split()


def test_list_names_pins(root: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pinned.json").write_text('{"keep": ["1:20"]}')
    found = listed(run, root, "--run-directory", tmp_path)
    assert [name for name, one in found.items() if one["pinned"]] == ["1:20"]
    monkeypatch.setenv("EVERSTEP_RUN_DIR", str(tmp_path))
    assert [name for name, one in listed(run, root).items() if one["pinned"]] == ["1:20"]


def test_list_says_what_is_unfinished_and_what_is_damaged(root: Path, run: Any) -> None:
    second = root / "generation-00002"
    shutil.copytree(second / "step-00000030", second / ".writing-step-00000060-ab")
    (second / ".writing-step-00000060-ab" / "manifest.json").unlink()
    shutil.copytree(second / "step-00000030", second / "step-00000050")
    shutil.copytree(second / ".writing-step-00000060-ab", second / "step-00000040")
    (root / "generation-00001" / "step-00000040" / "shard-00001.bin").unlink()
    found = listed(run, root)
    assert {name: one["state"] for name, one in found.items()} == {
        "1:20": "complete",
        "1:40": "damaged",
        "2:30": "complete",
        "2:40": "unfinished",
        "2:50": "damaged",
        "2:60": "unfinished",
    }
    assert "shard-00001.bin is missing" in found["1:40"]["why"]
    assert "holds checkpoint 2:30" in found["2:50"]["why"]
    assert "being written, or left half written" in found["2:60"]["why"]
    assert "it has no manifest" in found["2:40"]["why"]


def test_list_of_nothing_is_nothing_and_of_no_directory_an_error(tmp_path: Path, run: Any) -> None:
    code, out, _ = run("list", tmp_path)
    assert (code, out) == (0, f"There are no checkpoints in {tmp_path}.\n")
    code, _, err = run("list", tmp_path / "none")
    assert code == 3 and "There is no directory" in err


def test_verify_says_of_each_that_it_is_whole_and_which_is_off_the_line(root: Path, run: Any) -> None:
    code, out, err = run("verify", root)
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[1:4]] == [
        ["1:20", "whole"],
        ["1:40", "whole"],
        ["2:30", "whole"],
    ]
    assert "1:40 is off the line that training followed" in out
    assert "1:20 is off" not in out


def test_verify_names_each_fault_and_fails(root: Path, run: Any) -> None:
    directory = CheckpointName(generation=2, step=30).directory(root)
    flip(directory / "shard-00000.bin")
    (directory / "rank-00001.json").unlink()
    code, out, _ = run("verify", root)
    assert code == 1
    assert "2:30: shard-00000.bin is not what was saved: model/bias differs" in out
    assert "2:30: rank-00001.json is missing" in out
    assert run("verify", root, "--checkpoint", "1:20", "--checkpoint", "1:40")[0] == 0
    assert run("verify", root, "--checkpoint", "2:30", "--from-storage")[0] == 1
    assert run("verify", directory)[0] == 1
    assert run("verify", PARENT.directory(root))[0] == 0


def test_verify_says_from_which_save_a_swapped_shard_is(root: Path, run: Any) -> None:
    first = root / "generation-00001"
    shutil.copy(first / "step-00000040" / "shard-00001.bin", first / "step-00000020")
    code, out, _ = run("verify", root, "--checkpoint", "1:20", "-o", "json")
    (one,) = json.loads(out)
    assert (code, one["verdict"]) == (1, "damaged")
    assert one["faults"][0]["what"] == (
        "is not what was saved: model/weight differs: here lies model/weight in shard-00001.bin of checkpoint 1:40, "
        "so two saves are mixed"
    )


def test_verify_of_what_is_not_there_does_not_pass(root: Path, run: Any, tmp_path: Path) -> None:
    code, out, _ = run("verify", root, "--checkpoint", "1:99", "--checkpoint", "1:20")
    assert code == 3 and "1:99: manifest.json is not there" in out
    code, _, err = run("verify", tmp_path)
    assert code == 3 and "nothing was verified" in err
    code, _, err = run("verify", root, "--checkpoint", "latest")
    assert code == 2 and "say <generation>:<step>" in err
    code, _, err = run("verify", PARENT.directory(root), "--checkpoint", "1:20")
    assert code == 2 and "is one checkpoint already" in err


def test_verify_passes_over_a_save_under_way_and_says_so(root: Path, run: Any) -> None:
    aside = root / "generation-00002" / ".writing-step-00000060-ab"
    aside.mkdir()
    code, out, _ = run("verify", root)
    assert code == 0
    assert "generation-00002/.writing-step-00000060-ab is no checkpoint: being written, or left half written" in out


def test_verify_of_a_directory_finds_its_damaged_lineage_note(root: Path, run: Any) -> None:
    path = root / "generation-00002" / "lineage.json"
    path.write_text(path.read_text().replace("20", "40", 1))
    code, _, err = run("verify", root)
    assert code == 1 and "lineage.json cannot be read" in err
