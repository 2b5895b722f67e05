"""Latent attention, against the arithmetic of DeepSeek-V2 (arXiv:2405.04434) and yarn's
(arXiv:2309.00071), and what of it is kept while text is generated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel

from hetero.tools.operators.recording import built_model
from megatron.hetero import generation, model, weights
from megatron.hetero.generation import CachedLogits, next_logits
from tests.megatron.launches import parsed

HEADS, LATENT, PLAIN, ROTATED, VALUES = 4, 24, 16, 8, 12
SHAPE = (
    "--num-layers 2 --padded-vocab-size 100 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2 "
    f"--multi-latent-attention --kv-lora-rank {LATENT} --qk-head-dim {PLAIN} "
    f"--qk-pos-emb-head-dim {ROTATED} --v-head-dim {VALUES}"
)
QUERIES = "--q-lora-rank 20"
YARN = "--rope-type yarn --rotary-scaling-factor 40 --mscale 0.9 --mscale-all-dim 0.6"


@contextmanager
def _drawn(flags: str) -> Iterator[GPTModel]:
    """The model of the flags, with its initial weights, and norms that are not all one."""
    args = parsed(f"{SHAPE} {flags}")
    with built_model(args, torch.device("cpu")) as (chunk, _):
        named = list(weights.named_parameters([chunk], [0]))
        weights.initialize(named, model.initial_weights(args), weights.TensorRank())
        tensor_parallel.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
        with torch.no_grad():
            for name, parameter in named:
                if "layernorm" in name:
                    parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
        yield chunk


def _frequencies(*, yarn: bool, base: float = 10000.0, factor: float = 40.0) -> torch.Tensor:
    """Of each rotated pair: low ones are stretched by the factor, high ones are kept."""
    plain = torch.tensor([base ** (-2 * i / ROTATED) for i in range(ROTATED // 2)])
    if not yarn:
        return plain

    def pair_that_turns(turns: float) -> float:
        return ROTATED * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(pair_that_turns(32)), math.ceil(pair_that_turns(1))
    low, high = max(low, 0), min(high, ROTATED - 1)
    ramp = ((torch.arange(ROTATED // 2) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def _rotated(x: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
    """Adjacent channels are one complex number, which the position turns."""
    turned = torch.outer(torch.arange(x.shape[0]).float(), frequencies)[:, None, None, :]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.full_like(turned, scale), turned)).flatten(
        -2
    )


def _expected(attention: torch.nn.Module, hidden: torch.Tensor, *, yarn: bool) -> torch.Tensor:
    """(s, b, hidden) of the weights of `attention`, head by head."""
    weight = dict(attention.named_parameters())

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weight[f"linear_{name}.weight"].T

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        if (gain := weight.get(f"{name}.weight")) is None:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain

    def scale_of(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(40) + 1 if yarn else 1.0

    if "linear_q_proj.weight" in weight:
        queries = project(hidden, "q_proj")
    else:
        queries = project(normed(project(hidden, "q_down_proj"), "q_layernorm"), "q_up_proj")
    latent, shared_key = project(hidden, "kv_down_proj").split([LATENT, ROTATED], -1)
    keys_values = project(normed(latent, "kv_layernorm"), "kv_up_proj")
    queries = queries.unflatten(-1, (HEADS, -1))
    keys, values = keys_values.unflatten(-1, (HEADS, -1)).split([PLAIN, VALUES], -1)
    frequencies, scale = _frequencies(yarn=yarn), scale_of(0.9) / scale_of(0.6)
    shared_key = _rotated(shared_key.unsqueeze(2), frequencies, scale)
    turned = _rotated(queries[..., PLAIN:], frequencies, scale)
    scores = torch.einsum("sbhd,tbhd->bhst", queries[..., :PLAIN], keys)
    scores = scores + torch.einsum("sbhd,tbd->bhst", turned, shared_key.squeeze(2))
    scores = scores * scale_of(0.6) ** 2 / math.sqrt(PLAIN + ROTATED)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    chances = scores.masked_fill(later, -math.inf).softmax(-1)
    return project(torch.einsum("bhst,tbhd->sbhd", chances, values).flatten(2), "proj")


@pytest.mark.parametrize(
    ("flags", "yarn"),
    [
        ("--rope-type rope", False),
        (f"--rope-type rope {QUERIES} --qk-layernorm", False),
        (YARN, True),
        (f"{YARN} {QUERIES} --qk-layernorm", True),
    ],
)
def test_it_computes_what_the_paper_says(flags: str, yarn: bool) -> None:
    with _drawn(flags) as chunk:
        attention = chunk.decoder.layers[1].self_attention
        hidden = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(2))
        output, bias = attention(hidden, None)
        assert bias is None
        torch.testing.assert_close(
            output, _expected(attention, hidden, yarn=yarn), rtol=1e-4, atol=1e-5
        )


def test_what_adds_to_the_residual_stream_starts_from_smaller_weights() -> None:
    with _drawn(f"{QUERIES} --qk-layernorm") as chunk:
        attention = dict(chunk.decoder.layers[0].self_attention.named_parameters())
    for name, weight in attention.items():
        if "layernorm" not in name:
            std = 0.2 / math.sqrt(2 * 2) if name == "linear_proj.weight" else 0.2
            assert weight.std().item() == pytest.approx(std, rel=0.1), name


def test_the_up_projections_are_computed_twice_where_they_are_named() -> None:
    def step(flags: str) -> tuple[dict[str, torch.Tensor], Counter[str]]:
        calls: Counter[str] = Counter()
        with _drawn(f"{YARN} {QUERIES} --qk-layernorm {flags}") as chunk:
            for name, module in chunk.named_modules():
                module.register_forward_hook(lambda *_, name=name: calls.update([name]))
            tokens = torch.arange(32).repeat(2, 1)
            chunk(tokens, tokens, None, labels=tokens).mean().backward()
            return {n: p.grad for n, p in chunk.named_parameters() if p.grad is not None}, calls

    expected, _ = step("")
    grads, calls = step(
        "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"
    )
    attention = "decoder.layers.0.self_attention"
    for name, computed in (
        *(("core_attention", 2), ("linear_q_up_proj", 2), ("linear_kv_up_proj", 2)),
        *(("linear_q_down_proj", 1), ("linear_kv_down_proj", 1), ("linear_proj", 1)),
    ):
        assert calls[f"{attention}.{name}"] == computed, name
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


@pytest.mark.parametrize("flags", ["--rope-type rope", f"{YARN} {QUERIES} --qk-layernorm"])
def test_keys_and_values_that_are_kept_give_the_logits_of_a_whole_pass(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for few tokens at first, so that the cache also grows."""
    monkeypatch.setattr(generation, "_MIN_CACHE_TOKENS", 4)
    text = torch.randint(0, 100, (30,), generator=torch.Generator().manual_seed(5)).tolist()
    with _drawn(flags) as chunk, torch.inference_mode():
        chunk.eval()
        expected = next_logits(chunk, text)
        cached = CachedLogits(chunk)
        for length in (3, 4, 6, 9, 10, 11, 12, 15, 29, 30):
            found = cached.logits_after(text[:length])
            torch.testing.assert_close(found, expected[length - 1], rtol=1e-4, atol=1e-5)
