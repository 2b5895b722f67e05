"""What is kept of a tensor stands for all of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.observe.operators.sample import stride_for, take


@given(rows=st.integers(1, 5000), columns=st.integers(1, 5000), count=st.integers(1, 70_000))
def test_the_stride_shares_no_factor_with_the_tensor(rows: int, columns: int, count: int) -> None:
    elements = rows * columns
    stride = stride_for(elements, count)
    assert math.gcd(stride, elements) == 1
    assert stride <= max(1, elements // count)


def test_every_column_and_every_head_is_sampled() -> None:
    """A plain stride of 4096 * 4096 / 65536 = 256 would see only even heads of width 128."""
    positions = torch.arange(4096 * 4096, dtype=torch.float64)
    columns = take(positions, count=65536).values % 4096
    assert len(columns.unique()) == 4096


def test_a_small_tensor_is_kept_whole_and_zero_means_all_copied() -> None:
    tensor = torch.arange(100.0)
    assert torch.equal(take(tensor, count=1000).values, tensor)
    assert torch.equal(take(tensor, count=0).values, tensor)
    ones = torch.ones(8, 4)
    sample = take(ones.T, count=0)
    ones.zero_()
    assert sample.shape == (4, 8)
    assert sample.values.tolist() == [1.0] * 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_size_is_that_of_the_whole_tensor(dtype) -> None:
    tensor = torch.zeros(10_000, dtype=dtype)
    tensor[9_999] = 50.0
    sample = take(tensor, count=10)
    assert sample.rms == pytest.approx(0.5)
    assert sample.not_finite == 0
    tensor[9_998] = math.nan  # seen outside the sample
    assert take(tensor, count=3).not_finite == 1
