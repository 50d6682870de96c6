"""`Run` in this process, without a runner: what is saved, what is resumed, what is noticed. Real files and torch."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import wait_until
from torch import nn

import everstep
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.reader import read_checkpoint
from everstep.checkpoint.saver import Saver, SaveSettings
from everstep.ranks import Team

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_gpt.py"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)  # it tells each tensor's name
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs the example in this process; returns its rank log."""
    spec = importlib.util.spec_from_file_location("train_tiny_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments: str, log: str) -> list[dict[str, Any]]:
        monkeypatch.setenv("EVERSTEP_LOG_DIR", str(tmp_path / log))
        monkeypatch.setattr(
            sys, "argv", ["train_tiny_gpt.py", "--step-time", "0", "--device", "cpu", "--batch", "4", *arguments]
        )
        module.main()
        return [json.loads(line) for line in (tmp_path / log / "rank-0.jsonl").read_text().splitlines()]

    return run


def steps_of(log: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {
        line["step"]: (line["loss_hex"], line["learning_rate"], line["span_start"], line["grad_norm"])
        for line in log
        if line["kind"] == "step"
    }


def resumed(log: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in log if line["kind"] == "resumed")


def test_resumed_example_repeats_the_uninterrupted_one_and_each_forgotten_part_is_named(
    example: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = ["--checkpoints", str(tmp_path / "c"), "--steps", "8", "--save-every", "4"]
    whole = example(*checkpoints, log="whole")
    kinds = [line["kind"] for line in whole if line["kind"] not in ("step", "phase", "rehashed")]
    assert kinds == ["start", "resumed", *["saved"] * 3, "finished"]
    rehashed = [line["ok"] for line in whole if line["kind"] == "rehashed"]
    assert rehashed and all(rehashed), "in the background: a run does not wait for the last ones"
    assert len(steps_of(whole)) == 8
    assert resumed(whole)["saved_digest"] == {} and resumed(whole)["deterministic"] is True

    for number, forgotten in enumerate(["", "optimizer", "scheduler", "sampler"], start=2):
        monkeypatch.setenv("EVERSTEP_GENERATION", str(number))
        monkeypatch.setenv("EVERSTEP_RESUME", "1:4")
        log = example(*checkpoints, *(["--forget", forgotten] if forgotten else []), log=f"again-{forgotten}")
        record = resumed(log)
        assert (record["step"], record["parent_generation"], record["generation"]) == (4, 1, number)
        assert set(record["saved_digest"]) == {"model", "optimizer", "scheduler", "sampler", "rng"}
        differing = {part for part, value in record["saved_digest"].items() if record["live_digest"][part] != value}
        assert differing == ({forgotten} if forgotten else set())
        replayed = {step: numbers for step, numbers in steps_of(whole).items() if step > 4}
        assert (steps_of(log) == replayed) is not bool(forgotten)


def test_script_alone_goes_on_from_its_newest_checkpoint(
    example: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    checkpoints = ["--checkpoints", str(tmp_path / "c"), "--save-every", "3"]
    example(*checkpoints, "--steps", "4", log="first")
    log = example(*checkpoints, "--steps", "6", log="second")
    assert (resumed(log)["step"], resumed(log)["generation"], sorted(steps_of(log))) == (4, 2, [5, 6])
    assert [str(m.name) for m in complete_checkpoints(tmp_path / "c")] == ["1:0", "1:3", "1:4", "2:6"]
    assert complete_checkpoints(tmp_path / "c")[-1].parent == CheckpointName(generation=1, step=4)


def test_corpus_is_frozen_at_the_first_start(example: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    checkpoints = ["--checkpoints", str(tmp_path / "c"), "--steps", "1"]
    example(*checkpoints, log="first")
    text = (tmp_path / "c" / "corpus.txt").read_text()
    assert len(text) > 20_000
    (tmp_path / "c" / "corpus.txt").write_text(text[::-1])
    example(*checkpoints, log="second")
    assert (tmp_path / "c" / "corpus.txt").read_text() == text[::-1]


# --- Run by itself ------------------------------------------------------------------------------------------------


def small_parts() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def train(run: everstep.Run, parts: dict[str, Any], until: int = 10**9) -> None:
    for step in itertools.takewhile(lambda step: step <= until, run.steps()):
        parts["optimizer"].zero_grad()
        loss = parts["model"](torch.randn(4, 2)).square().mean()
        loss.backward()
        parts["optimizer"].step()
        run.report(loss=loss)
        assert run.step == step - 1


def start(root: Path, *, total_steps: int = 4, **options: Any) -> tuple[everstep.Run, dict[str, Any]]:
    run = everstep.Run(total_steps=total_steps, save_every=2, checkpoint_directory=root, **options)
    parts = small_parts()
    run.track(**parts, scheduler=None, sampler=None)
    return run, parts


def test_failed_save_warns_and_training_goes_on(tmp_path: Path) -> None:
    run, parts = start(tmp_path)
    run.resume()
    (tmp_path / "generation-00001" / "step-00000002").write_text("in the way")
    with pytest.warns(UserWarning, match=r"Checkpoint 1:2 was not saved .*NotADirectoryError.*Training goes on"):
        train(run, parts)
    assert [str(m.name) for m in complete_checkpoints(tmp_path)] == ["1:0", "1:4"]


def test_named_checkpoint_that_is_not_there_is_an_error_and_no_start_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_GENERATION", "2")
    monkeypatch.setenv("EVERSTEP_RESUME", "1:60")
    run, _ = start(tmp_path)
    with pytest.raises(everstep.CheckpointMissing, match="step-00000060"):
        run.resume()


def test_plan_that_names_no_checkpoint_starts_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parts = start(tmp_path)
    run.resume()
    train(run, parts)
    monkeypatch.setenv("EVERSTEP_GENERATION", "2")
    monkeypatch.setenv("EVERSTEP_RESUME", "")
    run, parts = start(tmp_path)
    assert run.resume() == 0
    train(run, parts)
    assert CheckpointName(generation=2, step=0) in [m.name for m in complete_checkpoints(tmp_path)]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("pattern", ["shard-*.bin", "rank-*.json"])
def test_damaged_file_is_refused(tmp_path: Path, pattern: str, damage: str) -> None:
    run, parts = start(tmp_path, total_steps=1)
    run.resume()
    train(run, parts)
    directory = CheckpointName(generation=1, step=1).directory(tmp_path)
    path = next(directory.glob(pattern))
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    run, _ = start(tmp_path, total_steps=2)
    with pytest.raises(everstep.CheckpointDamaged, match="Choose another"):
        run.resume()


def test_state_that_does_not_fit_says_what_to_do(tmp_path: Path) -> None:
    run, parts = start(tmp_path, total_steps=1)
    run.resume()
    train(run, parts)
    run = everstep.Run(total_steps=2, checkpoint_directory=tmp_path)
    model = nn.Linear(3, 1)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), scheduler=None, sampler=None)
    with pytest.raises(everstep.UsageError, match="Build the same model"):
        run.resume()


def test_leaving_a_part_out_says_what_will_go_wrong(tmp_path: Path) -> None:
    run = everstep.Run(total_steps=1, checkpoint_directory=tmp_path)
    run.track(model=nn.Linear(1, 1))
    with pytest.warns(UserWarning) as caught:
        run.resume()
    said = " ".join(str(warning.message) for warning in caught)
    assert "moments are lost" in said and "learning rate starts over" in said and "repeats samples" in said


def test_optimizer_that_nobody_saves_is_noticed_in_the_first_step(tmp_path: Path) -> None:
    run, parts = start(tmp_path, total_steps=1)
    run.resume()
    parts["optimizer"] = torch.optim.SGD(parts["model"].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="not the tracked optimizer"):
        train(run, parts)


def test_batches_of_a_sampler_that_nobody_saves_are_noticed(tmp_path: Path) -> None:
    run = everstep.Run(total_steps=1, checkpoint_directory=tmp_path)
    sampler = everstep.ReplayableSampler(40, global_batch_size=4)
    run.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, sampler=sampler)
    run.resume()
    next(steps := run.steps())
    with pytest.raises(everstep.UsageError, match=r"span=batch\.span"):
        run.report(loss=1.0)
    steps.close()
    run.resume()
    next(run.steps())
    with pytest.warns(UserWarning, match="skipped or repeated"):
        run._numbers = None
        run.report(span=everstep.SampleSpan(epoch=0, start=8, stop=12))


def test_refuses_steps_before_resume_and_a_second_report(tmp_path: Path) -> None:
    run, _ = start(tmp_path)
    with pytest.raises(everstep.UsageError, match=r"Call run\.resume"):
        next(run.steps())
    run.resume()
    next(run.steps())
    run.report(loss=1.0)
    with pytest.raises(everstep.UsageError, match="once per step"):
        run.report(loss=1.0)


def test_loop_left_early_is_neither_finished_nor_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_LOG_DIR", str(tmp_path / "logs"))
    run, parts = start(tmp_path / "c")
    run.resume()
    train(run, parts, until=3)
    run._stop()  # what the end of the process does
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "logs" / "rank-0.jsonl").read_text().splitlines()]
    assert "finished" not in kinds
    assert [m.name.step for m in complete_checkpoints(tmp_path / "c")] == [0, 2]


