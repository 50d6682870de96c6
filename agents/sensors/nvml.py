"""The program that talks to NVML: `python -m agents.sensors.nvml`, started by `nvml_probe` and the only user of pynvml.

It is a process of its own because a hung driver call can be neither cancelled nor, in state D, killed. Each GPU has a
thread (ctypes lets go of the GIL during a call), so that one hung GPU does not hide the others. Requests are lines on
stdin (`tick N`, `quit`), answers are JSON lines on stdout; end of input ends it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml

_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _GPU_IS_LOST = 3, 13, 15
_ASK_LIMIT_EVERY_S = 60.0

_out = threading.Lock()


def _say(message: dict[str, Any]) -> None:
    line = (json.dumps(message) + "\n").encode()
    with _out:
        os.write(sys.stdout.fileno(), line)


def _error_code(err: Exception) -> int:
    # NVMLError objects are unhashable and must not be compared; a function that this pynvml lacks reads as code 13.
    return int(getattr(err, "value", _FUNCTION_NOT_FOUND))


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _reasons(handle: Any) -> int:
    ask = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return int((ask or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))


def _memory(handle: Any) -> tuple[int, int]:
    # Version 1 counts what the driver reserves as used, from driver 510 on.
    info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return int(info.used), int(info.total)


class Gpu:
    """One GPU and the thread that asks it."""

    def __init__(self, index: int, handle: Any) -> None:
        self.index = index
        self.uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        self.name = _text(pynvml.nvmlDeviceGetName(handle))
        self._handle = handle
        self._unsupported: set[str] = set()
        self._lost = False
        self._limit: tuple[float, float | None] = (-_ASK_LIMIT_EVERY_S, None)
        self._wanted = threading.Event()
        self._tick = 0
        threading.Thread(target=self._answer, name=f"gpu-{index}", daemon=True).start()

    def ask(self, tick: int) -> None:
        """Ask for a sample; while an earlier call hangs, this only moves the number on."""
        self._tick = tick
        self._wanted.set()

    def _answer(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            tick = self._tick
            _say({"tick": tick, "gpu": self.sample()})

    def sample(self) -> dict[str, Any]:
        """Read all values; one that fails is None with its code among the errors."""
        errors: dict[str, int] = {}

        def read(call: str, ask: Callable[[Any], Any]) -> Any:
            if self._lost or call in self._unsupported:
                return None
            try:
                return ask(self._handle)
            except (pynvml.NVMLError, AttributeError) as err:
                code = _error_code(err)
                if code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
                    self._unsupported.add(call)  # unknown for good, and nothing unhealthy
                    return None
                self._lost = code == _GPU_IS_LOST  # further calls on a lost handle have crashed processes
                errors[call] = code
                return None

        utilization = read("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        memory = read("memory", _memory)
        power_mw = read("power", pynvml.nvmlDeviceGetPowerUsage)
        sample = {
            "uuid": self.uuid,
            "index": self.index,
            "at": time.time(),
            "name": self.name,
            "utilization_percent": None if utilization is None else float(utilization.gpu),
            "memory_used_bytes": None if memory is None else memory[0],
            "memory_total_bytes": None if memory is None else memory[1],
            "temperature_c": read(
                "temperature", lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
            ),
            "power_w": None if power_mw is None else power_mw / 1000,
            "power_limit_w": self._power_limit_w(read),
            "sm_clock_mhz": read("sm_clock", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
            "clock_event_reasons": read("clock_event_reasons", _reasons),
        }
        problem = (
            "GPU is lost" if self._lost else ", ".join(f"{call}: NVML error {code}" for call, code in errors.items())
        )
        return {**sample, "problem": problem}

    def _power_limit_w(self, read: Callable[[str, Callable[[Any], Any]], Any]) -> float | None:
        asked_at, known = self._limit
        if time.monotonic() - asked_at >= _ASK_LIMIT_EVERY_S:
            milliwatts = read("power_limit", pynvml.nvmlDeviceGetEnforcedPowerLimit)
            known = None if milliwatts is None else milliwatts / 1000
            self._limit = (time.monotonic(), known)
        return known


def main() -> None:
    try:
        pynvml.nvmlInit()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as err:
        _say({"failed": _error_code(err), "text": str(err)})
        return
    gpus: list[Gpu] = []
    for index in range(count):
        try:
            gpus.append(Gpu(index, pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as err:
            _say({"unreadable": index, "text": str(err)})
    _say({"driver": driver, "count": count, "gpus": [{"uuid": g.uuid, "index": g.index, "name": g.name} for g in gpus]})
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["tick"]:
            for gpu in gpus:
                gpu.ask(int(words[1]))
        elif words[:1] == ["quit"]:
            break
    # No nvmlShutdown: it would wait for a thread that hangs in the driver.
    os._exit(0)


if __name__ == "__main__":
    main()
