"""What a script or its user gets wrong with `Run`: each ends with a sentence that says what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints, read_manifest


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)


def start(root: Path, *, total_steps: int = 2, model: nn.Module | None = None, **options: Any) -> everstep.Run:
    run = everstep.Run(total_steps=total_steps, save_every=1, checkpoint_directory=root, **options)
    run.track(model=model or nn.Linear(2, 2), optimizer=None, scheduler=None, sampler=None)
    return run


def train(root: Path, **options: Any) -> None:
    run = start(root, **options)
    run.resume()
    list(run.steps())
    run._stop()


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"total_steps": 0}, "total_steps=0.*whole number of at least 1"),
        ({"total_steps": 1e4}, r"total_steps=10000\.0.*whole number"),
        ({"keep": 0}, "keep=0.*at least 1"),
        ({"save_every": 0}, "at least 1 step"),
        ({"save_every": 2.5}, r"save_every is 2\.5.*whole number of steps"),
        ({"save_every": None}, "save_every is None"),
        ({"save_every": "often"}, "save_every is 'often'.*'auto'"),
        ({"when_busy": "hurry"}, "when_busy='hurry'.*'wait' or 'skip'"),
    ],
)
def test_odd_arguments_are_refused_with_what_to_give(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(everstep.UsageError, match=advice):
        everstep.Run(**{"total_steps": 10, **options})


def a_file(root: Path) -> Path:
    (root / "file").write_text("")
    return root / "file"


def under_a_file(root: Path) -> Path:
    return a_file(root) / "checkpoints"


def unwritable(root: Path) -> Path:
    return Path("/proc/1/checkpoints")


@pytest.mark.parametrize("place", [a_file, under_a_file, unwritable])
def test_directory_that_cannot_be_used_is_named_before_the_first_step(
    tmp_path: Path, place: Callable[[Path], Path]
) -> None:
    directory = place(tmp_path)
    with pytest.raises(everstep.UsageError, match="Cannot use checkpoint directory") as refused:
        start(directory).resume()
    assert str(directory) in str(refused.value)


def test_run_that_was_longer_before_is_refused_and_one_that_is_complete_has_nothing_to_do(tmp_path: Path) -> None:
    train(tmp_path, total_steps=3)
    again = start(tmp_path, total_steps=3)
    assert again.resume() == 3
    assert list(again.steps()) == []
    with pytest.raises(everstep.UsageError, match=r"taken after step 3, and total_steps is 2: raise it"):
        start(tmp_path, total_steps=2).resume()


def test_job_that_starts_in_the_directory_of_another_is_refused_and_so_is_anothers_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_JOB", "job-1")
    monkeypatch.setenv("EVERSTEP_GENERATION", "1")
    train(tmp_path)
    monkeypatch.setenv("EVERSTEP_JOB", "job-2")
    with pytest.raises(everstep.UsageError, match=r"holds checkpoints of job job-1, and this job, job-2, starts"):
        start(tmp_path).resume()
    monkeypatch.setenv("EVERSTEP_GENERATION", "2")
    monkeypatch.setenv("EVERSTEP_RESUME", "1:1")
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(everstep.UsageError, match=r"saved by job job-1, not by job-2.*directory of its own"):
        start(tmp_path, model=model).resume()
    assert model.weight.equal(before), "nothing of it was loaded"


def test_script_that_goes_on_by_hand_from_a_job_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_JOB", "job-1")
    monkeypatch.setenv("EVERSTEP_GENERATION", "1")
    train(tmp_path)
    monkeypatch.delenv("EVERSTEP_JOB")
    monkeypatch.delenv("EVERSTEP_GENERATION")
    with pytest.warns(UserWarning, match="is one of job job-1: this run goes on from it and saves beside it"):
        assert start(tmp_path).resume() == 2


def test_checkpoint_of_another_torch_is_loaded_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    train(tmp_path)
    monkeypatch.undo()
    manifest = read_manifest(CheckpointName(generation=1, step=2).directory(tmp_path))
    assert manifest.torch_version == "2.9.1"
    with pytest.warns(UserWarning, match=r"saved with torch 2\.9\.1 and is resumed with .*last bits"):
        assert start(tmp_path).resume() == 2


def test_state_of_another_model_is_refused_with_what_to_build(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(everstep.UsageError, match="Build the same model"):
        start(tmp_path, model=nn.Linear(3, 3)).resume()


def test_state_that_cannot_be_saved_is_named_when_training_begins_and_not_at_the_first_save(tmp_path: Path) -> None:
    run = start(tmp_path, model=nn.LazyLinear(2))
    run.resume()
    with pytest.raises(everstep.UnsupportedState, match=r"model/weight.*run one batch through the model"):
        next(run.steps())
    assert complete_checkpoints(tmp_path) == []


# --- The loop ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[everstep.Run]:
    run = start(tmp_path, total_steps=4)
    run.resume()
    yield run
    run._finished = True  # these are left on purpose
    run._stop()


def test_generator_that_ends_is_no_loader(run: everstep.Run) -> None:
    batches = zip(run.steps(), run.batches(iter([1, 2])), strict=False)
    assert [next(batches)[1], next(batches)[1]] == [1, 2]
    with pytest.raises(everstep.UsageError, match="give it a loader that can be iterated again and again"):
        next(batches)


def test_thing_that_cannot_be_iterated_is_no_loader(run: everstep.Run) -> None:
    with pytest.raises(everstep.UsageError, match=r"run\.batches cannot iterate a int"):
        next(run.batches(5))  # type: ignore[arg-type]


def test_loop_per_epoch_is_refused_instead_of_losing_a_step_at_each_end(run: everstep.Run) -> None:
    assert len(list(zip(run.steps(), range(2), strict=False))) == 2
    with pytest.raises(everstep.UsageError, match=r"iterated before, up to step 2 of 4.*run\.batches\(loader\)"):
        next(run.steps())


def test_report_outside_of_a_step_is_refused(run: everstep.Run) -> None:
    with pytest.raises(everstep.UsageError, match=r"within the loop over run\.steps"):
        run.report(loss=1.0)
    for _ in run.steps():
        run.report(loss=1.0)
    with pytest.raises(everstep.UsageError, match=r"within the loop over run\.steps"):
        run.report(loss=1.0)


def test_batch_fetched_before_its_step_is_warned_of_once(run: everstep.Run) -> None:
    with pytest.warns(UserWarning, match=r"Write zip\(run\.steps\(\), run\.batches\(loader\)\)") as caught:
        for _ in zip(run.batches([1, 2]), run.steps(), strict=False):
            continue
    assert len([one for one in caught if "is fetched before step" in str(one.message)]) == 1


def test_script_that_ends_early_is_told_what_it_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_LOG_DIR", str(tmp_path / "log"))
    run = start(tmp_path / "c", total_steps=4)
    run.resume()
    for step in run.steps():
        if step == 3:
            break
    with pytest.warns(UserWarning, match="ends after step 2 of 4: the run is not finished"):
        run._stop()  # what the end of the process does
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log" / "rank-0.jsonl").read_text().splitlines()]
    assert "finished" not in kinds
