"""Selects and installs the fused kernels of a run, from its flags and its device.

Import modules that use torch.compile only when they are selected: importing the compiler costs a
second.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.hetero import core_private
from megatron.hetero.fused import embedding, swiglu
from megatron.hetero.fused.weight_gradient import AccumulatingWgrad, can_accumulate_wgrad


@dataclass(frozen=True)
class Kernels:
    """Which kernels of `megatron.hetero.fused` a run uses."""

    weight_gradient: bool = False
    """GEMMs, and the embedding's backward, accumulate into `main_grad` directly."""
    rotary: bool = False
    split_rotary: bool = False
    """RoPE reads queries and keys straight from the fused QKV projection."""
    swiglu: bool = False
    cross_entropy: bool = False

    def names(self) -> str:
        """The enabled kernels, for the log."""
        used = [name.replace("_", " ") for name, is_used in vars(self).items() if is_used]
        return ", ".join(used) or "none"


def select_kernels(args: argparse.Namespace, device: torch.device) -> Kernels:
    """The kernels that the flags ask for; none on CPU, but for --delay-wgrad-compute."""
    if device.type != "cuda":
        return Kernels(weight_gradient=args.delay_wgrad_compute)
    is_local = args.transformer_impl == "local"
    rotary = is_local and args.apply_rope_fusion and not args.rotary_interleaved
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return Kernels(
        weight_gradient=args.gradient_accumulation_fusion,
        rotary=rotary,
        # megatron-core calls it only if a rank holds whole query groups and if nothing happens to
        # queries and keys between projection and rotation.
        split_rotary=rotary and not args.qk_layernorm and groups >= args.tensor_model_parallel_size,
        swiglu=is_local
        and args.swiglu
        and args.bias_swiglu_fusion
        and not args.add_bias_linear
        and swiglu.is_available(),
        cross_entropy=is_local
        and args.cross_entropy_loss_fusion
        and args.tensor_model_parallel_size == 1,
    )


def install_kernels(
    kernels: Kernels,
    config: TransformerConfig,
    *,
    device: torch.device,
    grad_dtype: torch.dtype,
    wgrad: object = AccumulatingWgrad,
) -> Kernels:
    """Install the kernels in megatron-core; returns those that this build of torch supports.

    `grad_dtype` is the dtype of the gradient buffers, `wgrad` what accumulates into them. All ranks
    of a vendor must run the same build of torch, so that they come to the same result.
    """
    if kernels.weight_gradient and not can_accumulate_wgrad(
        device, input_dtype=config.params_dtype, grad_dtype=grad_dtype
    ):
        kernels = replace(kernels, weight_gradient=False)
    if kernels.weight_gradient:
        core_private.install_weight_gradient(wgrad)
        config.gradient_accumulation_fusion = True
    if kernels.rotary:
        from megatron.hetero.fused.rotary import Rotary

        rotary = Rotary()
        core_private.install_rotary(rotary.rotate, rotary.split_and_rotate)
        config.apply_rope_fusion = True
        config.fused_single_qkv_rope = kernels.split_rotary
    if kernels.swiglu:
        core_private.install_swiglu(swiglu.LigerSwiGLU)
    return kernels


class FusedLossGPT(GPTModel):
    """GPTModel with the fused cross entropy, for a vocabulary that is not split."""

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        from megatron.hetero.fused import cross_entropy

        return cross_entropy.fused_cross_entropy(logits, labels)


def model_class(kernels: Kernels) -> type[GPTModel]:
    return FusedLossGPT if kernels.cross_entropy else GPTModel


def patch_chunk(chunk: GPTModel, kernels: Kernels) -> None:
    """Replace modules of a built chunk for which megatron-core has no hook."""
    if kernels.weight_gradient and chunk.pre_process:
        embedding.use_rowwise_gradient(chunk.embedding.word_embeddings)
