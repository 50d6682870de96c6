"""Stands before the real pynvml in PYTHONPATH: the same module, with two GPUs in the place of a driver's.

A test copies this file into a directory of its own and writes `orders` beside it, a line each, read at each call:
`hang 1` (calls on GPU 1 block), `hang all`, `lost 0`, `refuse power` (not supported), `no-driver`, `no-library`.
"""

import importlib.machinery
import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace

_here = str(Path(__file__).parent)
_found = importlib.machinery.PathFinder.find_spec("pynvml", [p for p in sys.path if p and p != _here])
_real = importlib.util.module_from_spec(_found)
_found.loader.exec_module(_real)
globals().update({name: value for name, value in vars(_real).items() if not name.startswith("__")})


def _orders() -> list[str]:
    path = Path(_here) / "orders"
    return path.read_text().splitlines() if path.exists() else []


def _call(gpu: int, name: str) -> None:
    while f"hang {gpu}" in _orders() or "hang all" in _orders():
        time.sleep(0.05)
    if f"lost {gpu}" in _orders():
        raise _real.NVMLError(_real.NVML_ERROR_GPU_IS_LOST)
    if f"refuse {name}" in _orders():
        raise _real.NVMLError(_real.NVML_ERROR_NOT_SUPPORTED)


def nvmlInit() -> None:
    if "no-library" in _orders():
        raise _real.NVMLError(_real.NVML_ERROR_LIBRARY_NOT_FOUND)
    if "no-driver" in _orders():
        raise _real.NVMLError(_real.NVML_ERROR_DRIVER_NOT_LOADED)


def nvmlSystemGetDriverVersion() -> str:
    return "999.1"


def nvmlDeviceGetCount() -> int:
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(gpu: int) -> str:
    return f"GPU-fake-{gpu}"


def nvmlDeviceGetName(gpu: int) -> str:
    return "Fake GPU"


def nvmlDeviceGetUtilizationRates(gpu: int) -> SimpleNamespace:
    _call(gpu, "utilization")
    return SimpleNamespace(gpu=50 + gpu, memory=10)


def nvmlDeviceGetMemoryInfo(gpu: int, version: object = None) -> SimpleNamespace:
    _call(gpu, "memory")
    return SimpleNamespace(used=1000, total=4000)


def nvmlDeviceGetPowerUsage(gpu: int) -> int:
    _call(gpu, "power")
    return 300_000


def nvmlDeviceGetEnforcedPowerLimit(gpu: int) -> int:
    _call(gpu, "power_limit")
    return 700_000


def nvmlDeviceGetTemperature(gpu: int, sensor: int) -> int:
    _call(gpu, "temperature")
    return 60


def nvmlDeviceGetClockInfo(gpu: int, clock: int) -> int:
    _call(gpu, "sm_clock")
    return 1500


def nvmlDeviceGetCurrentClocksEventReasons(gpu: int) -> int:
    _call(gpu, "clock_event_reasons")
    return 4
