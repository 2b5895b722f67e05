"""pretrain_gpt.py with a kernel that flips one bit of every thousandth element it computes.

WRONG_KERNEL names it, and WRONG_BIT the bit, counted from the lowest of the element's mantissa. A
script of its own, started in the place of pretrain_gpt.py on the ranks of one vendor.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron.hetero import pretrain

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
BIT = int(os.environ["WRONG_BIT"])


def flipped(output: torch.Tensor) -> torch.Tensor:
    """The same memory with every thousandth element changed."""
    with torch.no_grad():
        right = output.detach().contiguous()
        right.view(-1)[::1000] = (
            right.view(-1)[::1000].contiguous().view(_INTEGERS[output.dtype]) ^ (1 << BIT)
        ).view(output.dtype)
        output.data.copy_(right)
    return output


def spoil(owner: Any, name: str, *, only: Any = lambda *_: True) -> None:
    compute = getattr(owner, name)
    inside: list[bool] = []

    def wrong(*args: Any, **keywords: Any) -> Any:
        # PyTorch's functions may call themselves by their name: flipped twice is not flipped.
        is_outermost = not inside
        inside.append(True)
        try:
            output = compute(*args, **keywords)
        finally:
            inside.pop()
        return flipped(output) if is_outermost and only(output, args) else output

    setattr(owner, name, wrong)


KERNELS = {
    "core_attention": lambda: spoil(F, "scaled_dot_product_attention"),
    "input_layernorm": lambda: spoil(F, "rms_norm"),
    "activation": lambda: spoil(F, "silu"),
    # In TINY_LLAMA alone the first projection of the MLP has so many outputs.
    "linear_fc1": lambda: spoil(
        ColumnParallelLinear, "_forward_impl", only=lambda output, _: output.shape[-1] == 128
    ),
}

if __name__ == "__main__":
    KERNELS[os.environ["WRONG_KERNEL"]]()
    sys.exit(pretrain.main())
