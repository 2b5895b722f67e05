"""Products add weight gradients to their buffers, where torch can do it."""

from __future__ import annotations

import pytest
import torch

from megatron.hetero.fused.weight_gradient import (
    AccumulatingWgrad,
    DelayedWgrad,
    can_accumulate_wgrad,
)


def test_a_product_is_added_to_a_buffer_of_its_own_type() -> None:
    input_tk, grad_output_tn = torch.randn(5, 3), torch.randn(5, 4)
    main_grad = torch.ones(4, 3)
    AccumulatingWgrad.wgrad_gemm_accum_fp32(input_tk, grad_output_tn, main_grad)
    torch.testing.assert_close(main_grad, 1 + grad_output_tn.t() @ input_tk)


def test_delayed_products_are_added_when_they_are_asked_for_and_once() -> None:
    delayed = DelayedWgrad(copies_inputs=True)
    input_tk, grad_output_tn = torch.randn(5, 3), torch.randn(5, 4)
    expected = 1 + grad_output_tn.t() @ input_tk
    main_grad = torch.ones(4, 3)
    delayed.wgrad_gemm_accum_fp32(input_tk, grad_output_tn, main_grad)
    # As where the next layer gathers its own input into the same memory.
    input_tk.zero_()
    assert torch.equal(main_grad, torch.ones(4, 3))
    delayed.compute()
    delayed.compute()
    torch.testing.assert_close(main_grad, expected)


def test_no_gpu_no_product_of_mixed_types() -> None:
    types = {"input_dtype": torch.bfloat16, "grad_dtype": torch.float32}
    assert not can_accumulate_wgrad(torch.device("cpu"), **types)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT CHECKED: no GPU on this machine")
def test_half_precision_products_are_added_in_float32() -> None:
    device = torch.device("cuda")
    types = {"input_dtype": torch.bfloat16, "grad_dtype": torch.float32}
    assert can_accumulate_wgrad(device, **types)
    input_tk = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
    grad_output_tn = torch.randn(64, 16, device=device, dtype=torch.bfloat16)
    main_grad = torch.full((16, 32), 1e4, device=device)
    AccumulatingWgrad.wgrad_gemm_accum_fp32(input_tk, grad_output_tn, main_grad)
    exact = 1e4 + grad_output_tn.double().t() @ input_tk.double()
    torch.testing.assert_close(main_grad.double(), exact, rtol=0, atol=2e-3)
