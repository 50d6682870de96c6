from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data import ReplayableSampler, SampleSpan, SpannedDataset, mix, permute
from everstep.errors import UsageError

sizes = st.integers(min_value=1, max_value=300)
seeds = st.integers(min_value=0, max_value=2**64 - 1)
epochs = st.integers(min_value=0, max_value=50)

GOLDEN_EPOCH_0 = [3, 0, 4, 7, 5, 6, 2, 9, 1, 8]
GOLDEN_EPOCH_1 = [7, 9, 3, 6, 8, 0, 2, 5, 4, 1]


@given(size=sizes, seed=seeds, epoch=epochs)
@settings(deadline=None)
def test_order_of_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = [permute(position, size=size, seed=seed, epoch=epoch) for position in range(size)]
    assert sorted(order) == list(range(size))


def test_order_is_the_same_on_each_platform_and_release() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 with seed 0
    assert [permute(p, size=10, seed=1, epoch=0) for p in range(10)] == GOLDEN_EPOCH_0
    assert [permute(p, size=10, seed=1, epoch=1) for p in range(10)] == GOLDEN_EPOCH_1


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(permute(p, size=100, seed=seed, epoch=epoch) for p in range(100))
        for seed, epoch in itertools.product(range(5), range(5))
    }
    assert len(orders) == 25


def test_neighbours_are_scattered() -> None:
    """A crude look at quality: the mean distance of neighbours is a third of the size in a random order."""
    order = [permute(p, size=1000, seed=3, epoch=0) for p in range(1000)]
    distance = sum(abs(a - b) for a, b in itertools.pairwise(order)) / 999
    assert 300 < distance < 366


@given(
    size=sizes, seed=seeds, batch=st.integers(1, 24), world=st.integers(1, 6), drop_last=st.booleans(), data=st.data()
)
@settings(deadline=None, max_examples=60)
def test_ranks_share_each_batch_the_same_for_each_world_size(
    size: int, seed: int, batch: int, world: int, drop_last: bool, data: st.DataObject
) -> None:
    if batch < world or (drop_last and batch > size):
        return
    whole = ReplayableSampler(size, global_batch_size=batch, seed=seed, drop_last=drop_last, rank=0, world_size=1)
    shares = [
        ReplayableSampler(
            size, global_batch_size=batch, seed=seed, drop_last=drop_last, uneven=True, rank=rank, world_size=world
        )
        for rank in range(world)
    ]
    count = data.draw(st.integers(1, 2 * len(whole) + 1))
    for expected, *parts in itertools.islice(zip(whole.stream(), *(s.stream() for s in shares), strict=True), count):
        assert list(expected) == [index for part in parts for index in part]
        assert all(part.span == expected.span for part in parts)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(size=st.integers(8, 100), seed=seeds, stop=st.integers(0, 40), drop_last=st.booleans())
@settings(deadline=None)
def test_restored_sampler_goes_on_exactly_where_the_saved_one_stood(
    size: int, seed: int, stop: int, drop_last: bool
) -> None:
    def new(world: int = 1) -> ReplayableSampler:
        return ReplayableSampler(
            size, global_batch_size=8, seed=seed, drop_last=drop_last, rank=world - 1, world_size=world
        )

    uninterrupted = list(itertools.islice(new().stream(), stop + 20))
    saved = new()
    for batch in uninterrupted[:stop]:
        assert saved.follows(batch.span)
        saved.commit(batch.span)
    restored, other_world = new(), new(world=4)
    restored.load_state_dict(saved.state_dict())
    other_world.load_state_dict(saved.state_dict())
    assert list(itertools.islice(restored.stream(), 20)) == uninterrupted[stop:]
    assert next(other_world.stream()).span == uninterrupted[stop].span
    assert other_world.state_dict() == saved.state_dict()


def test_fetching_ahead_does_not_move_the_saved_position() -> None:
    sampler = ReplayableSampler(100, global_batch_size=10, rank=0, world_size=1)
    fetched = list(itertools.islice(sampler.stream(), 7))
    sampler.commit(fetched[0].span)
    assert (sampler.epoch, sampler.position) == (0, 10)


def test_epochs_follow_each_other_without_gap() -> None:
    sampler = ReplayableSampler(25, global_batch_size=10, rank=0, world_size=1)
    spans = [batch.span for batch in itertools.islice(sampler.stream(), 5)]
    assert [(s.epoch, s.start, s.stop) for s in spans] == [(0, 0, 10), (0, 10, 20), (1, 0, 10), (1, 10, 20), (2, 0, 10)]
    sampler.commit(spans[1])
    assert (sampler.epoch, sampler.position) == (1, 0)
    assert [batch.span for batch in sampler] == spans[2:4]
    assert len(sampler) == 2


def test_short_tail_leaves_some_ranks_without_a_sample_and_loses_none() -> None:
    shares = [
        list(ReplayableSampler(14, global_batch_size=12, drop_last=False, rank=rank, world_size=4))[-1]
        for rank in range(4)
    ]
    assert [len(share) for share in shares] == [0, 1, 0, 1]
    assert [share.span.weight for share in shares] == [0.0, 2.0, 0.0, 2.0]
    assert all((share.span.start, share.span.stop, share.span.epoch_size) == (12, 14, 14) for share in shares)


def test_last_batch_is_kept_when_it_is_not_to_be_dropped() -> None:
    sampler = ReplayableSampler(25, global_batch_size=10, drop_last=False, rank=1, world_size=2)
    assert [len(batch) for batch in sampler] == [5, 5, 3]


def test_span_travels_with_the_batch_through_a_pickle() -> None:
    batch = next(iter(ReplayableSampler(20, global_batch_size=4, rank=0, world_size=1)))
    copy = pickle.loads(pickle.dumps(batch))
    assert copy == batch and copy.span == SampleSpan(epoch=0, start=0, stop=4)


def test_spanned_dataset_gives_samples_with_their_span() -> None:
    batch = next(iter(ReplayableSampler(20, global_batch_size=4, rank=0, world_size=1, shuffle=False)))
    span, samples = SpannedDataset([str(n) for n in range(20)]).__getitems__(batch)
    assert (span.stop, samples) == (4, ["0", "1", "2", "3"])


@pytest.mark.parametrize("changed", [{"seed": 8}, {"global_batch_size": 10}, {"drop_last": False}, {"shuffle": False}])
def test_refuses_a_state_that_would_mean_other_samples(changed: dict[str, int]) -> None:
    arguments = {"global_batch_size": 5, "seed": 7, "rank": 0, "world_size": 1}
    state = ReplayableSampler(50, **arguments).state_dict()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=next(iter(changed))):
        ReplayableSampler(50, **{**arguments, **changed}).load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": 0, "global_batch_size": 1}, "at least 1"),
        ({"size": 9, "global_batch_size": 4, "world_size": 3}, "multiple of the world size, or say uneven=True"),
        ({"size": 9, "global_batch_size": 2, "world_size": 3, "uneven": True}, "at least one sample per rank"),
        ({"size": 3, "global_batch_size": 4}, "drop_last=False"),
        ({"size": 9, "global_batch_size": 4, "rank": 2, "world_size": 2}, "Rank 2"),
    ],
)
def test_refuses_arguments_that_cannot_work(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ReplayableSampler(**{"rank": 0, "world_size": 1, **arguments})  # type: ignore[arg-type]
