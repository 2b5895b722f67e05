"""The layers that stand in for megatron-core's, against torch and against plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from hetero.errors import HeteroError
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.layers import LayerNorm, RMSNorm, SdpaAttention, norm_class

WIDTH = 8


@pytest.fixture(autouse=True)
def _without_accelerator() -> Iterator[None]:
    with cpu_shim():
        yield


def _config(**changed: Any) -> TransformerConfig:
    fixed = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
    }
    defaults = {"attention_dropout": 0.0, "params_dtype": torch.float32}
    return TransformerConfig(**fixed | defaults | changed)


def _device() -> torch.device:
    return torch.empty(0, device="cuda").device


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(RMSNorm, torch.nn.RMSNorm), (LayerNorm, torch.nn.LayerNorm)]
)
def test_a_norm_is_torchs(ours: Any, theirs: Any, zero_centred: bool) -> None:
    """--apply-layernorm-1p: a zero-centred norm stores its weight minus one."""
    norm = ours(_config(layernorm_zero_centered_gamma=zero_centred), 32, eps=1e-3)
    reference = theirs(32, eps=1e-3, device=_device())
    with torch.no_grad():
        for mine, other in zip(norm.parameters(), reference.parameters(), strict=True):
            mine.copy_(torch.randn(32))
            other.copy_(mine)
        reference.weight.add_(zero_centred)
    x = torch.randn(5, 2, 32, device=_device())
    torch.testing.assert_close(norm(x), reference(x), atol=1e-6 * zero_centred, rtol=0)


@pytest.mark.parametrize("ours", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_norm_marks_its_weights_for_sequence_parallelism(
    ours: Any, sequence_parallel: bool
) -> None:
    sizes = {"tensor_model_parallel_size": 2} if sequence_parallel else {}
    norm = ours(_config(sequence_parallel=sequence_parallel, **sizes), 32)
    marks = {parameter.sequence_parallel for parameter in norm.parameters()}
    assert marks == {sequence_parallel}


def test_the_norm_is_chosen_by_the_configuration_and_has_the_models_dtype() -> None:
    assert norm_class(_config(normalization="RMSNorm")) is RMSNorm
    assert norm_class(_config(normalization="LayerNorm")) is LayerNorm
    arguments = {"eps": 1e-6, "persist_layer_norm": True}  # megatron-core's
    norm = RMSNorm(config=_config(params_dtype=torch.bfloat16), hidden_size=32, **arguments)
    assert norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("ours", [RMSNorm, LayerNorm])
def test_a_norm_of_half_precision_takes_a_residual_in_float32(ours: Any) -> None:
    """--fp32-residual-connection"""
    norm = ours(_config(params_dtype=torch.bfloat16), 32, eps=1e-3)
    x = torch.randn(5, 2, 32, device=_device())
    normed = norm(x)
    assert normed.dtype == torch.bfloat16, "matrices are in half precision too"
    assert torch.equal(normed, ours(_config(), 32, eps=1e-3)(x).bfloat16())


def _attention(config: TransformerConfig, **arguments: Any) -> SdpaAttention:
    return SdpaAttention(config, 1, AttnMaskType.causal, "self", **arguments)


def _inputs(heads: int, groups: int, sequence: int = 6, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * 10 + groups)
    return [
        torch.randn(sequence, batch, n, WIDTH, generator=generator).to(_device())
        for n in (heads, groups, groups)
    ]


def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    forbidden: torch.Tensor,
    scale: float = 1 / math.sqrt(WIDTH),
) -> torch.Tensor:
    """Softmax attention, head by head; heads h*g .. h*g+g-1 share one key and value."""
    sequence, batch, heads, _ = query.shape
    width, shared = value.shape[-1], heads // key.shape[2]
    result = query.new_empty(sequence, batch, heads, width)
    for b in range(batch):
        for head in range(heads):
            scores = query[:, b, head] @ key[:, b, head // shared].T * scale
            scores = scores.masked_fill(forbidden[b], -math.inf)
            result[:, b, head] = scores.softmax(-1) @ value[:, b, head // shared]
    return result.reshape(sequence, batch, heads * width)


def _causal(sequence: int, batch: int) -> torch.Tensor:
    return (
        torch.ones(sequence, sequence, dtype=torch.bool, device=_device())
        .triu(1)
        .repeat(batch, 1, 1)
    )


@pytest.mark.parametrize(
    ("changed", "scale"),
    [
        *(({"num_query_groups": groups}, None) for groups in (4, 2, 1)),
        ({"num_query_groups": 4}, 0.5),
        # In evaluation nothing is dropped out.
        ({"num_query_groups": 4, "attention_dropout": 0.9}, None),
        *(
            ({"num_query_groups": 2, "attention_backend": AttnBackend[backend]}, None)
            for backend in ("auto", "flash", "fused", "unfused", "local")
        ),
    ],
    ids=str,
)
def test_attention_is_causal_softmax_with_shared_keys_and_values(
    changed: dict[str, Any], scale: float | None
) -> None:
    """--attention-backend"""
    query, key, value = _inputs(4, changed["num_query_groups"])
    attention = _attention(_config(**changed), softmax_scale=scale)
    output = attention.train("attention_dropout" not in changed)(query, key, value, None)
    expected = _reference(query, key, value, _causal(6, 2), scale=scale or 1 / math.sqrt(WIDTH))
    assert torch.allclose(output, expected, atol=1e-5)


@pytest.mark.parametrize("groups", [4, 2])
def test_a_mask_says_where_attention_is_forbidden(groups: int) -> None:
    """Two documents in one sample: neither sees the other."""
    query, key, value = _inputs(4, groups)
    forbidden = _causal(6, 2).clone()
    forbidden[0, 2:, :2] = True
    forbidden[1, 5:, :5] = True
    output = _attention(_config(num_query_groups=groups))(query, key, value, forbidden[:, None])
    assert torch.allclose(output, _reference(query, key, value, forbidden), atol=1e-5)


@pytest.mark.parametrize("width", [WIDTH, 5, 11], ids="values of width {}".format)
def test_output_and_gradients_are_those_of_the_reference(width: int) -> None:
    """Values as wide as keys, narrower and wider."""
    query, key, value = _inputs(4, 2)
    value = torch.cat([value, value.flip(-1) + 1], -1)[..., :width]
    ours = [t.requires_grad_() for t in (query, key, value)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    scale = None if width == WIDTH else 0.3
    found = _attention(_config(num_query_groups=2), softmax_scale=scale)(*ours, None)
    expected = _reference(*theirs, _causal(6, 2), scale=scale or 1 / math.sqrt(WIDTH))
    assert torch.allclose(found, expected, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "width"),
    [
        (SDPBackend.CUDNN_ATTENTION.value, 5),
        (SDPBackend.EFFICIENT_ATTENTION.value, WIDTH),
        (RuntimeError("no kernel"), WIDTH),
    ],
    ids=["cudnn", "another", "none"],
)
def test_narrower_values_are_padded_where_cudnn_would_not_compute_them(
    chosen: Any, width: int
) -> None:
    """On a GPU, which these tensors are made to seem to be on."""
    seen: list[int] = []

    def computed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> Any:
        seen.append(value.shape[-1])
        return value.repeat(1, 2, 1, 1)

    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    query, key, value = (each.as_subclass(OnGpu) for each in _inputs(4, 2))
    told = {"side_effect" if isinstance(chosen, Exception) else "return_value": chosen}
    with (
        mock.patch.object(torch, "_fused_sdp_choice", **told),
        mock.patch.object(F, "scaled_dot_product_attention", computed),
    ):
        output = _attention(_config(num_query_groups=2))(query, key, value[..., :5], None)
    assert seen == [width]
    assert output.shape == (6, 2, 4 * 5)


@pytest.mark.parametrize(
    ("backend", "allowed"),
    [
        ("flash", {"FLASH_ATTENTION"}),
        ("fused", {"CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"}),
        ("unfused", {"MATH"}),
        ("local", {"MATH"}),
    ],
)
def test_a_backend_leaves_torch_its_kernels_and_no_other(backend: str, allowed: set[str]) -> None:
    enabled: set[str] = set()

    def computed(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        enabled.update(kernel.name for kernel in _cur_sdpa_kernel_backends())
        return query

    with mock.patch.object(F, "scaled_dot_product_attention", computed):
        _attention(_config(attention_backend=AttnBackend[backend]))(*_inputs(4, 4), None)
    assert enabled == allowed


def test_a_kernel_that_does_not_take_it_is_one_sentence() -> None:
    """No fused kernel of a CPU has dropout."""
    attention = _attention(_config(attention_backend=AttnBackend.flash, attention_dropout=0.5))
    attention.config.sequence_parallel = True  # a dropout stream needs tensor-parallel groups
    with pytest.raises(
        HeteroError,
        match=r"--attention-backend flash takes .* of width 8 with --attention-dropout 0.5 on this",
    ) as error:
        attention(*_inputs(4, 4), None)
    assert "use --attention-backend auto" in str(error.value)
    # What no kernel computes is not blamed on the backend.
    query, key, value = _inputs(4, 4)
    with pytest.raises(RuntimeError, match="dtype"):
        _attention(_config(attention_backend=AttnBackend.flash))(query, key.double(), value, None)
