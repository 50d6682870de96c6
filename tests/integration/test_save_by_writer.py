"""One rank and its node's writer: real processes, signals and files."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import has_ended, wait_until
from torch import nn

import everstep
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.reader import read_checkpoint
from everstep.checkpoint.saver import Saver, SaveSettings
from everstep.elastic.lease_files import boottime_ns
from everstep.ranks import Team


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def name(step: int) -> CheckpointName:
    return CheckpointName(generation=1, step=step)


def new_saver(root: Path, **changes: Any) -> Saver:
    return Saver(SaveSettings(root=root, job="j", total_steps=10, parent=None, keep=100, **changes), Team())


def writer_of(saver: Saver) -> int:
    assert saver._writer is not None and saver._writer.process is not None
    return saver._writer.process.pid


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(30, 30)


@pytest.fixture
def saver(tmp_path: Path, model: nn.Linear, request: pytest.FixtureRequest) -> Iterator[Saver]:
    """It has saved step 1 already; its writer can be stopped and killed."""
    made = new_saver(tmp_path, **getattr(request, "param", {}))
    assert made.save(name(1), {"model": model})
    made.settle()
    assert [news.kind for news in made.news()][:1] == ["saved"]
    yield made
    made.close()


def told(saver: Saver) -> dict[int, str]:
    """What has become of each step's save, and what was said of it."""
    return {news.name.step: f"{news.kind}: {news.problem}" for news in saver.news() if news.kind != "rehashed"}


def steps_on_disk(root: Path) -> list[int]:
    return [manifest.name.step for manifest in complete_checkpoints(root)]


def after(seconds: float, work: Any) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


def test_what_is_saved_is_the_state_of_the_moment_though_training_goes_on(
    tmp_path: Path, saver: Saver, model: nn.Linear
) -> None:
    nn.init.constant_(model.weight, 2.0)
    os.kill(writer_of(saver), signal.SIGSTOP)
    assert saver.save(name(2), {"model": model})
    nn.init.constant_(model.weight, 3.0)
    os.kill(writer_of(saver), signal.SIGCONT)
    saver.settle()
    loaded = read_checkpoint(name(2).directory(tmp_path), rank=0, world_size=1, tracked={"model": model})
    assert loaded.states["model"]["weight"].eq(2.0).all()


def test_killed_writer_costs_its_save_and_the_next_one_has_a_new_writer(
    tmp_path: Path, saver: Saver, model: nn.Linear
) -> None:
    first = writer_of(saver)
    os.kill(first, signal.SIGSTOP)
    assert saver.save(name(2), {"model": model})
    os.kill(first, signal.SIGKILL)
    saver.settle()
    assert told(saver) == {2: "failed: rank 0: its writer has died"}
    assert saver.save(name(3), {"model": model})
    saver.settle()
    assert told(saver) == {3: "saved: "}
    assert writer_of(saver) != first
    assert steps_on_disk(tmp_path) == [1, 3]


@pytest.mark.parametrize("saver", [{"when_busy": "skip"}], indirect=True)
def test_save_that_finds_another_unfinished_is_skipped_where_that_is_the_policy(
    tmp_path: Path, saver: Saver, model: nn.Linear
) -> None:
    os.kill(writer_of(saver), signal.SIGSTOP)
    assert saver.save(name(2), {"model": model})
    began = time.monotonic()
    assert not saver.save(name(3), {"model": model})
    assert time.monotonic() - began < 5
    os.kill(writer_of(saver), signal.SIGCONT)
    saver.settle()
    assert told(saver) == {
        2: "saved: ",
        3: "skipped: the save before it is still being written (ranks [0])",
    }
    assert steps_on_disk(tmp_path) == [1, 2]


@pytest.mark.parametrize("saver", [{"when_busy": "wait"}], indirect=True)
def test_save_that_finds_another_unfinished_waits_where_that_is_the_policy(
    tmp_path: Path, saver: Saver, model: nn.Linear
) -> None:
    writer = writer_of(saver)
    os.kill(writer, signal.SIGSTOP)
    assert saver.save(name(2), {"model": model})
    timer = after(0.5, lambda: os.kill(writer, signal.SIGCONT))
    assert saver.save(name(3), {"model": model})
    saver.settle()
    timer.join()
    assert steps_on_disk(tmp_path) == [1, 2, 3]


