"""Where a step's time goes, and how much memory the process holds: what `Run` reports beside the loss. No collectives.

All of it is time of the training thread. On an accelerator the forward and backward passes and the optimizer only
queue their kernels, so that their time shows wherever the script next waits for the device (mostly `loss.item()`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

MEMORY_EVERY_S = 1.0
"""Asking the allocator of an accelerator costs as much as everything else that a step reports."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class StepSplit:
    """Adds up the parts of the step in hand. `take` ends it and begins the next one."""

    def __init__(self) -> None:
        self._data_s: float | None = None
        self._optimizer_s: float | None = None
        self._optimizer_started = 0.0
        self._wait_s: float | None = None
        self._checkpoint_s: float | None = None
        self._hooks: list[Any] = []

    def watch_optimizers(self) -> None:
        """Measure `step` of each optimizer of this process, until `close`."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def fetched(self, seconds: float) -> None:
        """Training has waited for a batch."""
        self._data_s = (self._data_s or 0.0) + seconds

    def waiting(self) -> AbstractContextManager[None]:
        return _Measured(self._waited)

    def saving(self) -> AbstractContextManager[None]:
        return _Measured(self._saved)

    def take(self, step_time_s: float, *, into: dict[str, Any]) -> None:
        """Add the parts that are known, in seconds. What no part claims is forward and backward, if `data_s` is known.

        `checkpoint_s` is what a save between the step before and this one took, and is no part of `step_time_s`.
        """
        claimed_s = 0.0
        if (optimizer_s := self._optimizer_s) is not None:
            into["optimizer_s"] = optimizer_s
            claimed_s += optimizer_s
        if (wait_s := self._wait_s) is not None:
            into["wait_s"] = wait_s
            claimed_s += wait_s
        if (data_s := self._data_s) is not None:
            into["data_s"] = data_s
            into["forward_backward_s"] = max(0.0, step_time_s - data_s - claimed_s)
        if self._checkpoint_s is not None:
            into["checkpoint_s"] = self._checkpoint_s
        self._data_s = self._optimizer_s = self._wait_s = self._checkpoint_s = None

    def _waited(self, seconds: float) -> None:
        self._wait_s = (self._wait_s or 0.0) + seconds

    def _saved(self, seconds: float) -> None:
        self._checkpoint_s = (self._checkpoint_s or 0.0) + seconds

    def _before_optimizer(self, *_: Any) -> None:
        self._optimizer_started = time.monotonic()

    def _after_optimizer(self, *_: Any) -> None:
        self._optimizer_s = (self._optimizer_s or 0.0) + time.monotonic() - self._optimizer_started


class _Measured(AbstractContextManager[None]):
    """Tells how long its body took, whatever became of it."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._tell(time.monotonic() - self._started)


class MemoryGauge:
    """Memory of this process, read at most once a second."""

    def __init__(self) -> None:
        self._due = 0.0
        self._statm: int | None = None

    def read(self, now: float, *, into: dict[str, Any]) -> None:
        """Add `memory_bytes` resident and, where CUDA is in use, `gpu_memory_bytes` at most allocated, if due.

        now: seconds of the monotonic clock.
        """
        if now < self._due:
            return
        self._due = now + MEMORY_EVERY_S
        try:
            if self._statm is None:
                self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            into["memory_bytes"] = int(os.pread(self._statm, 100, 0).split()[1]) * _PAGE_BYTES
        except (OSError, IndexError, ValueError):
            self._statm = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            into["gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
