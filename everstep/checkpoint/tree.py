"""State dicts as trees: a JSON structure plus the tensors that it points to, and back.

The writer stores structures in a file per rank and the tensors' bytes beside it; the digest is taken over both. A
sharded tensor stands in a structure with its whole shape. Nothing is pickled, so that loading a checkpoint runs no code
of whoever wrote it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from everstep.checkpoint.storable import check_array, check_tensor, memory_order
from everstep.errors import UnsupportedState

Structure = Any
"""JSON: None, bool, int, float, str and list stand for themselves; an object is one of the kinds below, by its "$"."""

_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_PLAIN = frozenset({type(None), bool, int, float, str})


def flatten(tree: Any, *, path: str) -> tuple[Structure, dict[str, torch.Tensor]]:
    """The tree's structure and its tensors by path (`path/key/key`), detached but not copied.

    Raises `UnsupportedState` with the path of a value that a checkpoint cannot hold.
    """
    tensors = _Tensors()
    return _flatten(tree, path, tensors), tensors.by_path


class _Tensors:
    """Tensors met so far. Tied ones, such as an embedding that is also the output layer, have one path together."""

    def __init__(self) -> None:
        self.by_path: dict[str, torch.Tensor] = {}
        self._paths: dict[int, list[str]] = {}
        """Of tensors that begin at an address: mostly one, and training waits for nothing more to be asked of it."""

    def add(self, path: str, tensor: torch.Tensor) -> str:
        """Where the tensor is filed: under its path, unless it is filed already or another one took the name."""
        neighbours = self._paths.setdefault(_address(tensor), [])
        if neighbours and (memory := _memory(tensor)) is not None:
            for filed in neighbours:
                if _memory(self.by_path[filed]) == memory:
                    return filed
        while path in self.by_path:  # {"a/b": ...} beside {"a": {"b": ...}}, or the keys 1 and "1"
            path += "'"
        self.by_path[path] = tensor
        neighbours.append(path)
        return path


def _address(tensor: torch.Tensor) -> int:
    return tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


def _memory(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Equal for tensors that are the same numbers in the same memory; None where there are none."""
    if isinstance(tensor, DTensor):
        seen_as = _memory(tensor.to_local())
        return None if seen_as is None else (*seen_as, tensor.shape, str(tensor.placements))
    if not tensor.numel():
        return None
    bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *bits, tensor.shape, tensor.stride())


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype)


def _flatten(value: Any, path: str, tensors: _Tensors) -> Structure:
    # Training waits for it: most leaves are plain or tensors, and generators hold hundreds of numbers in a row.
    kind = type(value)
    if kind in _PLAIN:
        return value
    if (kind is list or kind is tuple) and _PLAIN.issuperset(map(type, value)):
        return list(value) if kind is list else {"$": "tuple", "items": list(value)}
    if kind is dict:
        return {"$": "dict", "items": [_flatten_item(k, v, path, tensors) for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        check_tensor(value, path)
        order = {} if (strides := memory_order(value)) is None else {"strides": strides}
        path = tensors.add(path, value.detach() if value.requires_grad else value)
        return {"$": "tensor", "path": path, "dtype": _name(value.dtype), "shape": list(value.shape), **order}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asanyarray(value)
        check_array(array, path)
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        return {"$": name, "dtype": array.dtype.str, "shape": list(array.shape), "data": _text(array.tobytes())}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$": "bytes", "data": _text(value)}
    if isinstance(value, list):
        return [_flatten(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # a named one would come back without its names
        return {"$": "tuple", "items": [_flatten(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        name = "counter" if isinstance(value, Counter) else "ordered" if isinstance(value, OrderedDict) else "dict"
        return {"$": name, "items": [_flatten_item(k, v, path, tensors) for k, v in value.items()]}
    raise UnsupportedState(
        f"Cannot save {path}: a {kind.__name__} cannot be stored. "
        "Let its state_dict() hold tensors, numbers, strings, lists, tuples and dicts."
    )


def _flatten_item(key: Any, value: Any, path: str, tensors: _Tensors) -> list[Structure]:
    if type(key) not in _PLAIN and not isinstance(key, str | int | float | bool):
        raise UnsupportedState(f"Cannot save {path}: a key of type {type(key).__name__}. Use strings or numbers.")
    return [key, _flatten(value, f"{path}/{key}", tensors)]


def unflatten(structure: Structure, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `flatten` took apart."""
    if isinstance(structure, list):
        return [unflatten(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    match structure["$"]:
        case "tensor":
            return tensors[structure["path"]]
        case "array" | "scalar":
            data = base64.b64decode(structure["data"])
            array = np.frombuffer(data, dtype=np.dtype(structure["dtype"])).reshape(structure["shape"]).copy()
            return array if structure["$"] == "array" else array[()]
        case "bytes":
            return base64.b64decode(structure["data"])
        case "tuple":
            return tuple(unflatten(item, tensors) for item in structure["items"])
        case kind:
            return _MAPPINGS[kind]({key: unflatten(item, tensors) for key, item in structure["items"]})


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 over the bytes (in the machine's own order) of a tensor on any device; of a DTensor, this rank's part."""
    return hashlib.sha256(host_bytes(tensor)).hexdigest()


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, or of this rank's part of a DTensor, on the host."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    host = local.detach().cpu().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


def structure_digest(structure: Structure, hashes: Mapping[str, str]) -> str:
    """SHA-256 over a structure with its tensors' hashes; independent of the order of keys in dicts."""
    return hashlib.sha256(json.dumps(_canonical(structure, hashes), sort_keys=True).encode()).hexdigest()


def _canonical(structure: Structure, hashes: Mapping[str, str]) -> Structure:
    if isinstance(structure, list):
        return [_canonical(item, hashes) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if structure["$"] == "tensor":
        described = {name: structure[name] for name in ("$", "dtype", "shape")}
        return {**described, "hash": hashes[structure["path"]]}
    if structure["$"] in _MAPPINGS:
        items = [[json.dumps(key), _canonical(item, hashes)] for key, item in structure["items"]]
        return {"$": structure["$"], "items": sorted(items, key=lambda item: str(item[0]))}
    if structure["$"] == "tuple":
        return {"$": "tuple", "items": [_canonical(item, hashes) for item in structure["items"]]}
    return structure


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
