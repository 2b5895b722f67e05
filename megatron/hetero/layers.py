"""Norms and attention core for megatron-core's local layer spec, on GPUs and on CPU.

`RMSNorm` and `LayerNorm` support sequence parallelism, which megatron-core's wrapped torch norms
refuse. `HeadsNorm` and `ResidualAdd` are what OLMo-2 and Granite have and megatron-core has not.
`SdpaAttention` uses torch's scaled_dot_product_attention: cuDNN or flash attention on NVIDIA,
AOTriton or CK on ROCm, a fused kernel on CPU; the score matrix is never materialised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetero.errors import HeteroError
from megatron.hetero import context_parallel

_SDPA_BACKENDS = {
    AttnBackend.flash: [SDPBackend.FLASH_ATTENTION],
    # Support for grouped queries, masks and float32 differs between vendors.
    AttnBackend.fused: [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ],
    AttnBackend.unfused: [SDPBackend.MATH],
    AttnBackend.local: [SDPBackend.MATH],
}


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm with megatron-core's constructor and parameter attributes."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, **_factory_kwargs(config))
        mark_sequence_parallel(self, config)
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_plain(self, x):
            return super().forward(x)
        normed = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return (normed * _gain(self)).to(self.weight.dtype)


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm with megatron-core's constructor and parameter attributes."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, **_factory_kwargs(config))
        mark_sequence_parallel(self, config)
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_plain(self, x):
            return super().forward(x)
        normed = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        return (normed * _gain(self) + self.bias).to(self.weight.dtype)


def _is_plain(norm: RMSNorm | LayerNorm, x: torch.Tensor) -> bool:
    """Whether torch's own forward suffices: no zero-centred weight, and one dtype throughout."""
    return not norm.zero_centered and x.dtype == norm.weight.dtype


def _gain(norm: RMSNorm | LayerNorm) -> torch.Tensor:
    """The scale, in float32: half precision cannot represent 1 + a small zero-centred weight."""
    return norm.weight.float() + norm.zero_centered


def _factory_kwargs(config: TransformerConfig) -> dict[str, Any]:
    return {"device": torch.cuda.current_device(), "dtype": config.params_dtype}


