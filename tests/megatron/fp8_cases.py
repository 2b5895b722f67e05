"""What tests of fp8 share: types, recipes, and how close a product is."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.hetero.fp8_operands import DELAYED, ROWWISE, TENSORWISE, Recipe, Types

CPU = torch.device("cpu")
TYPES = {"fn": Types.of(CPU, "nvidia"), "fnuz": Types.of(CPU, "amd")}
SCALINGS = (DELAYED, TENSORWISE, ROWWISE)


def recipe(types: Types, scaling: str = TENSORWISE, **more: Any) -> Recipe:
    return Recipe(scaling=scaling, forward=types.e4m3, gradient=types.e5m2, **more)


def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The ratio of signal to noise."""
    noise = (found.detach().double() - exact.detach().double()).norm()
    return 20 * math.log10(float(exact.detach().double().norm() / noise))
