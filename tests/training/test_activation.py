"""The MLP's activation is the flags' affair, not the device's."""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

from hetero.plan import Mesh, Plan
from megatron.training.arguments import parse_args
from megatron.training.model import transformer_config
from tests.training.arguments.conftest import command_line

X = torch.linspace(-4, 4, 33)


def activation(flags: str) -> torch.Tensor:
    """Of `X`, without an accelerator."""
    args = parse_args(command_line(flags, ""), world_size=1)
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
