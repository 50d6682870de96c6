"""A save to a slow store goes there from memory: snapshots of later steps do not wait for it. A real writer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch import nn

from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.memory import held_in
from everstep.checkpoint.memory_tier import MemorySettings
from everstep.checkpoint.saver import News, Saver, SaveSettings
from everstep.checkpoint.verify import verify
from everstep.ranks import Team

STATE_BYTES = 4 * 65 * 64


def name(step: int) -> CheckpointName:
    return CheckpointName(generation=1, step=step)


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saver:
    for variable in ("RANK", "WORLD_SIZE", "EVERSTEP_CONTACT"):
        monkeypatch.delenv(variable, raising=False)
    memory = MemorySettings(
        root=tmp_path / "memory", token="ab", job="j", total_steps=9, parent=None, partner=False, keep=None
    )
    return Saver(
        SaveSettings(
            root=tmp_path / "checkpoints",
            job="j",
            total_steps=9,
            parent=None,
            keep=3,
            bytes_per_s=STATE_BYTES / 8.0,
            memory=memory,
        ),
        Team(),
    )


def test_snapshots_go_on_while_a_save_is_on_its_slow_way_to_disk(tmp_path: Path, saver: Saver) -> None:
    model, told = nn.Linear(64, 64), list[News]()
    tracked = {"model": model}
    assert saver.save(name(0), tracked)
    for step in (1, 2, 3):
        nn.init.constant_(model.weight, step)
        wait_for(saver, told, "kept", step - 1)
        assert saver.save(name(step), tracked, to_disk=False, to_memory=True)
    wait_for(saver, told, "kept", 3)
    assert not [news for news in told if news.kind == "saved"], "the save of step 0 is on its way still"
    # What is on its way to disk, what was whole before, and the newest.
    assert [held.name.step for held in held_in(tmp_path / "memory")] == [0, 2, 3]
    wait_for(saver, told, "saved", 0)
    saver.close()
    (saved,) = complete_checkpoints(tmp_path / "checkpoints")
    assert verify(saved.name.directory(tmp_path / "checkpoints")).name == name(0)
    assert {news.kind for news in told} <= {"kept", "saved", "rehashed"}


def wait_for(saver: Saver, told: list[News], kind: str, step: int, *, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not any((news.kind, news.name.step) == (kind, step) for news in told):
        assert time.monotonic() < deadline, told
        time.sleep(0.02)
        told += saver.news()
