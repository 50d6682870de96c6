"""The random generators of one rank: Python's, NumPy's, torch's, and the current CUDA device's where there is one."""

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
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put every captured generator back; a CUDA state is left out on a machine without CUDA."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


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
