"""What decides the next step, taken from the live objects: parts, their tensors, and a digest per part.

`Run` takes a snapshot to save it, and once more after a resume, just before the first step, to prove that what the
checkpoint held is what training goes on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint import rng
from everstep.checkpoint.tree import Structure, flatten, structure_digest, tensor_hash
from everstep.checkpoint.zero import ZeroPart, is_zero
from everstep.errors import UsageError

RNG = "rng"
"""The part that the run adds itself; no tracked object may take its name."""

_SCHEDULED = ("lr", "initial_lr")
"""Fields of the optimizer's groups that the scheduler decides: filed with it, so that a mismatch names the culprit."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's state at one moment. Tensors are the live ones: copy them before the next step."""

    structures: dict[str, Structure]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, states: Mapping[str, Any]) -> Snapshot:
        """Of collected states. Raises `UnsupportedState`."""
        structures, tensors = {}, {}
        for part, state in states.items():
            structures[part], own = flatten(state, path=part)
            tensors.update(own)
        return cls(structures=structures, tensors=tensors)

    def digests(self, known: Mapping[str, str] | None = None) -> dict[str, str]:
        """Map each part to the SHA-256 over what this rank holds of it; `known` has hashes of tensors by path."""
        hashes = dict(known or {})
        for path, tensor in self.tensors.items():
            if path not in hashes:
                hashes[path] = tensor_hash(tensor)
        return {part: structure_digest(structure, hashes) for part, structure in self.structures.items()}


def take(tracked: Mapping[str, Any]) -> Snapshot:
    """Snapshot of tracked objects (by part name) and of this rank's random generators."""
    return Snapshot.of(collect(tracked))


def collect(tracked: Mapping[str, Any]) -> dict[str, Any]:
    """State of each part, with the learning rates moved from the optimizer to the scheduler where both are tracked."""
    states = {part: unwrap(tracked[part]).state_dict() for part in tracked}
    if "optimizer" in states and "scheduler" in states and "param_groups" in states["optimizer"]:
        groups = states["optimizer"]["param_groups"]
        states["optimizer"] = {
            **states["optimizer"],
            "param_groups": [{k: v for k, v in group.items() if k not in _SCHEDULED} for group in groups],
        }
        states["scheduler"] = {
            "state": states["scheduler"],
            "learning_rates": [{k: group[k] for k in _SCHEDULED if k in group} for group in groups],
        }
    return {**states, RNG: rng.capture()}


def put_back(tracked: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load collected states into tracked objects. The random generators are the caller's to restore, last of all.

    Raises `UsageError` when the tracked parts are not those of the checkpoint.
    """
    mine, theirs = set(tracked), set(states) - {RNG}
    if mine != theirs:
        raise UsageError(
            f"Cannot resume: the checkpoint holds {_names(theirs)}, the script tracks {_names(mine)}. "
            "Track the same parts as the run that saved it."
        )
    states = dict(states)
    if "learning_rates" in states.get("scheduler", {}):
        scheduled = states["scheduler"]
        groups = zip(states["optimizer"]["param_groups"], scheduled["learning_rates"], strict=True)
        states["optimizer"] = {**states["optimizer"], "param_groups": [{**group, **rates} for group, rates in groups]}
        states["scheduler"] = scheduled["state"]
    for part, target in tracked.items():
        unwrap(target).load_state_dict(states[part])


def unwrap(target: Any) -> Any:
    """The object behind DistributedDataParallel and torch.compile, so that keys do not depend on the wrapping.

    Of a ZeroRedundancyOptimizer it is this rank's part.
    """
    while (inner := _inside(target)) is not None:
        target = inner
    return ZeroPart(target) if is_zero(target) else target


def data_parallel(target: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel around a tracked object, also where torch.compile is around both."""
    while target is not None and not isinstance(target, DistributedDataParallel):
        target = _inside(target)
    return target


def _inside(target: Any) -> Any:
    if isinstance(target, DistributedDataParallel):
        return target.module
    return getattr(target, "_orig_mod", None) if isinstance(target, torch.nn.Module) else None


def _names(parts: set[str]) -> str:
    return ", ".join(sorted(parts)) or "nothing"
