"""What tests of fp8 share: types, recipes, matrices, layers, and how close a product is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron.hetero import fp8
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.fp8_operands import (
    DELAYED,
    INPUT,
    ROWWISE,
    TENSORWISE,
    Operand,
    Recipe,
    Types,
)
from megatron.hetero.fp8_scaling import LayerScaling
from megatron.hetero.grouped_experts import GroupedLinear

CPU = torch.device("cpu")
TYPES = {"fn": Types.of(CPU, "nvidia"), "fnuz": Types.of(CPU, "amd")}
SCALINGS = (DELAYED, TENSORWISE, ROWWISE)
TOKENS, WIDTH, OUTPUTS = 64, 128, 96
EXPERTS = 4


def recipe(types: Types, scaling: str = TENSORWISE, **more: Any) -> Recipe:
    return Recipe(scaling=scaling, forward=types.e4m3, gradient=types.e5m2, **more)


def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The ratio of signal to noise."""
    noise = (found.detach().double() - exact.detach().double()).norm()
    return 20 * math.log10(float(exact.detach().double().norm() / noise))


def matrices(device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and output gradient, bf16."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((TOKENS, WIDTH), (OUTPUTS, WIDTH), (TOKENS, OUTPUTS))
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    x, weight, grad = (each.to(device, torch.bfloat16) for each in drawn)
    return x.requires_grad_(), (weight * 0.02).detach().requires_grad_(), grad * 1e-5


def backward(
    layer: LayerScaling, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **how: Any
) -> torch.Tensor:
    output = fp8.linear(layer, x, weight, None, training=True, **how)
    output.backward(grad)
    return output.detach()


def grouped_linear() -> GroupedLinear:
    config = SimpleNamespace(
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        expert_model_parallel_size=1,
    )
    sizes = {"experts": EXPERTS, "inputs": WIDTH, "outputs": OUTPUTS}
    with cpu_shim():
        return GroupedLinear(config, **sizes, split=0, ranks=1)  # type: ignore[arg-type]


class Delayed:
    """One layer with delayed scales, and what it is given step by step."""

    def __init__(self, layers: int = 1, **more: Any) -> None:
        modules = [torch.nn.Module() for _ in range(layers)]
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        with mock.patch.dict(fp8._CLASSES, {torch.nn.Module: torch.nn.Module}):
            self.layers = fp8.Fp8Layers(
                [(f"decoder.layers.{n}.mlp.linear_fc1", one) for n, one in enumerate(modules)],
                recipe(TYPES["fn"], DELAYED, **more),
                group=alone,  # type: ignore[arg-type]
                device=CPU,
            )
        self.layer: LayerScaling = modules[0].fp8  # type: ignore[assignment]
        self.maxima: torch.Tensor = modules[0].fp8_amax_history  # type: ignore[assignment]

    def see(self, *values: float, role: int = INPUT) -> Operand:
        x = torch.tensor([values], dtype=torch.bfloat16)
        return self.layer.operands(role, x)[0]

    def step(self, *values: float, role: int = INPUT) -> Operand:
        operand = self.see(*values, role=role)
        self.layers.end_step()
        return operand
