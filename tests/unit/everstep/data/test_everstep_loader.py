from __future__ import annotations

from typing import Any

import pytest

from everstep.data import ReplayableSampler, ReplayableStream, replayable_loader
from everstep.errors import UsageError


def sampler(size: int = 8) -> ReplayableSampler:
    return ReplayableSampler(size, global_batch_size=4, rank=0, world_size=1)


def test_dataset_in_the_place_of_its_size_is_told_what_to_give() -> None:
    dataset: Any = [1, 2, 3, 4]
    with pytest.raises(UsageError, match=r"size=.*is a list: give a number of samples"):
        ReplayableSampler(dataset, global_batch_size=4, rank=0, world_size=1)
    with pytest.raises(UsageError, match=r"global_batch_size=.*is a float"):
        ReplayableSampler(8, global_batch_size=4.0, rank=0, world_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "batch_sampler", "drop_last"])
def test_what_the_sampler_decides_is_not_said_to_the_loader(option: str) -> None:
    with pytest.raises(UsageError, match=rf"{option}=.*the sampler decides that"):
        replayable_loader(range(8), sampler(), **{option: True})


def test_dataset_that_is_smaller_than_its_sampler_is_refused_before_a_worker_fails() -> None:
    with pytest.raises(UsageError, match="has 7 samples, and its sampler was made for 8"):
        replayable_loader(range(7), sampler())
    assert next(iter(replayable_loader(range(8), sampler()))).data.shape == (4,)


def test_another_sampler_is_refused() -> None:
    other: Any = range(8)
    with pytest.raises(UsageError, match="needs a ReplayableSampler, not a range"):
        replayable_loader(range(8), other)


def test_stream_of_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot iterate a int.*ReplayableSampler"):
        ReplayableStream(5, global_batch_size=4, rank=0, world_size=1)
