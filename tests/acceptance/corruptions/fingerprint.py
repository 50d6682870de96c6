"""What a state is, to the last bit, told without the code that is on trial: the truth that loads are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor


def fingerprint(state: Any) -> str:
    """SHA-256 over types, keys, numbers and the bytes of each array and of this rank's part of each tensor."""
    digest = hashlib.sha256()
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        digest.update(f"sharded {tuple(value.shape)} {value.placements}".encode())
        _add(digest, value.to_local())
    elif isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{type(value).__name__} {value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _add(digest, item)
    else:
        digest.update(f"{type(value).__name__} {value!r}".encode())
