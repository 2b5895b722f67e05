"""Recomputation: gradients stay the same bits, and what the flags name is computed twice."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from hetero.groups import build_groups
from megatron.training import model, weights
from megatron.training.arguments import parse_args
from megatron.training.core_private import clear_groups, group_collection, register_groups
from megatron.training.cpu_shim import cpu_shim
from megatron.training.layout import plan_from_args
from tests.training.arguments.conftest import command_line

SHAPE = (
    "--num-layers 4 --padded-vocab-size 100 --position-embedding-type rope --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --disable-bias-linear"
)
FULL = "--recompute-granularity full"


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Real process groups of one rank: megatron-core reduces its loss over one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with cpu_shim():
            yield
    finally:
        clear_groups()
        dist.destroy_process_group()


def _build(args: Namespace) -> torch.nn.Module:
    plan = plan_from_args(args, vendor="cpu")
    short = timedelta(seconds=30)
    groups = build_groups(plan, 0, vendor_backend="gloo", timeout=short, crossing_timeout=short)
    register_groups(groups, plan, 0)
    config = model.transformer_config(args, plan, torch.device("cpu"))
    config.use_cpu_initialization = True
    chunk = model.build_chunk(
        args,
        config,
        plan=plan,
        coordinate=plan.coordinate(0),
        chunk=0,
        groups=group_collection(groups),
    )
    named = list(weights.named_parameters([chunk], [0]))
    weights.initialize(named, model.initial_weights(args), tp_rank=0, tp_size=1)
    return chunk


def _train_step(flags: str) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Every gradient of one step, and how often each module was computed."""
    args = parse_args(command_line(f"{SHAPE} {flags}", ""), world_size=1)
    chunk = _build(args)
    calls: Counter[str] = Counter()
    for name, module in chunk.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    tensor_parallel.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    torch.manual_seed(1)
    tokens = torch.arange(32).repeat(2, 1)
    losses = chunk(tokens, tokens, None, labels=tokens)
    losses.mean().backward()
    grads = {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}
    return grads, calls


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
