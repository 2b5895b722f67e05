"""How Hugging Face's tensors lie in megatron-core's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.hetero.huggingface.mapping import ExpertShape, LatentShape, ModelShape, Rule, rules


@st.composite
def expert_shapes(draw: st.DrawFn, *, layers: int) -> ExpertShape:
    return ExpertShape(
        layers=frozenset(draw(st.sets(st.integers(0, layers - 1), min_size=1))),
        count=draw(st.integers(1, 5)),
        ffn=draw(st.integers(1, 4)),
        shared=draw(st.integers(0, 2)),
        bias=draw(st.booleans()),
        module=draw(st.sampled_from(["mlp", "block_sparse_moe"])),
        projections=draw(st.sampled_from([("gate_proj", "up_proj", "down_proj"), ("a", "b", "c")])),
    )


@st.composite
def latent_shapes(draw: st.DrawFn) -> LatentShape:
    sizes = [draw(st.integers(1, 4)) for _ in range(4)]
    return LatentShape(draw(st.none() | st.integers(1, 4)), *sizes)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    groups = draw(st.integers(1, 4))
    vocabulary = draw(st.integers(1, 9))
    layers = draw(st.integers(1, 3))
    return ModelShape(
        layers=layers,
        hidden=draw(st.integers(1, 5)),
        ffn=draw(st.integers(1, 5)),
        heads=groups * draw(st.integers(1, 4)),
        groups=groups,
        channels=draw(st.integers(1, 4)),
        vocabulary=vocabulary,
        rows=vocabulary + draw(st.integers(0, 4)),
        qkv_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        query_norm=draw(st.integers(0, 3)),
        key_norm=draw(st.integers(0, 3)),
        reordered_norm=draw(st.booleans()),
        fused_projections=draw(st.booleans()),
        experts=draw(st.none() | expert_shapes(layers=layers)),
        latent=draw(st.none() | latent_shapes()),
    )


def _numbered(rule: Rule) -> list[torch.Tensor]:
    """Its parts, every element of them another number, and none of them zero."""
    offset, parts = 1, []
    for part in rule.parts:
        size = math.prod(part.shape)
        parts.append(torch.arange(offset, offset + size).reshape(part.shape))
        offset += size
    return parts


@given(shapes())
def test_splitting_undoes_joining(shape: ModelShape) -> None:
    for rule in rules(shape):
        parts = _numbered(rule)
        whole = rule.join(parts)
        assert tuple(whole.shape) == rule.shape
        for found, part in zip(rule.split(whole), parts, strict=True):
            assert torch.equal(found, part)
        # Rows of padding are zero.
        assert whole.count_nonzero() == sum(part.numel() for part in parts)


@given(shapes())
def test_every_name_stands_for_one_tensor(shape: ModelShape) -> None:
    ours = [rule.name for rule in rules(shape)]
    theirs = [part.name for rule in rules(shape) for part in rule.parts]
    assert len(set(ours)) == len(ours)
    assert len(set(theirs)) == len(theirs)
    assert ("lm_head.weight" in theirs) == (not shape.tied)


@given(shapes())
def test_a_layer_has_the_tensors_of_its_experts_or_those_of_one_mlp(shape: ModelShape) -> None:
    experts = shape.experts
    for layer in range(shape.layers):
        prefix = f"decoder.layers.{layer}.mlp."
        found = {rule.name.removeprefix(prefix) for rule in rules(shape) if prefix in rule.name}
        two = {f"linear_fc{number}.weight" for number in (1, 2)}
        if experts is None or layer not in experts.layers:
            assert found == two
            continue
        expected = {
            f"experts.local_experts.{n}.{each}" for n in range(experts.count) for each in two
        }
        expected |= {f"shared_experts.{each}" for each in two if experts.shared}
        expected |= {"router.weight"} | ({"router.expert_bias"} if experts.bias else set())
        assert found == expected


def test_a_bias_of_scores_is_in_float32_whatever_the_model_is_in() -> None:
    experts = ExpertShape(layers=frozenset({0}), count=3, ffn=2, bias=True)
    sizes = {"layers": 1, "hidden": 1, "ffn": 2, "heads": 1, "groups": 1, "channels": 2}
    shape = ModelShape(**sizes, vocabulary=3, rows=5, qkv_bias=False, tied=False, experts=experts)
    (rule,) = (rule for rule in rules(shape) if rule.name.endswith("expert_bias"))
    assert rule.dtype == torch.float32
    bias = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    assert rule.join([bias]).dtype == torch.float32
    assert torch.equal(rule.join([bias]), bias.float())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_each_query_group_has_its_queries_then_its_key_then_its_value(
    kind: str, fused: bool
) -> None:
    queries = [10, 11, 20, 21, 30, 31, 40, 41]
    keys, values = [100, 101, 200, 201], [1000, 1001, 2000, 2001]
    first_group = [10, 11, 20, 21, 100, 101, 1000, 1001]
    second_group = [30, 31, 40, 41, 200, 201, 2000, 2001]
    sizes = {"layers": 1, "hidden": 1, "ffn": 2, "heads": 4, "groups": 2, "channels": 2}
    shape = ModelShape(
        **sizes, vocabulary=3, rows=5, qkv_bias=True, tied=False, fused_projections=fused
    )
    (rule,) = (rule for rule in rules(shape) if rule.name.endswith(f"linear_qkv.{kind}"))
    three = [[*queries, *keys, *values]] if fused else [queries, keys, values]
    given = zip(three, rule.parts, strict=True)
    joined = rule.join([torch.tensor(numbers).reshape(part.shape) for numbers, part in given])
    assert joined.flatten().tolist() == first_group + second_group
