"""The NVML child and its parent: one hung GPU hides no other, a hung child is replaced, missing values stay unknown."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agents.protocol.messages import GpuSample
from agents.sensors.nvml_probe import PROBE_HUNG, NvmlProbe

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def probe(tmp_path: Path) -> AsyncIterator[NvmlProbe]:
    shutil.copy(PROJECT / "tests/fakes/nvml/pynvml.py", tmp_path / "pynvml.py")
    path = os.pathsep.join((str(tmp_path), str(PROJECT)))
    probe = NvmlProbe(
        command=(sys.executable, "-m", "agents.sensors.nvml"),
        environment={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        deadline_s=0.3,
        silent_ticks_limit=3,
        patience_s=3.0,
        backoff_s=0.1,
    )
    yield probe
    (tmp_path / "orders").write_text("")
    await probe.close()


def tell(tmp_path: Path, *orders: str) -> None:
    (tmp_path / "orders").write_text("\n".join(orders))


async def sample_until(probe: NvmlProbe, condition: Callable[[list[GpuSample]], bool]) -> list[GpuSample]:
    deadline = time.monotonic() + 20
    while True:
        samples = await probe.sample()
        if condition(samples):
            return samples
        assert time.monotonic() < deadline, samples
        await asyncio.sleep(0.05)


async def test_reads_each_gpu(probe: NvmlProbe) -> None:
    facts = await probe.start()
    assert (facts.count, facts.model, facts.driver) == (2, "Fake GPU", "999.1")
    first, second = await probe.sample()
    assert (first.uuid, second.uuid) == ("GPU-fake-0", "GPU-fake-1")
    assert (first.utilization_percent, first.power_w, first.power_limit_w) == (50.0, 300.0, 700.0)
    assert not first.problem


async def test_one_hung_gpu_is_stale_and_the_other_goes_on(probe: NvmlProbe, tmp_path: Path) -> None:
    await probe.start()
    tell(tmp_path, "hang 1")
    began = time.monotonic()
    for _ in range(5):
        first, second = await probe.sample()
        assert (first.utilization_percent, first.problem) == (50.0, "")
        assert (second.utilization_percent, second.problem) == (None, PROBE_HUNG)
    assert time.monotonic() - began < 5 * 0.3 + 1
    pid = probe.pid
    tell(tmp_path)
    await sample_until(probe, lambda samples: samples[1].utilization_percent == 51.0)
    assert probe.pid == pid


async def test_a_child_that_hangs_as_a_whole_is_replaced(probe: NvmlProbe, tmp_path: Path) -> None:
    await probe.start()
    first = probe.pid
    tell(tmp_path, "hang all")
    samples = await sample_until(probe, lambda samples: probe.pid != first)
    assert [sample.problem for sample in samples] == [PROBE_HUNG, PROBE_HUNG]
    tell(tmp_path)
    await sample_until(probe, lambda samples: all(not sample.problem for sample in samples))
    assert probe.pid not in (None, first)


async def test_a_killed_child_is_replaced(probe: NvmlProbe) -> None:
    await probe.start()
    first = probe.pid
    assert first is not None
    os.kill(first, 9)
    await sample_until(probe, lambda samples: probe.pid not in (None, first) and not samples[0].problem)


async def test_an_unsupported_value_is_unknown_and_no_problem(probe: NvmlProbe, tmp_path: Path) -> None:
    tell(tmp_path, "refuse power")
    await probe.start()
    first, _ = await probe.sample()
    assert first.power_w is None
    assert first.temperature_c == 60
    assert not first.problem


async def test_a_lost_gpu_is_told_and_left_alone(probe: NvmlProbe, tmp_path: Path) -> None:
    await probe.start()
    tell(tmp_path, "lost 0")
    first, second = await probe.sample()
    assert first.problem == "GPU is lost"
    assert first.utilization_percent is None
    assert second.utilization_percent == 51.0
    tell(tmp_path)
    first, _ = await probe.sample()
    assert first.problem == "GPU is lost"


async def test_a_node_without_the_library_has_no_gpus_and_no_child(probe: NvmlProbe, tmp_path: Path) -> None:
    tell(tmp_path, "no-library")
    facts = await probe.start()
    assert facts.count == 0
    assert await probe.sample() == []
    await asyncio.sleep(0.3)
    assert await probe.sample() == []
    assert probe.pid is None


async def test_a_driver_that_comes_up_late_is_found(probe: NvmlProbe, tmp_path: Path) -> None:
    tell(tmp_path, "no-driver")
    assert (await probe.start()).count == 0
    tell(tmp_path)
    await sample_until(probe, lambda samples: len(samples) == 2)
