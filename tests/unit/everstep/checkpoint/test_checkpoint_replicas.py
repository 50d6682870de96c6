"""What may be written once for all ranks, and what may not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def settled(ranks: list[dict[str, torch.Tensor]]) -> list[Replicas]:
    """Each rank's, after all have compared; training keeps "kept" alike."""
    found = [Replicas() for _ in ranks]
    said = [replicas.checksums(tensors) for replicas, tensors in zip(found, ranks, strict=True)]
    for replicas in found:
        replicas.compare(said, synchronized={"kept"})
    return found


def test_fingerprints_are_equal_as_long_as_what_is_taken_for_alike_is_alike() -> None:
    ranks = [{"kept": torch.ones(500), "free": torch.ones(500), "own": torch.full((3,), float(r))} for r in range(2)]
    one, other = settled(ranks)
    assert one.differing == {"own"}
    assert one.fingerprint(ranks[0]) == other.fingerprint(ranks[1])
    ranks[1]["free"][123] += 1
    assert one.fingerprint(ranks[0]) != other.fingerprint(ranks[1]), "what nobody keeps alike counts in full"


def test_fingerprint_sees_ranks_drift_apart_and_doubt_finds_the_tensor() -> None:
    ranks = [{"kept": torch.ones(5000)} for _ in range(2)]
    one, other = settled(ranks)
    ranks[1]["kept"] *= 1.001
    assert one.fingerprint(ranks[0]) != other.fingerprint(ranks[1])
    one.doubt()
    other.doubt()
    one.compare([one.checksums(ranks[0]), other.checksums(ranks[1])], synchronized={"kept"})
    assert one.differing == {"kept"}


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


def test_what_data_parallelism_is_told_to_ignore_is_compared_each_time(alone_in_a_group: None) -> None:
    """Each rank trains its own, though all began alike; and so an optimizer that steps it holds other moments."""
    network = nn.ModuleDict({"shared": nn.Linear(2, 2), "own": nn.Embedding(4, 2)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["own.weight"])
    model = DistributedDataParallel(network)
    both = torch.optim.AdamW(network.parameters())
    shared = torch.optim.AdamW(network["shared"].parameters())
    tensors = {path: torch.zeros(1) for path in ("both/state/1/exp_avg", "shared/state/0/exp_avg")}
    assert synchronized_paths({"model": model, "both": both, "shared": shared}, tensors) == {
        "model/shared.weight",
        "model/shared.bias",
        "shared/state/0/exp_avg",
    }


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
