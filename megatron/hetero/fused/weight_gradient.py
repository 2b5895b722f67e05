"""Weight-gradient GEMMs that accumulate into `main_grad` (apex's wgrad_gemm_accum).

Otherwise every micro-batch writes each weight gradient in half precision and reads it again to add
it to the float32 buffer: a twelfth of LLaMA-8B's step on an H200. Accumulating in the GEMM also
avoids rounding to half precision first.
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
    """Whether this build of torch supports such a GEMM for these dtypes, and computes it right."""
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
    """Replacement for apex's fused_weight_gradient_mlp_cuda."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        input_tk: torch.Tensor, grad_output_tn: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        accumulate_wgrad(main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


class DelayedWgrad:
    """The same, deferred until `compute`, after the stage's input gradient has been sent.

    Until then the input and output gradient of every weight stay in memory, of one micro-batch.

    Args:
        copies_inputs: clone inputs; required with sequence parallelism, which gathers them into a
            buffer that the next layer reuses.
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
        """Compute all deferred gradients, in backward order, freeing each one's inputs."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            main_grad, grad_output_tn, input_tk = waiting.pop()
            accumulate_wgrad(main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk)
