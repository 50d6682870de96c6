"""A store that lies about its space, and one that has become slow: real processes, and a kernel that answers so."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import wait_until
from torch import nn

import everstep
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.saver import News, Saver, SaveSettings
from everstep.ranks import Team

STORAGE = """
import errno, os, time
_write, _fsync, _script = os.write, os.fsync, {script!r}

def _said(fd):
    '''What the script says of a file: "full", seconds that its sync takes, or nothing.'''
    try:
        path, lines = os.readlink(f"/proc/self/fd/{{fd}}"), open(_script).read().splitlines()
    except OSError:
        return ""
    return next((line.split(" ")[1] for line in lines if line.split(" ")[0] in path), "")

def write(fd, data):
    if _said(fd) == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _write(fd, data)

def fsync(fd):
    said = _said(fd)
    time.sleep(float(said) if said not in ("", "full") else 0)
    return _fsync(fd)

os.write, os.fsync = write, fsync
"""
"""Loaded by the writer when it starts, in place of a storage system that can be filled and slowed down by order."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Say lines of `<part of a path> <full or seconds of a sync>`."""
    script = tmp_path / "storage"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STORAGE.format(script=str(script)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    script.touch()
    return script.write_text


def new_saver(root: Path, **changes: Any) -> Saver:
    return Saver(SaveSettings(root=root, job="j", total_steps=100, parent=None, keep=100, **changes), Team())


def name(step: int) -> CheckpointName:
    return CheckpointName(generation=1, step=step)


def news_of(saver: Saver) -> list[News]:
    saver.settle()
    return [news for news in saver.news() if news.kind != "rehashed"]


def test_case_R40_store_that_refuses_a_write_is_told_before_the_first_save_whatever_its_free_space_says(
    tmp_path: Path, storage: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_LOG_DIR", str(tmp_path / "logs"))
    storage(".write-test- full")
    free = os.statvfs(tmp_path)
    assert free.f_bavail * free.f_frsize > 1 << 20
    model = nn.Linear(4, 4)
    run = everstep.Run(total_steps=400, save_every=200, checkpoint_directory=tmp_path / "store")
    run.track(model=model, optimizer=None, scheduler=None, sampler=None)
    run.resume()
    with pytest.warns(UserWarning, match="cannot write checkpoints") as warned:
        for _ in run.steps():
            run.report(loss=1.0)
            time.sleep(0.002)
    text = next(str(one.message) for one in warned if "cannot write" in str(one.message))
    assert "OSError: [Errno 28] No space left on device" in text and "quota" in text
    lines = [json.loads(line) for line in (tmp_path / "logs" / "rank-0.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    failed = next(line for line in lines if line["kind"] == "save_failed")
    assert failed["step"] == 0 and "write test" in failed["reason"] and "No space left" in failed["reason"]
    assert kinds.count("step") == 400 and "finished" in kinds, "training went on, and saved where the store let it"
    assert kinds.index("save_failed") < kinds.index("saved")


def test_full_target_of_a_save_costs_that_save_and_not_the_training(
    tmp_path: Path, storage: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.checkpoint.saver._RETRY_AFTER_S", (0.05,))
    saver, model = new_saver(tmp_path / "store"), nn.Linear(4, 4)
    storage("shard- full")
    assert saver.save(name(1), {"model": model})
    told = news_of(saver)
    assert [(news.kind, news.name.step) for news in told] == [("failed", 1)] * len(told) and told
    assert "No space left on device" in told[0].problem
    storage("")
    assert saver.save(name(2), {"model": model})
    assert [news.kind for news in news_of(saver)] == ["saved"]
    assert [manifest.name.step for manifest in complete_checkpoints(tmp_path / "store")] == [2]
    saver.close()


def test_case_R11_slow_store_holds_training_up_for_the_copy_only_and_shows_in_the_time_of_the_save(
    tmp_path: Path, storage: Callable[[str], Any]
) -> None:
    saver, model = new_saver(tmp_path / "store", when_busy="skip"), nn.Linear(4, 4)
    assert saver.save(name(1), {"model": model})
    (usual,) = news_of(saver)
    storage("shard- 2.0")
    began = time.monotonic()
    assert saver.save(name(2), {"model": model})
    assert not saver.save(name(3), {"model": model}), "it finds the one before it unfinished, and is skipped"
    assert time.monotonic() - began < 1.0
    told = {news.name.step: news for news in news_of(saver)}
    assert (told[2].kind, told[3].kind) == ("saved", "skipped")
    assert told[2].save_time_s >= 2.0 > usual.save_time_s, "what the server compares"
    saver.close()


def test_case_R11_save_behind_a_slow_one_waits_no_longer_than_its_limit(
    tmp_path: Path, storage: Callable[[str], Any]
) -> None:
    saver, model = new_saver(tmp_path / "store", when_busy="wait", wait_limit_s=0.3), nn.Linear(4, 4)
    storage("shard- 3.0")
    assert saver.save(name(1), {"model": model})
    began = time.monotonic()
    assert not saver.save(name(2), {"model": model})
    assert 0.3 <= time.monotonic() - began < 2.5
    assert {news.name.step: news.kind for news in news_of(saver)} == {1: "saved", 2: "skipped"}
    saver.close()


def test_rate_limits_what_is_written_and_leaves_training_alone(tmp_path: Path) -> None:
    state = nn.Linear(1000, 2000)  # 8 MB: two blocks, of which the second has to wait
    saver = new_saver(tmp_path / "store", bytes_per_s=4e6)
    began = time.monotonic()
    assert saver.save(name(1), {"model": state})
    blocked_s = time.monotonic() - began
    told: list[News] = []

    def saved() -> bool:
        told.extend(saver.news())
        return any(news.kind == "saved" for news in told)

    wait_until(saved, limit_s=60)
    assert next(news for news in told if news.kind == "saved").save_time_s > 1.0
    assert blocked_s < 5.0
    saver.close()
