"""The model as the flags describe it: its size, its activation, and what of it is recomputed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

from hetero.plan import Mesh, Plan
from hetero.planner.model_shape import model_shape
from hetero.tools.operators.recording import built_model
from megatron.hetero import model, weights
from megatron.hetero.model import Interval, find_sources, plan_transfers, transformer_config
from tests.megatron.launches import parsed

# The computed size of a model is that of the model that is built.


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--untie-embeddings-and-output-weights",
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear",
        "--position-embedding-type rope --disable-bias-linear --add-qkv-bias",
        "--group-query-attention --num-query-groups 2 --kv-channels 24",
        "--qk-layernorm",
        "--group-query-attention --num-query-groups 1 --kv-channels 24 --qk-layernorm"
        " --add-qkv-bias --position-embedding-type rope --disable-bias-linear",
        "--swiglu",
        "--normalization RMSNorm --ffn-hidden-size 100 --untie-embeddings-and-output-weights",
        "--max-position-embeddings 48 --swiglu --group-query-attention --num-query-groups 2",
        "--qk-layernorm --normalization RMSNorm --swiglu --ffn-hidden-size 100",
        "--qk-layernorm --qk-layernorm-across-heads --normalization RMSNorm --reordered-norm"
        " --group-query-attention --num-query-groups 2 --residual-multiplier 0.5",
    ],
)
def test_a_size_that_is_computed_is_the_size_that_is_built(flags: str) -> None:
    args = parsed(f"--num-layers 2 --padded-vocab-size 100 {flags}")
    with built_model(args, torch.device("cpu")) as (model, _):
        built = sum(parameter.numel() for parameter in model.parameters())
    assert model_shape(args).parameters == built


# The MLP's activation is the flags' affair, not the device's.


X = torch.linspace(-4, 4, 33)


def activation(flags: str) -> torch.Tensor:
    """Of `X`, without an accelerator."""
    plan = Plan(meshes=(Mesh(vendor="cpu", stages=1),), layers=((1,),))
    config = transformer_config(parsed(flags), plan, torch.device("cpu"))
    assert not config.bias_activation_fusion
    return config.activation_func(X)


def test_gelu_is_what_the_fused_kernel_computes() -> None:
    # Compiled it computes the same, and a C++ compiler takes ten seconds for it.
    with torch.compiler.set_stance("force_eager"):
        fused = bias_gelu_impl(X[None], torch.zeros(33))[0]
    torch.testing.assert_close(activation(""), fused, rtol=0, atol=1e-6)


@pytest.mark.parametrize("flags", ["--no-bias-gelu-fusion", "--disable-bias-linear"])
def test_gelu_is_exact_where_nothing_would_be_fused(flags: str) -> None:
    torch.testing.assert_close(activation(flags), torch.nn.functional.gelu(X))
    assert (activation(flags) - activation("")).abs().max() > 1e-4


# Recomputation: gradients stay the same bits, and what the flags name is computed twice.


SHAPE = (
    "--num-layers 4 --padded-vocab-size 100 --position-embedding-type rope --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --disable-bias-linear"
)
FULL = "--recompute-granularity full"


def _train_step(flags: str) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Every gradient of one step, and how often each module was computed."""
    args = parsed(f"{SHAPE} {flags}")
    calls: Counter[str] = Counter()
    with built_model(args, torch.device("cpu")) as (chunk, _):
        named = list(weights.named_parameters([chunk], [0]))
        weights.initialize(named, model.initial_weights(args), weights.TensorRank())
        for name, module in chunk.named_modules():
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
        tensor_parallel.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
        torch.manual_seed(1)
        tokens = torch.arange(32).repeat(2, 1)
        chunk(tokens, tokens, None, labels=tokens).mean().backward()
        return {n: p.grad for n, p in chunk.named_parameters() if p.grad is not None}, calls


def _layers_computed(calls: Counter[str], part: str) -> list[int]:
    return [calls[f"decoder.layers.{layer}{part}"] for layer in range(4)]


@pytest.mark.parametrize(
    ("flags", "part", "computed"),
    [
        ("", "", [1, 1, 1, 1]),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 1", "", [2, 2, 2, 2]),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 2", "", [2, 2, 2, 2]),
        (f"{FULL} --recompute-method block --recompute-num-layers 3", "", [2, 2, 2, 1]),
        ("--recompute-activations", ".self_attention.core_attention", [2, 2, 2, 2]),
        ("--recompute-activations", ".mlp", [1, 1, 1, 1]),
        ("--recompute-activations --recompute-modules mlp", ".mlp", [2, 2, 2, 2]),
        (
            "--recompute-activations --recompute-modules mlp",
            ".self_attention.core_attention",
            [1, 1, 1, 1],
        ),
    ],
)
def test_what_is_named_is_computed_twice_and_gradients_stay(flags, part, computed) -> None:
    expected, _ = _train_step("")
    grads, calls = _train_step(flags)
    assert _layers_computed(calls, part) == computed
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


ELEMENTS = 24


@st.composite
def copies(draw: st.DrawFn) -> list[Interval]:
    """The intervals of one stage's ranks: tensor-parallel parts, replicated or split once more."""
    tensor, data = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    is_split = draw(st.booleans())
    part = ELEMENTS // tensor
    found = []
    for replica in range(data):
        for begin in range(0, ELEMENTS, part):
            own = (begin, begin + part)
            if is_split:
                # A bucket of the distributed optimizer has padding, so shares need not be equal.
                share = -(-part // data) + 1
                first = min(replica * share, part)
                own = (begin + first, begin + min(first + share, part))
            found.append(own)
    return found


@given(copies(), copies())
def test_every_element_that_a_rank_has_gets_the_other_copys_once(
    first: list[Interval], last: list[Interval]
) -> None:
    owned = [*first, *last]
    received: Counter[tuple[int, int]] = Counter()
    found = plan_transfers(owned, first_stage_size=len(first))
    for moved in found:
        assert (moved.source < len(first)) != (moved.target < len(first))
        begin, end = owned[moved.source]
        assert begin <= moved.begin < moved.end <= end
        received.update((moved.target, element) for element in range(moved.begin, moved.end))
    wanted = {(rank, element) for rank, own in enumerate(owned) for element in range(*own)}
    assert received == Counter(wanted)
    pairs = Counter((moved.source, moved.target) for moved in found)
    assert set(pairs.values()) <= {1}, "one piece of memory for each"


def test_replicas_take_turns() -> None:
    sources = [(0, 8), (0, 8)]
    assert [find_sources((0, 8), sources, preferred=turn) for turn in (0, 1)] == [
        [(0, (0, 8))],
        [(1, (0, 8))],
    ]


def test_what_nobody_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="element 4"):
        find_sources((0, 8), [(0, 4)], preferred=0)
