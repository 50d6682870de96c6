"""Which tensors and arrays a checkpoint can hold bit for bit; what it cannot is refused with what to do instead.

`tree.flatten` asks for each leaf of a state dict, so that nothing is saved today that cannot be restored tomorrow.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from everstep.errors import UnsupportedState

_NUMBERS = "biufcSUMm"
"""Kinds of numpy types whose name says all about them; a structured one's does not."""


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Raises `UnsupportedState` where the tensor is more, or less, than a block of numbers."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if plain and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta):
        return  # nearly all are such ones, and training waits for this
    problem = _problem(tensor)
    if problem:
        raise UnsupportedState(f"Cannot save {path}: {problem}.")


def _problem(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    if is_lazy(tensor):
        return f"the {kind} has no shape yet; run one batch through the model before run.resume()"
    if isinstance(tensor, ShardedTensor):
        return (
            f"a {kind}, as FullyShardedDataParallel makes it; use torch.distributed.fsdp.fully_shard, which is sharded"
        )
    if isinstance(tensor, DTensor):
        pending = any(placement.is_partial() for placement in tensor.placements)
        return "a DTensor with pending sums; call redistribute() on it first" if pending else ""
    if tensor.is_nested:
        return "a nested tensor; let state_dict() hold its values and its offsets"
    if tensor.layout != torch.strided:
        return f"a tensor with layout {tensor.layout}; let state_dict() hold its to_dense(), or its indices and values"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}); let state_dict() hold its int_repr(), scale and zero point"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {kind}, which is made of other tensors; let state_dict() hold those"
    if tensor.is_meta:
        return "a tensor without data (device meta); call to_empty() on the model and initialize it before run.resume()"
    return ""


def check_array(array: np.ndarray, path: str) -> None:
    """The same for an array; raises `UnsupportedState`."""
    if array.dtype.hasobject:
        raise UnsupportedState(f"Cannot save {path}: an array of Python objects. Keep numbers in it.")
    if array.dtype.kind not in _NUMBERS:
        raise UnsupportedState(
            f"Cannot save {path}: an array of type {array.dtype}. Let state_dict() hold one array for each field."
        )
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedState(f"Cannot save {path}: a masked array. Let state_dict() hold its data and its mask.")


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Strides of a tensor that fills its memory in another order than row by row, such as channels_last; else None.

    They matter though they change no value: a fused optimizer walks parameter and moments in the order of memory.
    """
    if isinstance(tensor, DTensor) or tensor.is_contiguous():
        return None
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return None
        filled *= size
    return list(tensor.stride())