def test_storage_that_heals_before_patience_ends_costs_no_save(tmp_path: Path, model: nn.Linear) -> None:
    saver = new_saver(tmp_path / "store")
    (tmp_path / "store").write_text("in the way")
    assert saver.save(name(1), {"model": model})
    timer = after(0.2, (tmp_path / "store").unlink)
    saver.settle()
    timer.join()
    assert told(saver) == {1: "saved: "}
    saver.close()


def test_writer_dies_with_its_rank(tmp_path: Path, model: nn.Linear) -> None:
    pid = os.fork()
    if not pid:
        saver = new_saver(tmp_path)
        saver.save(name(1), {"model": model})
        (tmp_path / "pid.tmp").write_text(str(writer_of(saver)))
        (tmp_path / "pid.tmp").rename(tmp_path / "pid")
        time.sleep(60)
        os._exit(0)
    wait_until((tmp_path / "pid").exists, limit_s=30)
    writer = int((tmp_path / "pid").read_text())
    assert not has_ended(writer, limit_s=0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert has_ended(writer, limit_s=10)


def test_end_of_the_script_waits_for_what_is_under_way(tmp_path: Path, saver: Saver, model: nn.Linear) -> None:
    writer = writer_of(saver)
    os.kill(writer, signal.SIGSTOP)
    assert saver.save(name(2), {"model": model})
    timer = after(0.3, lambda: os.kill(writer, signal.SIGCONT))
    saver.close(limit_s=30)
    timer.join()
    assert steps_on_disk(tmp_path) == [1, 2]
    assert has_ended(writer, limit_s=10)


def test_writer_ends_though_a_forked_worker_still_holds_the_connection(
    tmp_path: Path, saver: Saver, model: nn.Linear
) -> None:
    writer = writer_of(saver)
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    try:
        began = time.monotonic()
        saver.close()
        assert has_ended(writer, limit_s=0)
        assert time.monotonic() - began < 4
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_end_of_a_forked_child_does_not_take_the_ranks_writer_along(tmp_path: Path) -> None:
    run = everstep.Run(total_steps=3, save_every=1, checkpoint_directory=tmp_path)
    run.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, sampler=None)
    run.resume()
    steps = run.steps()
    next(steps)
    pid = os.fork()
    if not pid:
        run._stop()  # what `atexit` calls in a child that ends by sys.exit
        os._exit(0)
    os.waitpid(pid, 0)
    assert list(steps) == [2, 3]
    assert steps_on_disk(tmp_path) == [0, 1, 2, 3]
    run._stop()


def test_saves_under_a_lease_need_no_more_descriptors_than_the_first(
    tmp_path: Path, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, file in (("CONTACT", "contact"), ("PROGRESS", "progress"), ("LEASE", "lease.json")):
        (tmp_path / file).write_bytes(b"{}" if variable == "LEASE" else bytes(16))
        monkeypatch.setenv(f"EVERSTEP_{variable}", str(tmp_path / file))
    made = new_saver(tmp_path / "c", look_at_lease=boottime_ns)

    def open_in_writer(step: int) -> int:
        assert made.save(name(step), {"model": model})
        made.settle()
        assert told(made) == {step: "saved: "}
        return len(list(Path(f"/proc/{writer_of(made)}/fd").iterdir()))

    try:
        first = open_in_writer(1)
        later = [open_in_writer(step) for step in range(2, 8)]
        assert max(later) <= first + 2, "it may be reading the last one again"
    finally:
        made.close()


def test_what_came_late_for_a_save_that_was_given_up_does_not_fill_the_store(
    tmp_path: Path, saver: Saver, model: nn.Linear
) -> None:
    late = name(2).directory(tmp_path).with_name(".writing-step-00000002-abcd1234")
    late.mkdir()
    (late / "shard-00001.bin").write_bytes(bytes(1000))
    assert saver.save(name(1), {"model": model})  # it fails, so that retention has no turn
    saver.settle()
    assert "complete checkpoint already" in told(saver)[1]
    assert not late.exists()


def test_node_without_a_place_for_its_writers_address_says_so_and_training_goes_on(
    tmp_path: Path, saver: Saver, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        os.kill(writer_of(saver), signal.SIGKILL)
        saver.save(name(2), {"model": model})  # it may have begun before the death was seen
        saver.settle()
        told(saver)
        assert not saver.save(name(3), {"model": model})
    (said,) = told(saver).values()
    assert "no process could be started that writes checkpoints: FileNotFoundError" in said
    assert saver.save(name(4), {"model": model})
    saver.settle()
    assert told(saver) == {4: "saved: "}