def mark_sequence_parallel(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Let megatron-core sum the gradients of a module that works on a rank's part of sequences."""
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def norm_class(config: TransformerConfig) -> type[RMSNorm] | type[LayerNorm]:
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm


class HeadsNorm(RMSNorm):
    """One RMSNorm over all heads of the queries, or of the keys (--qk-layernorm-across-heads).

    Every tensor-parallel rank has the whole weight and uses the part of its own heads: the rest of
    its gradient is zero, and megatron-core sums gradients of query and key norms over the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        heads: int,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        """`hidden_size` is the width of a head, `heads` their number on all ranks of `group`."""
        super().__init__(config, heads * hidden_size, eps=eps)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (s, b, own heads, width of a head)."""
        flat = x.flatten(2)
        if self._group.size() == 1:
            return super().forward(flat).view_as(x)
        wide = flat.float()
        # The second call sums the gradients, which the first one only passes on.
        total = tensor_parallel.copy_to_tensor_model_parallel_region(
            tensor_parallel.reduce_from_tensor_model_parallel_region(
                wide.square().sum(-1, keepdim=True), group=self._group
            ),
            group=self._group,
        )
        normed = wide * torch.rsqrt(total / self.weight.shape[0] + self.eps)
        gain = _gain(self).chunk(self._group.size())[self._group.rank()]
        return (normed * gain).to(x.dtype).view_as(x)


class ResidualAdd(torch.nn.Module):
    """Adds the output of attention or MLP to the residual, after a norm or with a factor.

    Takes the place of megatron-core's bias-dropout-add in a layer spec.
    """

    def __init__(self, config: TransformerConfig, *, normed: bool, multiplier: float) -> None:
        super().__init__()
        self._multiplier = multiplier
        self.norm = (
            norm_class(config)(config, config.hidden_size, eps=config.layernorm_epsilon)
            if normed
            else None
        )

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = get_bias_dropout_add(training, fused)

        def add_output(
            output_with_bias: tuple[torch.Tensor, torch.Tensor | None],
            residual: torch.Tensor,
            dropout: float,
        ) -> torch.Tensor:
            output, bias = output_with_bias
            if bias is not None:
                output = output + bias
            if self.norm is not None:
                output = self.norm(output)
            if self._multiplier != 1.0:
                output = output * self._multiplier
            added: torch.Tensor = add((output, None), residual, dropout)
            return added

        return add_output


class SdpaAttention(MegatronModule):
    """Causal attention core over torch's scaled_dot_product_attention.

    Takes query (s, b, heads, d), key (s, b, query groups, d) and value (s, b, query groups, v);
    returns (s, b, heads*v). `attention_mask` is megatron-core's: True where masked out. None means
    causal. Where ranks share sequences s counts this rank's rows, and a mask is still that of whole
    sequences.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        context_comm: str = context_parallel.P2P,
        **_: Any,
    ) -> None:
        """`context_comm`: how ranks that share sequences exchange keys and values."""
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self._context_comm = context_comm
        group = None if pg_collection is None else pg_collection.cp
        self._context_group = None if group is None or group.size() == 1 else group

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
        sequence, batch, heads, _ = query.shape
        width = value.shape[-1]
        query_bnsd, key_bnsd, value_bnsd = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        allowed = None if attention_mask is None else ~attention_mask
        group = self._context_group
        if group is not None or not self._takes_widths(query_bnsd, key_bnsd, value_bnsd, allowed):
            query_bnsd, key_bnsd, value_bnsd = _of_one_width(query_bnsd, key_bnsd, value_bnsd)
        with self._dropout_stream():
            if group is None:
                context_bnsd = self._attend(query_bnsd, key_bnsd, value_bnsd, allowed)
            else:
                context_bnsd = context_parallel.attend(
                    query_bnsd,
                    key_bnsd,
                    value_bnsd,
                    allowed,
                    compute=self._attend,
                    comm_type=self._context_comm,
                    group=group,
                    kernel=self._block_kernel(query_bnsd, key_bnsd, value_bnsd),
                )
        context_sbnd = context_bnsd.permute(2, 0, 1, 3)[..., :width]
        return context_sbnd.reshape(sequence, batch, heads * width)

    def _takes_widths(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
    ) -> bool:
        """Whether a fast kernel takes heads of these widths as they are.

        cuDNN's takes values of another width than the keys'. Where torch would choose a slower
        kernel for them, the others are faster with padded ones.
        """
        if value.shape[-1] == key.shape[-1]:
            return True
        if query.device.type != "cuda":
            return False
        backends = _SDPA_BACKENDS.get(self.config.attention_backend)
        dropout = self.dropout if self.training else 0.0
        try:
            with contextlib.nullcontext() if backends is None else sdpa_kernel(backends):
                chosen = torch._fused_sdp_choice(
                    *(query, key, value, allowed, dropout, allowed is None), scale=self.scale
                )
        except RuntimeError:  # torch has no exception class for "no kernel available"
            return False
        return SDPBackend(chosen) == SDPBackend.CUDNN_ATTENTION

    def _block_kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> context_parallel.BlockKernel | None:
        """The kernel for blocks of queries and keys; None where there is dropout, or none fits."""
        if self.training and self.dropout > 0.0:
            return None
        backends = _SDPA_BACKENDS.get(self.config.attention_backend)
        with contextlib.nullcontext() if backends is None else sdpa_kernel(backends):
            return context_parallel.block_kernel(query, key, value, scale=self.scale)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention (b, heads, s, d) with the kernels that --attention-backend allows.

        `allowed` is True where attention is allowed. Raises HeteroError if no kernel fits.
        """
        backends = _SDPA_BACKENDS.get(self.config.attention_backend)
        dropout = self.dropout if self.training else 0.0
        compute = partial(
            F.scaled_dot_product_attention,
            is_causal=allowed is None,
            dropout_p=dropout,
            scale=self.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        if backends is None:
            return compute(query, key, value, attn_mask=allowed)
        try:
            with sdpa_kernel(backends):
                return compute(query, key, value, attn_mask=allowed)
        except RuntimeError as error:
            # torch has no exception class for "no kernel available": try with one position.
            one = [tensor[:, :, :1] for tensor in (query, key, value)]
            mask = None if allowed is None else allowed[..., :1, :1]
            if _is_supported(compute, one, mask, backends) or not _is_supported(compute, one, mask):
                raise
            raise HeteroError(
                f"no kernel of --attention-backend {self.config.attention_backend.name} takes "
                f"{query.dtype} heads of width {query.shape[-1]}"
                f"{f' with --attention-dropout {dropout:g}' * (dropout > 0)}"
                f"{' and an attention mask' * (mask is not None)} on this {query.device.type}; use "
                "--attention-backend auto",
                known_to_all=True,
            ) from error

    def _dropout_stream(self) -> contextlib.AbstractContextManager[Any]:
        """RNG context: tensor-parallel ranks hold different heads and need different dropout."""
        if self.training and self.dropout > 0.0 and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def _of_one_width(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Heads padded to the widest of the tensors.

    Zeros change neither scores nor outputs; megatron-core gives the scale with such heads.
    """
    widest = max(tensor.shape[-1] for tensor in tensors)
    return [
        tensor if tensor.shape[-1] == widest else F.pad(tensor, (0, widest - tensor.shape[-1]))
        for tensor in tensors
    ]


def _is_supported(
    compute: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    backends: Sequence[SDPBackend] | None = None,
) -> bool:
    """Whether torch can compute this attention, with the given backends or with any."""
    try:
        with sdpa_kernel(list(backends)) if backends else contextlib.nullcontext():
            compute(*tensors, attn_mask=mask)
    except RuntimeError:
        return False
    return True
