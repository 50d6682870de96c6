from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from everstep.checkpoint.trackable import check_trackable
from everstep.data import ReplayableSampler
from everstep.errors import UsageError

NUMBERS: Any = [1, 2, 3]


@pytest.mark.parametrize(
    ("part", "target", "advice"),
    [
        ("rng", nn.Linear(1, 1), "Run saves the random generators itself"),
        ("a/b", nn.Linear(1, 1), "letters, digits and underscores"),
        ("model", nn.Linear(1, 1).parameters(), "a generator has no state_dict"),
        ("sampler", DistributedSampler(NUMBERS, num_replicas=1, rank=0), "use everstep.ReplayableSampler"),
        ("sampler", DataLoader(NUMBERS), "everstep.replayable_loader"),
        ("noise", torch.Generator(), "Wrap it"),
        ("noise", np.random.default_rng(), "Wrap it"),
        ("noise", random.Random(1), "Wrap it"),
    ],
)
def test_refuses_what_could_not_be_restored_and_says_what_to_track_instead(
    part: str, target: object, advice: str
) -> None:
    with pytest.raises(UsageError, match=rf"Cannot track {part}: .*{advice}"):
        check_trackable(part, target)


def test_takes_whatever_has_a_state() -> None:
    model = nn.Linear(1, 1)
    check_trackable("model", model)
    check_trackable("optimizer", torch.optim.AdamW(model.parameters()))
    check_trackable("scaler", torch.amp.GradScaler("cpu"))
    check_trackable("sampler", ReplayableSampler(40, global_batch_size=4, rank=0, world_size=1))
