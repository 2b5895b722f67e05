"""Which fused kernels a run trains with, from its flags and its device.

Modules that use torch.compile are imported by the runs that use them: it brings torch's compiler,
which costs every start a second.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training import core_private
from megatron.training.fused import embedding, swiglu
from megatron.training.fused.weight_gradient import ProductsIntoGradients, can_add_products


@dataclass(frozen=True)
class Kernels:
    """The fused kernels of `megatron.training.fused` that a run uses."""

    weight_gradient: bool = False
    """Products add to the gradient buffer; the embedding to the rows that occurred, in float32."""
    rotary: bool = False
    split_rotary: bool = False
    """The rotation reads the fused projection, instead of queries and keys split before."""
    swiglu: bool = False
    cross_entropy: bool = False

    def names(self) -> str:
        """For a line in the log."""
        used = [name.replace("_", " ") for name, is_used in vars(self).items() if is_used]
        return ", ".join(used) or "none"


def choose(args: argparse.Namespace, device: torch.device) -> Kernels:
    """What the flags ask for. On CPU the plain operations are used, one by one.

    Only what keeps weight gradients back keeps back a kernel's.
    """
    if device.type != "cuda":
        return Kernels(weight_gradient=args.delay_wgrad_compute)
    is_local = args.transformer_impl == "local"
    rotary = is_local and args.apply_rope_fusion and not args.rotary_interleaved
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return Kernels(
        weight_gradient=args.gradient_accumulation_fusion,
        rotary=rotary,
        # megatron-core takes this way only where a rank holds whole groups and nothing is done to
        # queries and keys between their projection and their rotation.
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


def use(
    kernels: Kernels,
    config: TransformerConfig,
    *,
    device: torch.device,
    grad_dtype: torch.dtype,
    products: object = ProductsIntoGradients,
) -> Kernels:
    """Put the kernels where megatron-core looks for them; returns those that work here.

    `grad_dtype` is the type of the gradient buffers, `products` what adds to them. Every rank of a
    vendor has the same build of torch, so all come to the same answer.
    """
    if kernels.weight_gradient and not can_add_products(
        device, input_dtype=config.params_dtype, grad_dtype=grad_dtype
    ):
        kernels = replace(kernels, weight_gradient=False)
    if kernels.weight_gradient:
        core_private.provide_weight_gradient(products)
        config.gradient_accumulation_fusion = True
    if kernels.rotary:
        from megatron.training.fused.rotary import Rotary

        rotary = Rotary()
        core_private.provide_rotary(rotary.rotate, rotary.split_and_rotate)
        config.apply_rope_fusion = True
        config.fused_single_qkv_rope = kernels.split_rotary
    if kernels.swiglu:
        core_private.provide_swiglu(swiglu.OnePassSwiGLU)
    return kernels


class FusedLossGPT(GPTModel):
    """megatron-core's GPT with the one-pass loss, for a vocabulary that one rank holds whole."""

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        from megatron.training.fused import cross_entropy

        return cross_entropy.token_losses(logits, labels)


def model_class(kernels: Kernels) -> type[GPTModel]:
    return FusedLossGPT if kernels.cross_entropy else GPTModel


def adapt(chunk: GPTModel, kernels: Kernels) -> None:
    """Exchange what megatron-core built and gives no hook for."""
    if kernels.weight_gradient and chunk.pre_process:
        embedding.add_gradients_by_row(chunk.embedding.word_embeddings)