def test_batches_of_a_prefetching_loader_bring_their_span(tmp_path: Path) -> None:
    sampler = everstep.ReplayableSampler(40, global_batch_size=4)
    loader = torch.utils.data.DataLoader(
        everstep.SpannedDataset(range(40)),  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=list,
        num_workers=1,
        prefetch_factor=4,
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    run = everstep.Run(total_steps=3, save_every=100, checkpoint_directory=tmp_path)
    run.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, sampler=sampler)
    run.resume()
    for _, (span, samples) in zip(run.steps(), loader, strict=False):
        assert samples == list(sampler.batch(span))
        run.report(span=span)
        assert sampler.position == span.stop


def test_retention_keeps_the_newest_and_what_was_resumed_from(tmp_path: Path) -> None:
    run, parts = start(tmp_path, keep=2)
    run.resume()
    train(run, parts)
    assert [str(m.name) for m in complete_checkpoints(tmp_path)] == ["1:2", "1:4"]
    run, parts = start(tmp_path, total_steps=10, keep=2)
    run.resume()
    train(run, parts)
    assert [str(m.name) for m in complete_checkpoints(tmp_path)] == ["1:4", "2:8", "2:10"]


# --- Kill and several ranks, by fork: torch is loaded here and runs on one thread ------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Start `work` in a forked child, which exits with 0 only if it returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as err:
        print(f"child: {type(err).__name__}: {err}", file=sys.__stderr__, flush=True)
    finally:
        os._exit(code)


