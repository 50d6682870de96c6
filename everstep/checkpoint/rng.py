"""The random generators of one rank: Python's, NumPy's, torch's, and those of the accelerators that it uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from everstep.data import mix


def capture() -> dict[str, Any]:
    """The state of each generator, as values that a checkpoint can hold."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if (accelerator := _accelerator()) is not None:
        name, devices, indices = accelerator
        state[name] = [devices.get_rng_state(index).cpu().numpy().tobytes() for index in indices]
    return state


def restore(state: dict[str, Any]) -> None:
    """Put every captured generator back; those of an accelerator only where there is one of the same kind."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if (accelerator := _accelerator()) is not None:
        name, devices, indices = accelerator
        for index, saved in zip(indices, state.get(name, ()), strict=False):
            devices.set_rng_state(_byte_tensor(saved), index)


def _accelerator() -> tuple[str, Any, list[int]] | None:
    """(kind, torch's module for it, the devices that this rank uses); None without an accelerator.

    The current device comes first, since its number may be another one after a recovery, then any others that this
    process has memory on, as a model spread over several devices does.
    """
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    devices = torch.get_device_module(kind)
    current = torch.accelerator.current_device_index()
    others = [index for index in range(torch.accelerator.device_count()) if index != current]
    return kind.type, devices, [current, *(index for index in others if torch.accelerator.memory_reserved(index))]


def seed_all(seed: int) -> None:
    """Seed every generator; equal seeds give equal numbers."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def rank_seed(seed: int, *, rank: int, step: int = 0) -> int:
    """A seed for one rank's generators, far from those of other ranks (63 bits)."""
    return mix(mix(mix(seed) ^ rank) ^ step) >> 1


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
