"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434) on megatron-core's, over our own layers.

megatron-core's local layers split the down projections by columns and then lose the sum over
tensor-parallel ranks of the gradient of the rotated key, which all heads share. Here every rank has
the down projections whole and applies them to its part of the sequences, as TransformerEngine's
layers do: `finalize_model_grads` sums their gradients, and gathering the rotated key sums its.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.hetero.core_private import LatentAttention, install_replicated_linear
from megatron.hetero.layers import mark_sequence_parallel, norm_class

_SETTINGS = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor"),
    *("mscale", "mscale_all_dim"),
)


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer without bias that every tensor-parallel rank has whole.

    With megatron-core's constructor. Takes (s, b, input size) and returns (s, b, output size) and
    None; with sequence parallelism s counts the rank's rows.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias=False,
            device=torch.cuda.current_device(),
            dtype=config.params_dtype,
        )
        mark_sequence_parallel(self, config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return F.linear(x, self.weight), None


def config_class(args: argparse.Namespace) -> type[TransformerConfig]:
    return MLATransformerConfig if args.multi_latent_attention else TransformerConfig


def latent_attention_config(args: argparse.Namespace) -> dict[str, Any]:
    """What megatron-core's configuration says of latent attention; nothing without it."""
    if not args.multi_latent_attention:
        return {}
    return {name: getattr(args, name) for name in _SETTINGS}


def attention_spec(args: argparse.Namespace, config: TransformerConfig) -> ModuleSpec:
    """megatron-core's latent attention over our layers, without its attention core.

    The latent vectors are normalised where --qk-layernorm asks for it.
    """
    install_replicated_linear(ReplicatedLinear)
    norm = norm_class(config) if args.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
