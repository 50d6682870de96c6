"""What may be written once for all ranks, and what may not."""

from __future__ import annotations

import torch
from torch import nn

from everstep.checkpoint.replicas import Replicas, checksum, synchronized_paths


def test_what_differs_anywhere_is_each_ranks_own() -> None:
    replicas = Replicas()
    said = [replicas.checksums({"a": torch.ones(4), "b": torch.full((3,), float(rank))}) for rank in range(3)]
    replicas.compare(said, synchronized=())
    assert replicas.differing == {"b"}


def test_what_training_keeps_alike_is_compared_once_and_the_rest_each_time() -> None:
    replicas = Replicas()
    tensors = {"kept": torch.ones(4), "free": torch.ones(4)}
    replicas.compare([replicas.checksums(tensors)] * 2, synchronized={"kept"})
    assert replicas.checksums(tensors).keys() == {"free"}
    ranks = [replicas.checksums({**tensors, "free": torch.full((4,), float(rank))}) for rank in range(2)]
    replicas.compare(ranks, synchronized={"kept"})
    assert replicas.differing == {"free"}


def test_what_differed_once_is_compared_again_and_may_become_alike() -> None:
    replicas = Replicas()
    for rank_values in ([1.0, 2.0], [2.0, 2.0]):
        said = [replicas.checksums({"a": torch.tensor(value)}) for value in rank_values]
        replicas.compare(said, synchronized={"a"})
    assert replicas.differing == frozenset()


def test_a_tensor_that_one_rank_lacks_counts_as_its_owners() -> None:
    replicas = Replicas()
    replicas.compare([{"a": checksum(torch.ones(2))}, {}], synchronized=())
    assert replicas.differing == {"a"}


def test_checksum_sees_each_bit_of_any_type_and_layout() -> None:
    values = torch.arange(37, dtype=torch.uint8)
    before = checksum(values)
    for index in range(37):
        changed = values.clone()
        changed[index] ^= 1
        assert checksum(changed) != before
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0, 3))
    assert checksum(torch.zeros(4)) != checksum(torch.zeros(5))
    square = torch.arange(16.0).reshape(4, 4)
    assert checksum(square.t()) == checksum(square.t().contiguous())
    shifted = torch.arange(41, dtype=torch.uint8)[1:]
    assert checksum(shifted) == checksum(shifted.clone())


def test_checksum_sees_the_same_values_in_another_place() -> None:
    """Ranks that each count, queue or mark something of their own hold the same values, only elsewhere."""
    marks = torch.eye(64)
    assert len({checksum(row) for row in marks}) == 64
    queue = torch.arange(1024.0).reshape(32, 32)
    assert len({checksum(queue.roll(rows, dims=0)) for rows in range(32)}) == 32
    signs = torch.ones(256)
    flipped = [torch.where(torch.arange(256) == index, -signs, signs) for index in range(256)]
    assert len({checksum(tensor) for tensor in flipped}) == 256
    large = torch.zeros(1 << 20)
    large[0] = 1.0
    assert len({checksum(large.roll(1 << power)) for power in range(3, 20)}) == 17


def test_nothing_is_kept_alike_without_data_parallelism() -> None:
    model = nn.Linear(2, 2)
    assert synchronized_paths({"model": model}, {"model/weight": model.weight}) == set()
