"""Layers that stand in where megatron-core's local ones fall short, on GPUs and on CPU.

`RMSNorm` and `LayerNorm` mark their weights for sequence parallelism, which megatron-core's wrapped
torch norms refuse. `SdpaAttention` uses torch's scaled_dot_product_attention: cuDNN or flash
attention on NVIDIA, AOTriton or CK on ROCm, a fused kernel on CPU, and no score matrix in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetero.errors import TrainingError

_KERNELS = {
    AttnBackend.flash: [SDPBackend.FLASH_ATTENTION],
    # Which of them takes grouped queries, masks or float32 differs from vendor to vendor.
    AttnBackend.fused: [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ],
    AttnBackend.unfused: [SDPBackend.MATH],
    AttnBackend.local: [SDPBackend.MATH],
}


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor and the parameter marks that megatron-core expects."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_plain(self, x):
            return super().forward(x)
        normed = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return (normed * _gain(self)).to(self.weight.dtype)


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm with the constructor and the parameter marks that megatron-core expects."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_plain(self, x):
            return super().forward(x)
        normed = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        return (normed * _gain(self) + self.bias).to(self.weight.dtype)


def _is_plain(norm: RMSNorm | LayerNorm, x: torch.Tensor) -> bool:
    """Whether torch's own does it: not with --fp32-residual-connection before half precision."""
    return not norm.zero_centered and x.dtype == norm.weight.dtype


def _gain(norm: RMSNorm | LayerNorm) -> torch.Tensor:
    """In float32: half precision has no number so close to one as a zero-centred weight asks."""
    return norm.weight.float() + norm.zero_centered


def _placement(config: TransformerConfig) -> dict[str, Any]:
    return {"device": torch.cuda.current_device(), "dtype": config.params_dtype}


def _mark(norm: torch.nn.Module, config: TransformerConfig) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def norm_class(config: TransformerConfig) -> type[RMSNorm] | type[LayerNorm]:
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm


class SdpaAttention(MegatronModule):
    """Causal attention core over torch's scaled_dot_product_attention.

    Takes query (s, b, heads, d) and key and value (s, b, query groups, d); returns (s, b, heads*d).
    A mask, where there is one, is megatron-core's: True where attention is forbidden.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        sequence, batch, heads, width = query.shape
        query_bnsd, key_bnsd, value_bnsd = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        allowed = None if attention_mask is None else ~attention_mask
        with self._dropout_stream():
            context_bnsd = self._attend(query_bnsd, key_bnsd, value_bnsd, allowed)
        return context_bnsd.permute(2, 0, 1, 3).reshape(sequence, batch, heads * width)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
    ) -> torch.Tensor:
        """`--attention-backend`: torch chooses, or one of its kernels is required."""
        backends = _KERNELS.get(self.config.attention_backend)
        compute = partial(
            F.scaled_dot_product_attention,
            is_causal=allowed is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        if backends is None:
            return compute(query, key, value, attn_mask=allowed)
        try:
            with sdpa_kernel(backends):
                return compute(query, key, value, attn_mask=allowed)
        except RuntimeError as error:
            # torch has no class of errors for it. One position tells what the kernel takes.
            one = [tensor[:, :, :1] for tensor in (query, key, value)]
            mask = None if allowed is None else allowed[..., :1, :1]
            if _computes(compute, one, mask, backends) or not _computes(compute, one, mask):
                raise
            raise TrainingError(
                f"no kernel of --attention-backend {self.config.attention_backend.name} takes "
                f"{query.dtype} heads of width {query.shape[-1]} on this {query.device.type}; use "
                "--attention-backend auto"
            ) from error

    def _dropout_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Tensor-parallel ranks hold different heads and must drop out differently."""
        if self.training and self.dropout > 0.0 and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def _computes(
    compute: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    backends: Sequence[SDPBackend] | None = None,
) -> bool:
    """Whether torch computes attention of these, with these kernels alone where they are given."""
    try:
        with sdpa_kernel(list(backends)) if backends else contextlib.nullcontext():
            compute(*tensors, attn_mask=mask)
    except RuntimeError:
        return False
    return True
