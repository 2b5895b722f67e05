"""Recomputation: gradients stay the same bits, and what the flags name is computed twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from megatron.core import tensor_parallel

from megatron.training import model, weights
from megatron.training.arguments import parse_args
from tests.training.arguments.conftest import command_line
from tools.operators.recording import built_model

SHAPE = (
    "--num-layers 4 --padded-vocab-size 100 --position-embedding-type rope --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --disable-bias-linear"
)
FULL = "--recompute-granularity full"


def _train_step(flags: str) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Every gradient of one step, and how often each module was computed."""
    args = parse_args(command_line(f"{SHAPE} {flags}", ""), world_size=1)
    calls: Counter[str] = Counter()
    with built_model(args, torch.device("cpu")) as (chunk, _):
        named = list(weights.named_parameters([chunk], [0]))
        weights.initialize(named, model.initial_weights(args), tp_rank=0, tp_size=1)
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
