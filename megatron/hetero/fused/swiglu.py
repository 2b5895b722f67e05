"""SwiGLU (Shazeer, arXiv 2002.05202) by liger-kernel, where it is installed.

torch.compile makes two passes of its gradient, whose halves share what they read. liger-kernel's
Triton kernel makes one, on both vendors.
"""

from __future__ import annotations

import torch


def is_available() -> bool:
    """Whether liger-kernel can be imported and has the kernel, as it does from 0.8.2 on."""
    try:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # noqa: F401
    except ImportError:
        return False
    return True


class LigerSwiGLU:
    """Replacement for megatron-core's SwiGLUFunction, with its `apply` signature."""

    @staticmethod
    def apply(
        gate_up: torch.Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> torch.Tensor:
        """silu(gate) * up, (tokens, ffn), of `gate_up` (tokens, 2 * ffn)."""
        if fp8_input_store or cpu_offload_input:
            raise NotImplementedError("the one-pass SwiGLU keeps its input as it is, on the GPU")
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

        result: torch.Tensor = LigerFusedGateUpSiLUMulFunction.apply(gate_up)
        return result
