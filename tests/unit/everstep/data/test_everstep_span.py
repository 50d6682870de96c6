from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.data import IndexBatch, ReplayableSampler, SampleSpan, SpannedDataset, indices_digest, mix

SPAN = SampleSpan(epoch=0, start=0, stop=12)


@given(st.lists(st.integers(0, 2**62), max_size=100))
def test_digest_is_the_sum_of_the_mixed_indices_however_many_there_are(indices: list[int]) -> None:
    assert indices_digest(indices) == f"{sum(mix(i) for i in indices) % 2**64:016x}"


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.integers(1, 7), st.randoms(use_true_random=False))
def test_digests_of_ranks_add_up_to_that_of_the_global_batch(
    indices: list[int], ranks: int, shuffle: random.Random
) -> None:
    mixed = shuffle.sample(indices, len(indices))
    parts = [int(indices_digest(mixed[rank::ranks]), 16) for rank in range(ranks)]
    assert f"{sum(parts) % 2**64:016x}" == indices_digest(indices)


@pytest.mark.parametrize("size", [8, 40])
def test_one_sample_in_place_of_its_neighbour_changes_the_digest(size: int) -> None:
    indices = list(range(100, 100 + size))
    assert indices_digest([*indices[1:], indices[-1] + 1]) != indices_digest(indices)


def test_batch_that_was_changed_on_its_way_does_not_keep_the_digest_of_before() -> None:
    sampler = ReplayableSampler(100, global_batch_size=4, rank=0, world_size=1)
    batch = next(sampler.stream())
    assert batch.span.indices_digest == sampler.order_digest(batch.span)
    batch[0] += 1
    assert batch.span.indices_digest != sampler.order_digest(batch.span)
    assert batch.span == SampleSpan(epoch=0, start=0, stop=4), "though its span is as it was"


def test_digest_is_taken_from_what_the_fetcher_really_gets() -> None:
    sampler = ReplayableSampler(100, global_batch_size=4, rank=0, world_size=1)
    batch = pickle.loads(pickle.dumps(next(sampler.stream())))
    shifted = IndexBatch([(index + 1) % 100 for index in batch], batch.span)
    span, samples = SpannedDataset(range(100)).__getitems__(shifted)
    assert samples == list(shifted)
    assert span.indices_digest == indices_digest(samples) != sampler.order_digest(span)


def test_order_knows_the_digest_of_a_batch_that_was_made_elsewhere_or_long_ago() -> None:
    maker = ReplayableSampler(100, global_batch_size=6, rank=1, world_size=2)
    other = ReplayableSampler(100, global_batch_size=6, rank=1, world_size=2)
    for batch in maker:
        assert other.order_digest(batch.span) == batch.span.indices_digest
        maker.commit(batch.span)
        assert maker.order_digest(batch.span) == batch.span.indices_digest


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("drop_last", [True, False])
def test_weighted_mean_losses_average_to_the_mean_of_the_global_batch(world: int, drop_last: bool) -> None:
    ranks = [
        ReplayableSampler(27, global_batch_size=12, drop_last=drop_last, uneven=True, rank=rank, world_size=world)
        for rank in range(world)
    ]
    for shares in zip(*ranks, strict=True):
        means = [share.span.weight * sum(share) / len(share) if share else 0.0 for share in shares]
        whole = [index for share in shares for index in share]
        assert sum(means) / world == pytest.approx(sum(whole) / len(whole))


def test_weight_is_exactly_one_where_ranks_have_equally_many() -> None:
    for world in (1, 2, 3, 4, 6, 12):
        assert next(ReplayableSampler(24, global_batch_size=12, rank=0, world_size=world).stream()).span.weight == 1.0
