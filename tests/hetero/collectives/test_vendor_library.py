"""Which reductions there are for which dtype, and how they come about."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetero.collectives.vendor_library import reduction_for


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (dist.ReduceOp.BAND, torch.float32),
        (dist.ReduceOp.BXOR, torch.bfloat16),
        (dist.ReduceOp.AVG, torch.bool),
        (dist.ReduceOp.MIN, torch.complex64),
        (dist.ReduceOp.PRODUCT, torch.complex64),
        (dist.ReduceOp.SUM, torch.float8_e4m3fn),
    ],
)
def test_what_means_nothing_is_refused_by_name(op, dtype):
    with pytest.raises(NotImplementedError, match=str(dtype)):
        reduction_for(op, dtype, size=2)


def test_a_sum_of_truth_values_is_their_disjunction_and_a_product_their_conjunction():
    kernels = {
        op: reduction_for(getattr(dist.ReduceOp, op), torch.bool, size=2).kernel
        for op in ("SUM", "MAX", "BOR", "PRODUCT", "MIN", "BAND", "BXOR")
    }
    assert kernels == dict.fromkeys(("SUM", "MAX", "BOR"), "MAX") | dict.fromkeys(
        ("PRODUCT", "MIN", "BAND"), "MIN"
    ) | {"BXOR": "BXOR"}


def test_the_average_of_halves_does_not_overflow_and_that_of_integers_is_cut_off():
    big = torch.full((2,), 60000.0, dtype=torch.float16)
    reduction = reduction_for(dist.ReduceOp.AVG, torch.float16, size=4)
    assert torch.allclose(reduction.prepare(big), torch.tensor(15000.0, dtype=torch.float16))
    whole = torch.tensor([-7, 7])
    reduction_for(dist.ReduceOp.AVG, torch.int64, size=2).finish(whole, whole)
    assert whole.tolist() == [-3, 3]


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64, torch.bool, torch.float32])
def test_a_tensor_of_any_strides_comes_back_into_its_place(dtype):
    tensor = torch.arange(12).to(dtype).view(3, 4).t()
    expected = tensor.clone()
    reduction = reduction_for(dist.ReduceOp.SUM, dtype, size=2)
    flat = reduction.prepare(tensor)
    tensor.zero_()
    reduction.finish(flat, tensor)
    assert torch.equal(tensor, expected)
