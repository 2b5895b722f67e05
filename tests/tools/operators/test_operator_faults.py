"""Mistakes put into the real modules are found, in the operator that makes them, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.mlp import MLP

from hetero.tools.operators.comparison import compare, verdict
from megatron.hetero.layers import RMSNorm, SdpaAttention
from tests.tools.operators.small_models import LLAMA, computed, reference

Fault = AbstractContextManager[Any]


ATTENTION = "layers.0.core_attention/output"


def _result_of(owner: type, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Change what a module's forward returns."""
    original = owner.forward  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, tuple):
            return (change(result[0]), *result[1:])
        return change(result)

    return mock.patch.object(owner, "forward", forward)


def _built_with(owner: type, **changed: Any) -> Fault:
    """Change what a module is built with."""
    original = owner.__init__  # type: ignore[misc]

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **(kwargs | changed))

    return mock.patch.object(owner, "__init__", build)


def _attention(**changed: Any) -> Fault:
    """Change how the attention kernel is called."""
    original = F.scaled_dot_product_attention

    def attend(query: Any, key: Any, value: Any, **kwargs: Any) -> torch.Tensor:
        if changed.get("swap_groups"):
            key, value = key.flip(1), value.flip(1)
        if "scale" in changed:
            kwargs["scale"] = changed["scale"] / query.shape[-1] ** 0.5
        if changed.get("sees_the_future"):
            kwargs["is_causal"] = False
        return original(query, key, value, **kwargs)

    return mock.patch.object(F, "scaled_dot_product_attention", attend)


def _without_a_head(context: torch.Tensor) -> torch.Tensor:
    kept = torch.ones(64)
    kept[16:32] = 0
    return context * kept.to(context.dtype)


def _backward_only(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Leave a result as it is and change its gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return change(grads[0])

    return Changed.apply  # type: ignore[no-any-return]


def _rotated_backwards() -> Fault:
    original = rope_utils._rotate_half
    return mock.patch.object(rope_utils, "_rotate_half", lambda x, kind: -original(x, kind))


def _activation_too_large() -> Fault:
    original = MLP.forward

    def forward(self: MLP, hidden: torch.Tensor, **kwargs: Any) -> Any:
        silu = self.config.activation_func
        with mock.patch.object(self.config, "activation_func", lambda x: silu(x) * 1.01):
            return original(self, hidden, **kwargs)

    return mock.patch.object(MLP, "forward", forward)


def _transposed_weight() -> Fault:
    """The square output projection, used the wrong way round."""
    original = RowParallelLinear.forward

    def forward(self: RowParallelLinear, x: torch.Tensor) -> Any:
        if self.weight.shape[0] != self.weight.shape[1]:
            return original(self, x)
        return F.linear(x, self.weight.t()), None

    return mock.patch.object(RowParallelLinear, "forward", forward)


def _residual_forgotten() -> Fault:
    def build(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return lambda branch, residual, prob: branch[0] + 0 * residual

    original = transformer_layer.build_module

    def build_module(spec: Any, *args: Any, **kwargs: Any) -> Any:
        built = original(spec, *args, **kwargs)
        return build if getattr(built, "__name__", "") == "get_bias_dropout_add" else built

    return mock.patch.object(transformer_layer, "build_module", build_module)


FAULTS: dict[str, tuple[str, Callable[[], Fault]]] = {
    "norm 1 % too large": (
        "layers.0.input_layernorm/output",
        lambda: _result_of(RMSNorm, lambda x: x * 1.01),
    ),
    "epsilon 1e-6 for 1e-5": (
        "layers.0.input_layernorm/output",
        lambda: _built_with(RMSNorm, eps=1e-6),
    ),
    "rows of a projection permuted": (
        "layers.0.linear_qkv/output",
        lambda: _result_of(ColumnParallelLinear, lambda x: x.roll(1, -1)),
    ),
    "weight transposed": ("layers.0.linear_proj/output", _transposed_weight),
    "rotary base 500000 for 10000": (
        "rotary_pos_emb/output",
        lambda: _built_with(RotaryEmbedding, rotary_base=500000),
    ),
    "rotated the other way": ("layers.0.rotary/query", _rotated_backwards),
    "a head dropped": (ATTENTION, lambda: _result_of(SdpaAttention, _without_a_head)),
    "softmax scale 1 % off": (ATTENTION, lambda: _attention(scale=1.01)),
    "keys of another group": (ATTENTION, lambda: _attention(swap_groups=True)),
    "no causal mask": (ATTENTION, lambda: _attention(sees_the_future=True)),
    "residual forgotten": ("layers.0.attention_residual/output", _residual_forgotten),
    "activation 1 % too large": ("layers.0.activation/output", _activation_too_large),
    "attention's gradient 1 % too small": (
        "layers.0.core_attention/grad value",
        lambda: _result_of(SdpaAttention, _backward_only(lambda grad: grad * 0.99)),
    ),
    "a gradient that is not finite": (
        "final_layernorm/grad weight",
        lambda: _result_of(RMSNorm, _backward_only(lambda grad: grad / 0)),
    ),
}
"""The first result that is wrong with each."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found_where_it_is_made(fault) -> None:
    where, inject = FAULTS[fault]
    operator, tensor = where.split("/")
    with inject():
        ours = computed(LLAMA)
    comparison = compare(ours, reference(LLAMA))
    row = comparison.first
    assert row is not None, "the mistake was not found"
    assert (row.operator, row.tensor) == (operator, tensor), verdict(comparison)
    # Each operator gets inputs of its own, so what comes after is not blamed.
    kind = operator.split(".")[-1].replace("input_", "").replace("pre_mlp_", "")
    innocent = {"core_attention", "linear_fc2", "cross_entropy"} - {kind}
    blamed = {
        row.operator.split(".")[-1] for row in comparison.isolated if not row.difference.passed
    }
    assert not blamed & innocent
