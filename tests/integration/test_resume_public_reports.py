"""What users of comparable systems reported of checkpoints and resuming, each with real files and real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from launches import wait_until
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.saver import Saver, SaveSettings
from everstep.checkpoint.verify import verify
from everstep.ranks import Team


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(root: Path, *, total_steps: int, model: nn.Module | None = None, **options: Any) -> everstep.Run:
    run = everstep.Run(total_steps=total_steps, save_every=2, checkpoint_directory=root, **options)
    run.track(model=model or nn.Linear(2, 2), optimizer=None, scheduler=None, sampler=None)
    return run


def train(root: Path, *, total_steps: int, **options: Any) -> everstep.Run:
    """Resume and train to the end, as a script would whose process then ends."""
    run = start(root, total_steps=total_steps, **options)
    run.resume()
    for _ in run.steps():
        assert run._saver is not None
        run._saver.settle()
    run._stop()
    return run


def names(root: Path) -> list[str]:
    return [str(manifest.name) for manifest in complete_checkpoints(root)]


def test_case_R16_checkpoint_with_a_shard_missing_is_refused_on_every_rank_by_name(tmp_path: Path) -> None:
    def sharded() -> nn.Module:
        model = nn.Linear(64, 64)
        fully_shard(model)
        return model

    def work(rank: int, *, resume: str) -> int:
        os.environ.update({"EVERSTEP_GENERATION": "2", "EVERSTEP_RESUME": resume} if resume else {})
        run = start(tmp_path / "c", total_steps=2, model=sharded())
        done = run.resume()
        if not resume:
            list(run.steps())
        return done

    assert run_ranks(tmp_path, lambda rank: work(rank, resume=""), world_size=2) == [0, 0]
    directory = CheckpointName(generation=1, step=2).directory(tmp_path / "c")
    assert verify(directory).world_size == 2
    (directory / "shard-00001.bin").unlink()
    with pytest.raises(everstep.CheckpointDamaged, match=r"shard-00001\.bin is missing"):
        verify(directory)
    for error in run_ranks(tmp_path, lambda rank: work(rank, resume="1:2"), world_size=2):
        assert isinstance(error, everstep.CheckpointDamaged)
        assert "shard-00001.bin is missing" in str(error) and "Choose another checkpoint" in str(error)
    assert run_ranks(tmp_path, lambda rank: work(rank, resume="1:0"), world_size=2) == [0, 0]


def test_case_R35_newest_is_chosen_by_its_manifest_without_any_tag_and_each_start_has_a_number_of_its_own(
    tmp_path: Path,
) -> None:
    train(tmp_path, total_steps=4)
    (tmp_path / "latest").write_text("generation-00001/step-00000099")
    os.utime(CheckpointName(generation=1, step=0).directory(tmp_path))
    second = start(tmp_path, total_steps=6)
    assert (second.resume(), second.generation) == (4, 2)
    (CheckpointName(generation=1, step=4).directory(tmp_path) / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "generation-00002")
    third = start(tmp_path, total_steps=6)
    assert third.resume() == 2
    fourth = start(tmp_path, total_steps=6)
    assert (fourth.resume(), fourth.generation) == (2, third.generation + 1), "though the one before saved nothing"


def test_case_R37_pinned_copy_outlives_newer_ones_and_a_new_start_writes_to_a_root_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_RUN_DIR", str(tmp_path))
    (tmp_path / "pinned.json").write_text(json.dumps({"keep": ["1:2"]}))
    root = tmp_path / "c"
    train(root, total_steps=8, keep=2)
    assert names(root) == ["1:2", "1:6", "1:8"], "1:6 and 1:8 are those found bad; the last good one is 1:2"
    monkeypatch.setenv("EVERSTEP_GENERATION", "2")
    monkeypatch.setenv("EVERSTEP_RESUME", "1:2")
    before = {path: path.stat().st_mtime_ns for path in (root / "generation-00001").rglob("*") if path.is_file()}
    train(root, total_steps=4, keep=10)
    assert "2:4" in names(root)
    after = {path: path.stat().st_mtime_ns for path in (root / "generation-00001").rglob("*") if path.is_file()}
    assert after == before, "nothing of what is in doubt was written over"


def test_case_R38_save_that_was_killed_half_way_is_passed_by_and_said_so(tmp_path: Path) -> None:
    def save_slowly() -> None:
        model = nn.Linear(2048, 2048)
        settings: dict[str, Any] = {"root": tmp_path, "job": "local", "total_steps": 6, "parent": None, "keep": 10}
        first = Saver(SaveSettings(**settings), Team())
        first.save(CheckpointName(generation=1, step=2), {"model": model})
        first.settle()
        first.close()
        slow = Saver(SaveSettings(**settings, bytes_per_s=4 << 20), Team())
        slow.save(CheckpointName(generation=1, step=4), {"model": model})
        slow.settle()

    def half_written() -> bool:
        shards = list(tmp_path.glob("generation-00001/.writing-step-00000004-*/shard-00000.bin"))
        return bool(shards) and shards[0].stat().st_size >= 8 << 20  # of 16 MiB

    pid = os.fork()
    if not pid:
        save_slowly()
        os._exit(0)
    wait_until(half_written, limit_s=120)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    run = start(tmp_path, total_steps=6, model=nn.Linear(2048, 2048))
    with pytest.warns(UserWarning, match=r"The save of 1:4 .* was never finished: .* goes on from checkpoint 1:2"):
        assert run.resume() == 2
    assert names(tmp_path) == ["1:2"]


def test_case_R41_run_whose_last_step_cannot_be_saved_does_not_say_that_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 alone makes no success: the server waits for the word `finished`."""
    monkeypatch.setenv("EVERSTEP_LOG_DIR", str(tmp_path / "log"))
    root = tmp_path / "c"
    run = start(root, total_steps=3)
    run.resume()
    with pytest.warns(UserWarning, match="Step 3, the last one, could not be saved"):
        for step in run.steps():
            assert run._saver is not None
            run._saver.settle()
            if step == 3:
                shutil.rmtree(root / "generation-00001")
                (root / "generation-00001").write_text("in the way, as a full disk would be")
    run._stop()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log" / "rank-0.jsonl").read_text().splitlines()]
    assert "save_failed" in kinds and "finished" not in kinds
