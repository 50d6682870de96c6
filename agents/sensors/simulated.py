"""GPUs that do not exist, for demos and tests: plausible values that move, the same for the same seed and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from zlib import crc32

from agents.protocol.messages import GpuSample
from agents.sensors.base import GpuFacts

_MODEL = "Simulated GPU 80GB"
_MEMORY_BYTES = 80 * 1024**3
_POWER_LIMIT_W = 700.0
_IDLE_REASON = 0x1
"""NVML's clock event reason "GPU is idle"."""


class SimulatedGpus:
    """A `GpuSensor` whose GPUs are busy while `busy()` says so."""

    def __init__(self, *, node: str, count: int, busy: Callable[[], bool], clock: Callable[[], float] = time.time):
        self._uuids = [f"GPU-simulated-{node}-{index}" for index in range(count)]
        self._busy = busy
        self._clock = clock

    @property
    def facts(self) -> GpuFacts:
        return GpuFacts(count=len(self._uuids), model=_MODEL, driver="simulated", simulated=True)

    async def start(self) -> GpuFacts:
        return self.facts

    async def sample(self) -> list[GpuSample]:
        at = self._clock()
        return [self._one(index, uuid, at, busy=self._busy()) for index, uuid in enumerate(self._uuids)]

    async def close(self) -> None:
        """Nothing to end."""

    @staticmethod
    def _one(index: int, uuid: str, at: float, *, busy: bool) -> GpuSample:
        phase = crc32(uuid.encode()) % 628 / 100
        # Two waves whose periods have no common multiple nearby, in [-1, 1]: moves, never jumps, never repeats.
        wave = 0.6 * math.sin(at / 7.3 + phase) + 0.4 * math.sin(at / 2.9 + 2 * phase)
        return GpuSample(
            uuid=uuid,
            index=index,
            at=at,
            name=_MODEL,
            utilization_percent=round(94 + 5 * wave, 1) if busy else 0.0,
            memory_used_bytes=int(_MEMORY_BYTES * (0.71 + 0.01 * wave)) if busy else 540 * 1024**2,
            memory_total_bytes=_MEMORY_BYTES,
            temperature_c=round((62 if busy else 34) + 3 * wave, 1),
            power_w=round((590 if busy else 72) + (45 if busy else 3) * wave, 1),
            power_limit_w=_POWER_LIMIT_W,
            sm_clock_mhz=round((1830 if busy else 345) + (60 if busy else 0) * wave),
            clock_event_reasons=0 if busy else _IDLE_REASON,
        )
