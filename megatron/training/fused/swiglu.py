"""SwiGLU (Shazeer, arXiv 2002.05202) by liger-kernel, where it is installed.

torch.compile makes two passes of its gradient, whose halves share what they read. liger-kernel's
Triton kernel makes one, on both vendors.
"""

from __future__ import annotations

import importlib.util

import torch


def is_available() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


class OnePassSwiGLU:
    """Stands where megatron-core has its autograd function, with the arguments it is given."""

    @staticmethod
    def apply(
        gate_up: torch.Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> torch.Tensor:
        """silu(gate) * up, (tokens, ffn), of `gate_up` (tokens, 2 * ffn)."""
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

        if fp8_input_store or cpu_offload_input:
            raise NotImplementedError("the one-pass SwiGLU keeps its input as it is, on the GPU")
        result: torch.Tensor = LigerFusedGateUpSiLUMulFunction.apply(gate_up)
        return result
