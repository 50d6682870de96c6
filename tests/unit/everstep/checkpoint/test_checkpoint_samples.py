"""Samples see what moves a whole tensor, whatever its type and the order of its memory."""

from __future__ import annotations

import pytest
import torch

from everstep.checkpoint.samples import VALUES_PER_TENSOR, sampled


def test_values_are_spread_over_the_tensor_from_its_first_one_on() -> None:
    (found,) = sampled([torch.arange(320, dtype=torch.int32)])
    values = torch.frombuffer(bytearray(found), dtype=torch.int32)
    assert values.tolist() == list(range(0, 320, 320 // VALUES_PER_TENSOR))


def test_short_tensors_count_in_full() -> None:
    (found,) = sampled([torch.tensor(3.5), torch.tensor([1.0, 2.0])])
    assert torch.frombuffer(bytearray(found), dtype=torch.float32).tolist() == [3.5, 1.0, 2.0]


def test_order_of_memory_does_not_count() -> None:
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).reshape(2, 3, 8, 8)
    assert sampled([images.contiguous(memory_format=torch.channels_last)]) == sampled([images])


def test_part_of_a_larger_tensor_counts_alone() -> None:
    whole = torch.arange(100)
    assert sampled([whole[50:]]) == sampled([whole[50:].clone()])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
def test_every_type_can_be_looked_at(dtype: torch.dtype) -> None:
    before = sampled([torch.zeros(70, dtype=dtype)])
    assert len(before[0]) == 24 * dtype.itemsize
    assert sampled([torch.ones(70, dtype=dtype)]) != before


def test_empty_tensors_and_nothing_give_nothing() -> None:
    assert sampled([]) == sampled([torch.empty(0, 3)]) == []
