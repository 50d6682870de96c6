"""The stream in this process, its iterators made as workers would have them; no worker processes here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data import ReplayableStream, SampleSpan, indices_digest
from everstep.data.stream import StreamIterator
from everstep.errors import UsageError


class Plain:
    """Epoch e of the source is e * 1000, e * 1000 + 1, ..."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.read = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for place in range(self.size):
            self.read += 1
            yield self.epoch * 1000 + place


class Counting:
    def __init__(self, owner: Plain) -> None:
        self.owner, self.place = owner, 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> int:
        if self.place >= self.owner.size:
            raise StopIteration
        self.owner.read += 1
        self.place += 1
        return self.owner.epoch * 1000 + self.place - 1


class SeekingIterator(Counting):
    def seek(self, place: int) -> None:
        self.place = place


class Seeking(Plain):
    def __iter__(self) -> Iterator[int]:
        return SeekingIterator(self)


class StatefulIterator(Counting):
    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Stateful(Plain):
    def __iter__(self) -> Iterator[int]:
        return StatefulIterator(self)


def stream(source: Any, *, batch: int = 6, rank: int = 0, world: int = 1, **options: Any) -> ReplayableStream:
    return ReplayableStream(source, global_batch_size=batch, rank=rank, world_size=world, collate=list, **options)


def as_workers(one: ReplayableStream, workers: int) -> Iterator[Any]:
    """Batches in the order in which a DataLoader takes them from its workers."""
    state = one.state_dict()
    iterators = [
        StreamIterator(
            one,
            epoch=state["epoch"],
            position=state["next"],
            source_state=state["source"],
            worker=number,
            workers=workers,
        )
        for number in range(workers)
    ]
    return (next(iterator) for iterator in itertools.cycle(iterators))


def expected(size: int, *, batch: int, drop_last: bool, count: int) -> list[tuple[SampleSpan, list[int]]]:
    found = []
    for epoch in itertools.count():
        for start in range(0, size, batch):
            stop = min(start + batch, size)
            if stop - start == batch or not drop_last:
                found.append(
                    (SampleSpan(epoch=epoch, start=start, stop=stop), [epoch * 1000 + n for n in range(start, stop)])
                )
            if len(found) == count:
                return found
    raise AssertionError


sources = st.sampled_from([Plain, Seeking, Stateful])


@given(
    source=sources,
    size=st.integers(6, 40),
    world=st.integers(1, 4),
    workers=st.integers(1, 3),
    drop_last=st.booleans(),
    known=st.booleans(),
    stop=st.integers(0, 20),
)
@settings(deadline=None, max_examples=150)
def test_global_order_and_resume_are_the_same_for_all_ranks_workers_and_sources(
    source: type[Plain], size: int, world: int, workers: int, drop_last: bool, known: bool, stop: int
) -> None:
    options: dict[str, Any] = {"drop_last": drop_last, "uneven": True, "size": size if known else None}
    whole = expected(size, batch=6, drop_last=drop_last, count=stop + 8)
    saved = stream(source(size), **options)
    for batch, (span, samples) in zip(as_workers(saved, workers), whole[:stop], strict=False):
        assert saved.follows(batch.span) and (batch.span, batch.data) == (span, samples)
        saved.commit(batch.span)
    ranks = [stream(source(size), rank=rank, world=world, **options) for rank in range(world)]
    for one in ranks:
        one.load_state_dict(saved.state_dict())
        assert one.state_dict() == saved.state_dict()
    for (span, samples), *shares in zip(whole[stop:], *(as_workers(one, workers) for one in ranks), strict=False):
        assert all(share.span == span for share in shares)
        assert sorted(sample for share in shares for sample in share.data) == samples
        assert max(len(s.data) for s in shares) - min(len(s.data) for s in shares) <= 1
        digests = sum(int(share.span.indices_digest, 16) for share in shares) % 2**64
        assert f"{digests:016x}" == indices_digest(range(span.start, span.stop))


@pytest.mark.parametrize(("source", "reads"), [(Plain, 36), (Seeking, 6), (Stateful, 6)])
def test_resume_reads_only_what_the_source_cannot_jump_over(source: type[Plain], reads: int) -> None:
    saved = stream(source(100))
    for batch in itertools.islice(saved, 5):
        saved.commit(batch.span)
    resumed = stream(source(100))
    resumed.load_state_dict(saved.state_dict())
    assert next(iter(resumed)).data == list(range(30, 36))
    assert resumed.dataset.read == reads


def test_source_that_seeks_and_says_its_size_is_read_for_own_samples_only() -> None:
    one = stream(Seeking(60), rank=1, world=3, size=60)
    batches = list(itertools.islice(as_workers(one, 1), 10))
    assert [sample for batch in batches for sample in batch.data] == list(range(1, 60, 3))
    assert one.dataset.read == 20


def test_lost_sample_is_seen_where_samples_have_numbers_of_their_own() -> None:
    def digests(source: Any) -> list[str]:
        numbered = stream(source, identify=lambda sample: sample)
        return [batch.span.indices_digest or "" for batch in itertools.islice(numbered, 3)]

    whole, lossy = digests(range(30)), digests([n for n in range(30) if n != 8])
    assert [a == b for a, b in zip(whole, lossy, strict=True)] == [True, False, False]


def test_fetching_ahead_does_not_move_the_saved_position() -> None:
    one = stream(Stateful(60))
    ahead = list(itertools.islice(one, 5))
    one.commit(ahead[1].span)
    assert one.state_dict() == {**one.state_dict(), "epoch": 0, "next": 12, "source": {"place": 12}}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda: next(iter(stream(Plain(4)))), "holds no global batch of 6"),
        (lambda: list(itertools.islice(stream(Plain(20), size=26), 4)), "ended after 20 samples, but size=26"),
        (lambda: stream(Plain(20), world=4), "choose a multiple of the world size"),
        (lambda: stream(Plain(20), world=7, uneven=True), "at least one sample per rank"),
        (lambda: stream(Plain(20), rank=1), "not one of a world of 1"),
    ],
)
def test_refuses_what_would_skip_or_repeat(found: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        found()


def test_refuses_a_shorter_stream_than_the_one_that_was_saved() -> None:
    saved = stream(Plain(60))
    for batch in itertools.islice(saved, 5):
        saved.commit(batch.span)
    resumed = stream(Plain(20))
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(UsageError, match="ended after 20 samples, but training stood at 30"):
        next(iter(resumed))
    with pytest.raises(UsageError, match="global_batch_size=6, this one has global_batch_size=5"):
        stream(Plain(60), batch=5).load_state_dict(saved.state_dict())
