"""The agent's end of the NVML child: asks once per tick, waits no longer than its deadline, restarts a dead child."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agents.log_lines import NodeLog
from agents.protocol.messages import GpuSample
from agents.sensors.base import GpuFacts

log = NodeLog(__name__)

PROBE_HUNG = "probe hung"
_NO_LIBRARY = 12
"""NVML error LIBRARY_NOT_FOUND: there is no driver here, and none will come while this container lives."""
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
_MAX_LINE_BYTES = 64 * 1024


@dataclass
class _Known:
    """One GPU as last heard of."""

    uuid: str
    index: int
    name: str
    sample: GpuSample | None = None
    answered_tick: int = -1


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    buffer: bytes = b""
    hello: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    started_at: float = field(default_factory=time.monotonic)
    silent_ticks: int = 0


class NvmlProbe:
    """A `GpuSensor` over `python -m agents.sensors.nvml`."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (sys.executable, "-m", "agents.sensors.nvml"),
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 0.8,
        silent_ticks_limit: int = 10,
        start_limit_s: float = 60.0,
        patience_s: float = 5.0,
        backoff_s: float = 1.0,
        backoff_cap_s: float = 60.0,
        children: set[int] | None = None,
    ) -> None:
        self._command = list(command)
        source = os.environ if environment is None else environment
        self._environment = {name: source[name] for name in _ENVIRONMENT if name in source}
        self._deadline_s = deadline_s
        self._silent_ticks_limit = silent_ticks_limit
        self._start_limit_s = start_limit_s
        self._patience_s = patience_s
        self._backoff_s = backoff_s
        self._backoff_cap_s = backoff_cap_s
        self._failures = 0
        self._start_again_at = 0.0
        self._child: _Child | None = None
        self._ending: asyncio.Task[None] | None = None
        self._gpus: dict[str, _Known] = {}
        self._driver = ""
        self._tick = 0
        self._answered = asyncio.Event()
        self._off = False
        self._children = set() if children is None else children
        """Where the agent lists the processes that are its own."""

    @property
    def pid(self) -> int | None:
        """The child's process, for tests and logs."""
        return self._child.process.pid if self._child else None

    @property
    def facts(self) -> GpuFacts:
        model = next((gpu.name for gpu in self._gpus.values()), "")
        return GpuFacts(count=len(self._gpus), model=model, driver=self._driver)

    async def start(self) -> GpuFacts:
        """Start the child and wait for its first words, at most the patience of this probe."""
        self._spawn()
        if self._child:
            await self._first_of(self._child.hello, self._child.gone, timeout_s=self._patience_s)
        return self.facts

    async def sample(self) -> list[GpuSample]:
        """Ask every GPU and wait for the deadline; who has not answered is reported as hung, the others as they are."""
        if self._off:
            return []
        child = self._child
        if child is None:
            self._maybe_spawn()
        elif child.hello.is_set():
            await self._ask(child)
        if child is not None and self._hangs(child):
            self._end(child, why="it has not answered")
        return [self._told(gpu) for gpu in self._gpus.values()]

    async def close(self) -> None:
        if self._child:
            self._end(self._child, why="the agent ends")
        if self._ending:
            await self._ending

    def _hangs(self, child: _Child) -> bool:
        # A driver that initialises may take long, and must not be disturbed.
        starting = not child.hello.is_set() and time.monotonic() - child.started_at > self._start_limit_s
        return starting or child.silent_ticks >= self._silent_ticks_limit

    # --- asking ---

    async def _ask(self, child: _Child) -> None:
        self._tick += 1
        self._answered.clear()
        assert child.process.stdin is not None
        try:
            os.write(child.process.stdin.fileno(), f"tick {self._tick}\n".encode())
        except BlockingIOError:
            pass  # it reads nothing any more; its silence is counted below
        except BrokenPipeError:
            return
        deadline = time.monotonic() + self._deadline_s
        while any(gpu.answered_tick < self._tick for gpu in self._gpus.values()) and not child.gone.is_set():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not await self._first_of(self._answered, child.gone, timeout_s=left_s):
                break
            self._answered.clear()
        heard = any(gpu.answered_tick == self._tick for gpu in self._gpus.values())
        child.silent_ticks = 0 if heard or not self._gpus else child.silent_ticks + 1

    def _told(self, gpu: _Known) -> GpuSample:
        if gpu.sample is not None and gpu.answered_tick == self._tick and self._child is not None:
            return gpu.sample
        return GpuSample(uuid=gpu.uuid, index=gpu.index, at=time.time(), name=gpu.name, problem=PROBE_HUNG)

    @staticmethod
    async def _first_of(*events: asyncio.Event, timeout_s: float) -> bool:
        tasks = [asyncio.ensure_future(event.wait()) for event in events]
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        return bool(done)

    # --- the child's life ---

    def _maybe_spawn(self) -> None:
        # An old child that will not die holds the driver: a second one would hang beside it.
        if self._ending is None and time.monotonic() >= self._start_again_at:
            self._spawn()

    def _spawn(self) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._environment,
            )
        except OSError as err:
            self._failed(f"it could not be started ({err})")
            return
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._children.add(process.pid)
        child = _Child(process=process)
        self._child = child
        asyncio.get_running_loop().add_reader(process.stdout.fileno(), self._read, child)

    def _read(self, child: _Child) -> None:
        assert child.process.stdout is not None
        try:
            chunk = os.read(child.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._end(child, why="it ended")
            return
        *lines, child.buffer = (child.buffer + chunk).split(b"\n")
        child.buffer = child.buffer[-_MAX_LINE_BYTES:]
        for line in lines:
            try:
                self._hear(child, json.loads(line))
            except (ValueError, TypeError, KeyError, msgspec.ValidationError) as err:
                log.warning("the GPU probe said something that cannot be read", error=err)

    def _hear(self, child: _Child, message: dict[str, Any]) -> None:
        if "gpu" in message:
            sample = msgspec.convert(message["gpu"], GpuSample)
            known = self._gpus[sample.uuid]
            known.sample, known.answered_tick = sample, int(message["tick"])
            self._answered.set()
        elif "gpus" in message:
            self._driver = str(message["driver"])
            self._gpus = {gpu["uuid"]: _Known(gpu["uuid"], gpu["index"], gpu["name"]) for gpu in message["gpus"]}
            self._failures = 0
            child.hello.set()
            log.info("GPUs found", count=len(self._gpus), driver=self._driver)
        elif "failed" in message:
            self._off = message["failed"] == _NO_LIBRARY
            log.info("no GPU can be read", code=message["failed"], reason=message["text"])
        elif "unreadable" in message:
            log.warning("a GPU cannot be opened", index=message["unreadable"], reason=message["text"])

    def _end(self, child: _Child, *, why: str) -> None:
        """Let go of the child: ask, wait, then kill (a kill while the GPU initialises has broken GPUs)."""
        if self._child is not child:
            return
        self._child = None
        assert child.process.stdout is not None
        asyncio.get_running_loop().remove_reader(child.process.stdout.fileno())
        child.gone.set()
        if not self._off:
            self._failed(why)
        self._ending = asyncio.create_task(self._wait_for_end(child))

    def _failed(self, why: str) -> None:
        pause_s = min(self._backoff_cap_s, self._backoff_s * 2**self._failures)
        self._failures += 1
        self._start_again_at = time.monotonic() + pause_s
        log.warning("the GPU probe is restarted", reason=why, pause_s=pause_s)

    async def _wait_for_end(self, child: _Child) -> None:
        process = child.process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), b"quit\n")
        with contextlib.suppress(OSError):
            process.stdin.close()
        if not await _ended(process, within_s=self._patience_s):
            process.kill()
            if not await _ended(process, within_s=self._patience_s):
                log.error("the GPU probe cannot be killed: the driver hangs; reboot this node", pid=process.pid)
                while not await _ended(process, within_s=60.0):
                    pass
        process.stdout.close()
        self._children.discard(process.pid)
        self._ending = None


async def _ended(process: subprocess.Popen[bytes], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    pause_s = 0.005
    while process.poll() is None:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(0.2, pause_s * 2)
    return True
