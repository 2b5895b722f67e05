"""Weight gradients added to their buffer by the matrix product that computes them.

Without it every micro-batch writes each weight's gradient once in half precision and reads it again
to add it to the float32 buffer: a twelfth of LLaMA-8B's step on an H200. The product also adds its
float32 result, where the separate pass adds one that was rounded to half precision before.
"""

from __future__ import annotations

import torch


def accumulate_wgrad(
    main_grad: torch.Tensor, *, grad_output_tn: torch.Tensor, input_tk: torch.Tensor
) -> None:
    """main_grad (n, k) += grad_output (tokens, n) transposed times input (tokens, k), in place."""
    grad_output_nt = grad_output_tn.t()
    if main_grad.dtype == input_tk.dtype:
        main_grad.addmm_(grad_output_nt, input_tk)
        return
    torch.addmm(main_grad, grad_output_nt, input_tk, out_dtype=main_grad.dtype, out=main_grad)


def can_accumulate_wgrad(
    device: torch.device, *, input_dtype: torch.dtype, grad_dtype: torch.dtype
) -> bool:
    """Whether this build of torch has such a product for these types, and whether it is right."""
    if device.type != "cuda":
        return input_dtype == grad_dtype
    counted = torch.arange(32 * 16, device=device).remainder(7).to(input_dtype)
    grad_output_tn, input_tk = counted.view(32, 16), counted.flip(0).view(32, 16)
    main_grad = torch.ones(16, 16, device=device, dtype=grad_dtype)
    expected = grad_output_tn.float().t() @ input_tk.float() + 1
    try:
        accumulate_wgrad(main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.allclose(main_grad.float(), expected, rtol=1e-2))


class AccumulatingWgrad:
    """What megatron-core expects of apex's extension, under the names that it calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        input_tk: torch.Tensor, grad_output_tn: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        accumulate_wgrad(main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


class DelayedWgrad:
    """The same, kept back until `compute`: the gradient of a stage's input is on its way by then.

    What they are computed from stays in memory until then: of every matrix of the stage its input
    and the gradient of its output, of one micro-batch.

    Args:
        copies_inputs: sequence parallelism gathers inputs into memory that the next layer reuses.
    """

    def __init__(self, *, copies_inputs: bool) -> None:
        self._copies_inputs = copies_inputs
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def wgrad_gemm_accum_fp32(
        self, input_tk: torch.Tensor, grad_output_tn: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        kept = input_tk.clone() if self._copies_inputs else input_tk
        self._waiting.append((main_grad, grad_output_tn, kept))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

    @torch.no_grad()
    def compute(self) -> None:
        """In the order in which backward came to them, each freed at once."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            main_grad, grad_output_tn, input_tk = waiting.pop()
            accumulate_wgrad(main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk)
