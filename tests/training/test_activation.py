"""The MLP's activation is the flags' affair, not the device's."""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

from hetero.plan import Mesh, Plan
from megatron.training.arguments import parse_args
from megatron.training.model import transformer_config

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 10"
)
X = torch.linspace(-4, 4, 33)


def activation(flags: str) -> torch.Tensor:
    """Of `X`, without an accelerator."""
    args = parse_args(f"{FLAGS} {flags}".split(), world_size=1)
    plan = Plan(meshes=(Mesh(vendor="cpu", stages=1),), layers=((1,),))
    config = transformer_config(args, plan, torch.device("cpu"))
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
