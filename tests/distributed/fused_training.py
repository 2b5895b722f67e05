"""pretrain_gpt.py with the fused kernels that it uses on a GPU, on the CPU.

A script of its own, started in the place of pretrain_gpt.py. What torch.compile would make one
kernel of runs operation by operation, and SwiGLU, whose kernel is Triton's, is left out.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from unittest import mock

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.hetero import kernels as modules
from megatron.hetero import model, pretrain
from megatron.hetero.kernels import Kernels, install_kernels, select_kernels

with mock.patch("torch.compile", return_value=lambda function: function):
    import megatron.hetero.compiled_kernels  # noqa: F401


def as_on_a_gpu(args: argparse.Namespace, device: torch.device) -> Kernels:
    return replace(select_kernels(args, torch.device("cuda")), swiglu=False)


def every_product_can_be_added(
    device: torch.device, *, input_dtype: torch.dtype, grad_dtype: torch.dtype
) -> bool:
    if input_dtype != grad_dtype:
        raise ValueError("the CPU has no product of half precision into a float32 buffer")
    return True


def use_and_name(
    kernels: Kernels,
    config: TransformerConfig,
    *,
    device: torch.device,
    grad_dtype: torch.dtype,
    wgrad: object,
) -> Kernels:
    """As a run on a GPU does, say which kernels it uses."""
    used = install_kernels(kernels, config, device=device, grad_dtype=grad_dtype, wgrad=wgrad)
    print(f"fused kernels: {used.names()}", flush=True)
    return used


if __name__ == "__main__":
    # Compiling fails under the function mode in which megatron-core runs on the CPU.
    torch.compiler.set_stance("force_eager")
    model.select_kernels, model.install_kernels = as_on_a_gpu, use_and_name
    modules.can_accumulate_wgrad = every_product_can_be_added
    sys.exit(pretrain.main())
