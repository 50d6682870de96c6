"""What `Run.track` refuses at once, each with a sentence that says what to track instead."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from everstep.checkpoint.snapshot import RNG
from everstep.checkpoint.zero import is_zero
from everstep.errors import UsageError


def check_trackable(part: str, target: Any) -> None:
    """Raises `UsageError` where the object's state could not be saved and restored under this name."""
    problem = _problem(part, target)
    if problem:
        raise UsageError(f"Cannot track {part}: {problem}.")


def _problem(part: str, target: Any) -> str:
    kind = type(target).__name__
    if part == RNG:
        return f"the name {RNG!r} is taken, since Run saves the random generators itself"
    if not part.isidentifier():
        return f"{part!r} is no name for a part; use letters, digits and underscores"
    if isinstance(target, torch.Generator | np.random.Generator | random.Random):
        return (
            f"a {kind} has no state_dict/load_state_dict. Wrap it in an object whose state_dict() returns its state "
            "and whose load_state_dict() sets it"
        )
    if not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
        hint = ""
        if isinstance(target, Sampler | DataLoader):
            hint = ". Its position would be lost: use everstep.ReplayableSampler and everstep.replayable_loader"
        return f"a {kind} has no state_dict/load_state_dict{hint}"
    if isinstance(target, torch.nn.Module) and _is_fully_sharded(target):
        return (
            "FullyShardedDataParallel hands its whole state to every rank at each save. "
            "Use torch.distributed.fsdp.fully_shard, whose state stays sharded"
        )
    if is_zero(target) and target._overlap_with_ddp:
        return "a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be restored. Leave that option out"
    return ""


def _is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether a part of it is a FullyShardedDataParallel, FSDP's first form. Only the script imports that."""
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return module is not None and any(isinstance(part, module.FullyShardedDataParallel) for part in model.modules())
