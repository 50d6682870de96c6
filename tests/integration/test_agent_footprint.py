"""What the agent costs a node while it idles, and what it does not load."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.protocol.messages import GpuSamples, Heartbeat
from tests.fakes.agent_server import JOIN_TOKEN, FakeAgentServer

PROJECT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 60 * 10**6
FORBIDDEN = ("django", "torch", "celery", "channels", "numpy", "pynvml", "recovery", "dashboard")


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer(heartbeat_interval_s=1.0)
    await server.start()
    yield server
    await server.stop()


@pytest.mark.parametrize("module", ["agents.daemon", "agents.__main__"])
def test_importing_the_agent_loads_neither_django_nor_torch_nor_pynvml(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert not set(FORBIDDEN) & set(loaded.stdout.split())


def test_help_works_and_needs_no_server() -> None:
    told = subprocess.run([sys.executable, "-m", "agents", "--help"], capture_output=True, text=True, cwd=PROJECT)
    assert told.returncode == 0
    assert "--join-token-file" in told.stdout


async def test_agent_and_its_gpu_child_idle_small_and_quiet(server: FakeAgentServer, tmp_path: Path) -> None:
    shutil.copy(PROJECT / "tests/fakes/nvml/pynvml.py", tmp_path / "pynvml.py")
    environment = {
        **os.environ,
        "EVERSTEP_JOIN_TOKEN": JOIN_TOKEN,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(PROJECT))),
    }
    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "agents", "--server", server.url, "--name", "gpu-01"),
            *("--state", str(tmp_path / "state")),
        ],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        await server.until(lambda: sum(isinstance(m, GpuSamples) for m in server.transient) >= 3)
        assert server.hellos[0].facts.gpu_count == 2
        child = only_child(agent.pid)
        before, began = cpu_s(agent.pid) + cpu_s(child), time.monotonic()
        beats = sum(isinstance(m, Heartbeat) for m in server.transient)
        await asyncio.sleep(5)
        share = (cpu_s(agent.pid) + cpu_s(child) - before) / (time.monotonic() - began)
        used = pss_bytes(agent.pid) + pss_bytes(child)
        assert sum(isinstance(m, Heartbeat) for m in server.transient) > beats + 2
        print(f"agent {pss_bytes(agent.pid) / 1e6:.1f} MB, child {pss_bytes(child) / 1e6:.1f} MB, CPU {share:.2%}")
        assert used < LIMIT_BYTES
        assert share < 0.02
    finally:
        agent.terminate()
        agent.wait(20)
    assert not Path(f"/proc/{child}").exists()


def only_child(pid: int) -> int:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (entry / "stat").exists():
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(words[1]) == pid:
                found.append(int(entry.name))
    assert len(found) == 1, found
    return found[0]


def pss_bytes(pid: int) -> int:
    """Proportional set size: private memory, and its part of what is shared (proc(5), smaps_rollup)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
