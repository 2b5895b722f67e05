"""The real modules compute what the plain formulas say, for every flag that changes a formula."""

from __future__ import annotations

import pytest

from hetero.tools.operators.comparison import compare, verdict
from tests.tools.operators.small_models import GPT, LLAMA, checked, computed


@pytest.mark.parametrize(
    "flags",
    [
        GPT,
        f"{GPT} --untie-embeddings-and-output-weights --squared-relu",
        f"{GPT} --position-embedding-type none --add-qkv-bias --disable-bias-linear",
        f"{GPT} --qk-layernorm --position-embedding-type rope --rotary-percent 0.5",
        f"{GPT} --apply-layernorm-1p --kv-channels 24",
        f"{LLAMA} --qk-layernorm --apply-layernorm-1p",
        f"{LLAMA} --rotary-interleaved --add-qkv-bias",
        f"{LLAMA} --use-rope-scaling --rope-scaling-factor 4 --rotary-base 500",
        f"{LLAMA} --rotary-seq-len-interpolation-factor 2 --norm-epsilon 1e-6",
        f"{LLAMA} --attention-backend unfused",
    ],
)
def test_every_kind_of_layer_agrees(flags) -> None:
    """In float32, where a formula that is nearly right is far off."""
    comparison = checked(flags, "fp32")
    assert comparison.passed, verdict(comparison)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_kernels_of_one_operator_agree_with_each_other(dtype, monkeypatch) -> None:
    """As those of two vendors would: torch's fused attention and its plain one."""
    fused = computed(LLAMA, dtype)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    comparison = compare(fused, computed(f"{LLAMA} --attention-backend unfused", dtype))
    assert comparison.passed, verdict(comparison)
    different = {row.operator for row in comparison.isolated if row.difference.error}
    assert different == {"layers.0.core_attention"}


def test_layers_follow_each_other() -> None:
    comparison = checked(LLAMA, "fp32", layers=2)
    assert comparison.passed, verdict(comparison)
    grown = [row.difference.error for row in comparison.accumulated if row.is_forward]
    assert max(grown) < 1e-5
    names = [op.name for op in comparison.left.operators]
    assert names.index("layers.0.mlp_residual") < names.index("layers.1.input_layernorm")


def test_every_operator_has_a_forward_and_a_backward() -> None:
    comparison = checked(LLAMA)
    rows = {(row.operator, row.tensor) for row in comparison.isolated}
    expected = {
        "embedding": {"output", "grad word_embeddings.weight"},
        "rotary_pos_emb": {"output"},
        "layers.0.input_layernorm": {"output", "grad hidden", "grad weight"},
        "layers.0.linear_qkv": {"output", "grad hidden", "grad weight"},
        "layers.0.rotary": {"query", "key", "value", "grad qkv"},
        "layers.0.core_attention": {"output", "grad query", "grad key", "grad value"},
        "layers.0.linear_proj": {"output", "grad hidden", "grad weight"},
        "layers.0.attention_residual": {"output", "grad branch", "grad residual"},
        "layers.0.pre_mlp_layernorm": {"output", "grad hidden", "grad weight"},
        "layers.0.linear_fc1": {"output", "grad hidden", "grad weight"},
        "layers.0.activation": {"output", "grad hidden"},
        "layers.0.linear_fc2": {"output", "grad hidden", "grad weight"},
        "layers.0.mlp_residual": {"output", "grad branch", "grad residual"},
        "final_layernorm": {"output", "grad hidden", "grad weight"},
        "output_layer": {"output", "grad hidden", "grad weight"},
        "cross_entropy": {"loss", "grad logits"},
    }
    assert rows == {(name, tensor) for name, tensors in expected.items() for tensor in tensors}
    assert [op.name for op in comparison.left.operators] == list(expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_honest_kernels_pass_at_the_width_of_llama_8b(dtype) -> None:
    shape = (
        "--num-layers 1 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 96 --micro-batch-size 1 "
        "--max-position-embeddings 96 --position-embedding-type rope --rotary-base 500000 "
        "--normalization RMSNorm --swiglu --disable-bias-linear --padded-vocab-size 1024"
    )
    comparison = checked(shape, dtype)
    assert comparison.passed, verdict(comparison)
