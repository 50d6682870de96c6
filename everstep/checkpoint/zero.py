"""The part of a ZeroRedundancyOptimizer that one rank holds, as a state dict of its own.

`snapshot.unwrap` puts it in the optimizer's place: torch's own `state_dict` of it first sends every rank's part to one
rank, at each save. Parameters keep their numbers over all groups, so that no two ranks file a moment under one name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class ZeroPart:
    """`state_dict` and `load_state_dict` of what this rank steps."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def state_dict(self) -> dict[str, Any]:
        numbers = self._numbers()
        held = self._zero.optim.state
        return {
            "state": {numbers[id(parameter)]: held[parameter] for parameter in self._parameters() if parameter in held},
            "param_groups": [
                {**_fields(group), "params": [numbers[id(parameter)] for parameter in group["params"]]}
                for group in self._zero.param_groups
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError, as torch does, where the groups are not those that were saved."""
        numbers = self._numbers()
        mine = [numbers[id(parameter)] for parameter in self._parameters()]
        groups = zip(self._zero.optim.param_groups, state["param_groups"], strict=True)
        count, local_groups = 0, []
        for local, saved in groups:
            size = len(local["params"])
            local_groups.append({**saved, "params": list(range(count, count + size))})
            count += size
        held = {place: state["state"][number] for place, number in enumerate(mine) if number in state["state"]}
        self._zero.optim.load_state_dict({"state": held, "param_groups": local_groups})
        for group, saved in zip(self._zero.param_groups, state["param_groups"], strict=True):
            group.update(_fields(saved))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._zero.optim.param_groups for parameter in group["params"]]

    def _numbers(self) -> dict[int, int]:
        every = [parameter for group in self._zero.param_groups for parameter in group["params"]]
        return {id(parameter): number for number, parameter in enumerate(every)}


def is_zero(target: Any) -> bool:
    """Whether it is a ZeroRedundancyOptimizer. Its module takes seconds to import, so only the script does that."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(target, module.ZeroRedundancyOptimizer)


def _fields(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