def wait_for(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_kill_in_the_middle_of_saving_never_leaves_a_checkpoint_that_is_wrong(tmp_path: Path) -> None:
    def save_for_ever(first: int) -> None:
        state = nn.Linear(700, 700)
        # Half a second for each: the writer goes on until the killed rank is gone, which takes a tenth and more.
        settings = SaveSettings(root=tmp_path, job="j", total_steps=1, parent=None, keep=10**6, bytes_per_s=4e6)
        saver = Saver(settings, Team())
        for step in itertools.count(first):
            nn.init.constant_(state.weight, step)
            saver.save(CheckpointName(generation=1, step=step), {"model": state, "tail": nn.Linear(1, 1)})

    left_over = 0
    for attempt in range(8):
        first = 1000 * attempt
        pid = in_child(lambda first=first: save_for_ever(first))  # type: ignore[misc]
        began = CheckpointName(generation=1, step=first).directory(tmp_path)
        wait_until((began / "manifest.json").exists, limit_s=30)
        time.sleep(0.013 * attempt)
        os.kill(pid, signal.SIGKILL)
        assert wait_for([pid]) == [-signal.SIGKILL]
        left_over += len(list(tmp_path.glob("generation-*/.writing-*")))
    found = complete_checkpoints(tmp_path)
    assert found and left_over, "the kills must have hit both, or this proves nothing"
    for manifest in found[-8:]:
        model = nn.Linear(700, 700)
        directory = manifest.name.directory(tmp_path)
        states = read_checkpoint(directory, rank=0, world_size=1, tracked={"model": model}).states
        assert states["model"]["weight"].eq(manifest.name.step).all()


def in_ranks(tmp_path: Path, work: Callable[[int], None], *, world_size: int = 2) -> list[int]:
    """Exit codes of forked ranks that ran `work(rank)` in one gloo process group."""
    meeting_point = tmp_path / f"store-{uuid.uuid4()}"

    def rank_main(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        store = torch.distributed.FileStore(str(meeting_point), world_size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        work(rank)
        torch.distributed.barrier()

    return wait_for([in_child(lambda rank=rank: rank_main(rank)) for rank in range(world_size)])  # type: ignore[misc]


def test_what_differs_between_ranks_is_saved_and_restored_for_each(tmp_path: Path) -> None:
    """Batch norm's averages under DDP are each rank's own; torch's checkpoint alone would keep one rank's."""

    def work(rank: int) -> None:
        def new_model() -> nn.Module:
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

        model = new_model()
        model[1].running_mean.fill_(rank + 1)  # type: ignore[index,union-attr,operator]
        run = everstep.Run(total_steps=1, checkpoint_directory=tmp_path / "c")
        run.track(model=torch.nn.parallel.DistributedDataParallel(model), optimizer=None, scheduler=None, sampler=None)
        model[1].running_mean.fill_(rank + 1)  # type: ignore[index,union-attr,operator]
        run.resume()
        list(run.steps())
        fresh = new_model()
        run = everstep.Run(total_steps=1, checkpoint_directory=tmp_path / "c")
        run.track(model=fresh, optimizer=None, scheduler=None, sampler=None)
        assert run.resume() == 1
        assert fresh[1].running_mean.eq(rank + 1).all()  # type: ignore[index,union-attr,operator]

    assert in_ranks(tmp_path, work) == [0, 0]
    manifest = complete_checkpoints(tmp_path / "c")[-1]
    assert manifest.world_size == 2
    sizes = [entry.size_bytes for entry in manifest.files if entry.name.startswith("shard-")]
    assert len(sizes) == 2 and min(sizes) > 0, "each rank writes its own part"


def test_one_rank_that_cannot_save_fails_the_save_on_all_and_hangs_none(tmp_path: Path) -> None:
    class Unsavable(nn.Linear):
        def get_extra_state(self) -> Any:
            return object() if torch.distributed.get_rank() == 1 and self.bias.eq(2).any() else 0

        def set_extra_state(self, state: Any) -> None:
            return None

    def work(rank: int) -> None:
        model = Unsavable(1, 1)
        run = everstep.Run(total_steps=2, save_every=1, checkpoint_directory=tmp_path / "c")
        run.track(model=model, optimizer=None, scheduler=None, sampler=None)
        run.resume()
        for step in run.steps():
            nn.init.constant_(model.bias, 2 if step == 1 else 0)

    assert in_ranks(tmp_path, work) == [0, 0]
    assert [m.name.step for m in complete_checkpoints(tmp_path / "c")] == [0, 2]


def test_four_ranks_that_warm_up_resume_bit_equal(tmp_path: Path) -> None:
    """Without the warm-up, DDP's first buckets sum in another order than those of the run that was not interrupted."""

    def train_some(rank: int, *, log: str, total_steps: int) -> None:
        os.environ["EVERSTEP_LOG_DIR"] = str(tmp_path / log)
        run = everstep.Run(total_steps=total_steps, save_every=3, checkpoint_directory=tmp_path / "c", seed=3)
        model = torch.nn.parallel.DistributedDataParallel(
            nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12))), bucket_cap_mb=0.01
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer, scheduler=None, sampler=None)
        run.warm_up(lambda: model(torch.randn(4, 32)).square().mean().backward())
        run.resume()
        for _ in run.steps():
            optimizer.zero_grad()
            loss = (model(torch.randn(8, 32)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            run.report(loss=loss)

    def losses(log: str, rank: int) -> dict[int, str]:
        lines = [json.loads(line) for line in (tmp_path / log / f"rank-{rank}.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss_hex"] for line in lines if line["kind"] == "step"}

    assert in_ranks(tmp_path, lambda r: train_some(r, log="whole", total_steps=20), world_size=4) == [0] * 4
    for directory in (tmp_path / "c" / "generation-00001").glob("step-*"):
        if int(directory.name.removeprefix("step-")) > 3:
            (directory / "manifest.json").unlink()
    assert in_ranks(tmp_path, lambda r: train_some(r, log="again", total_steps=20), world_size=4) == [0] * 4
    for rank in range(4):
        assert sorted(losses("again", rank)) == list(range(4, 21))
        assert losses("again", rank).items() <= losses("whole", rank).items()
